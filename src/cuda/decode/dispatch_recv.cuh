// dispatch_recv of few tokens: two warps find out where rows go. The others fetch parts of rows, and copy each to its output rows.
#pragma once

#include "../common/arrival.cuh"
#include "../common/relays.cuh"
#include "../plan/output_rows.cuh"

namespace pplx::cuda {

// A warp's part of a row, loaded before it is known where it goes: vec16s of payload, of the route, with the last part of scales.
struct ArrivedPart {
  static constexpr std::uint32_t kVectors = kPartBytes / 512;
  static constexpr std::uint32_t kScale = kVectors, kRoute = kVectors + 1;  // bits
  const char* row;
  std::uint32_t begin, end;  // bytes of payload; begin: this lane's
  bool full;  // every lane has all vectors
  uint4 payload[kVectors] = {}, scale = {}, route = {};
  std::uint32_t wanted = 0, missing = 0;  // a bit each

  __device__ ArrivedPart(const Common& k, const char* row, std::uint32_t part) : row(row) {
    const std::uint32_t lane = threadIdx.x % 32;
    begin = part * k.part_bytes + lane * 16;
    end = min(k.payload_bytes, (part + 1) * k.part_bytes);
    full = part * k.part_bytes + kPartBytes <= end && k.payload_bytes % 16 == 0;
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if (begin + j * 512 < end) wanted |= 1u << j;
    if (part == k.parts - 1 && lane < k.scale_vec16s) wanted |= 1u << kScale;
    if (lane < k.c.top_k) wanted |= 1u << kRoute;
    missing = wanted;
  }
  __device__ const char* scale_at(const Common& k) const { return row + k.dispatch.scales_at + threadIdx.x % 32 * 16; }
  // Loads those of `bits`. Mostly that is all of them: then no load has a predicate, of which there are too few, and lanes that want less
  // load what others do.
  __device__ void load(const Common& k, std::uint32_t bits) {
    const char* const route_at = row + k.dispatch.route_at + min(threadIdx.x % 32, k.c.top_k - 1) * 16;
    if (full && bits == wanted) {
#pragma unroll
      for (std::uint32_t j = 0; j < kVectors; ++j) payload[j] = load_vec16(row + begin + j * 512);
      scale = load_vec16((bits >> kScale & 1) != 0 ? scale_at(k) : route_at);
      route = load_vec16(route_at);
      return;
    }
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if ((bits >> j & 1) != 0) payload[j] = load_vec16(row + begin + j * 512);
    if ((bits >> kScale & 1) != 0) scale = load_vec16(scale_at(k));
    if ((bits >> kRoute & 1) != 0) route = load_vec16(route_at);
  }
  __device__ bool look(const Common& k, std::uint32_t step, bool all) {
    const std::uint32_t bits = looked_at(missing, all);
    load(k, bits);
    std::uint32_t not_there = 0;  // all are checked, asked for or not: see ArrivingStrips
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j) not_there |= (is_blank(payload[j]) ? 1u : 0u) << j;
    not_there |= (is_blank(scale) ? 1u : 0u) << kScale | (is_tagged(k, route, step) ? 0u : 1u) << kRoute;
    missing &= not_there;
    return (missing & bits) == 0;
  }
  __device__ void make_places_blank(const Common& k) const {
    char* to = const_cast<char*>(row) + begin;
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if (full || (wanted >> j & 1) != 0) make_blank(to + j * 512);
    if ((wanted >> kScale & 1) != 0) make_blank(const_cast<char*>(scale_at(k)));
  }
  // To a row of the output.
  __device__ void place(const Common& k, char* out) const {
    out += begin;
    if (full) {
#pragma unroll
      for (std::uint32_t j = 0; j < kVectors; ++j) store16(out + j * 512, payload[j]);
      return;
    }
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if ((wanted >> j & 1) != 0) {
        if (k.payload_bytes % 16 == 0)
          store16(out + j * 512, payload[j]);
        else
          store_words(out + j * 512, payload[j], min(16u, k.payload_bytes - begin - j * 512));
      }
  }
};

// To every place of the row: each lane finds out where its choice's copy goes.
__device__ inline void place_copies(const DispatchArguments& a, const ArrivedRow& r, const ArrivedPart& part, bool with_scales) {
  const Common& k = a.common;
  char *row = nullptr, *scales = nullptr;
  if (r.out_row != kNone) {
    row = a.out.x + std::uint64_t{r.out_row} * k.payload_bytes;
    if (with_scales) scales = scale_place(a, r.out_row, r.expert);
  }
#pragma unroll 1
  for (std::uint32_t copies = copies_of(k, r); copies != 0; copies &= copies - 1) {
    const int of = __ffs(static_cast<int>(copies)) - 1;
    part.place(k, of_lane(row, of));
    if (!with_scales) continue;
    char* const to = of_lane(scales, of);
    place_scale(a, to, part.scale, threadIdx.x % 32);
#pragma unroll 1
    for (std::uint32_t nth = 32 + threadIdx.x % 32; nth < k.scale_vec16s; nth += 32)  // more than a warp has lanes
      place_scale(a, to, load_arrived(part.row + k.dispatch.scales_at + 16 * nth), nth);
  }
}

// Waits for a part of a row. False: it will not come.
__device__ inline bool fetch_part(const Common& k, std::uint32_t step, std::uint32_t source, bool shows, ArrivedPart& part) {
  if (!shows) {
    bool good = true;
    if (threadIdx.x % 32 == 0) good = wait<Match::Exact>(k, part.row + k.dispatch.arrival_at, Phase::DispatchRecv, step, source);
    if (!all_of_warp(good)) return false;
    part.load(k, part.wanted);
    return true;
  }
  std::uint32_t looks = 0;
  const auto look = [&](bool all) {
    // Some vec16 of the row may look blank although it came: then its writer raises a word.
    if (++looks % kLooksAtWord == 0 && load_acquire(part.row + k.dispatch.arrival_at) == arrival_word(k.generation, step)) {
      part.load(k, part.wanted);
      part.missing = 0;
    }
    return part.look(k, step, all);
  };
  return await_vec16s(k, Phase::DispatchRecv, step, [&] { return source; }, look);
}

// A part of a row. False: something failed.
template <bool kMappedOnly, bool kHooks>
__device__ inline bool receive_part(const DispatchArguments& a, std::uint32_t step, std::uint32_t unit, ReceiveShared& s,
                                    const Experts& e) {
  const Common& k = a.common;
  ArrivedRow r;
  r.at = k.by_parts.divide(unit);
  const std::uint32_t nth = unit - r.at * k.parts;
  r.source = 0;
  while (s.rows_begin[r.source + 1] <= r.at) ++r.source;
  const std::uint32_t number = r.at - s.rows_begin[r.source];
  const char* row = own_slot<kMappedOnly>(k, set_of(k.c, step), Op::Dispatch, r.source) + k.dispatch.row_at(number);
  const bool mapped = kMappedOnly || !is_remote(k, r.source), shows = mapped && number < s.showing[r.source];
  if constexpr (!kMappedOnly)
    if (!mapped && (row = DispatchExtras<kMappedOnly>::find_far_row(a, step, r.source, number)) == nullptr) return false;
  ArrivedPart part(k, row, nth);
  if (mapped && !fetch_part(k, step, r.source, shows, part)) return false;
  if (!mapped) part.load(k, part.wanted);
  if (!mapped && has_relays(k) && part.route.w != k.c.rank) part.route.x = kNowhere;  // a mate's choice
  mark_stage(k, step, Stage::RowThere);
  s.placed.wait();
  if (!s.placed_all || !read_route(a, step, part.route, e, r)) return false;
  place_copies(a, r, part, quantised(k.c.wire) && nth == k.parts - 1);
  if (nth == 0) place_words(a, r);
  if constexpr (kHooks) HookWords<kHooks>::count_placed(a, r.out_row, 1);
  if (mapped && number < k.showing_rows) part.make_places_blank(k);
  mark_stage(k, step, Stage::RowPlaced);
  return true;
}

// In a step of many tokens: n rows of a source that has few, from row `first` of all sources on.
template <bool kHooks>
static __device__ __noinline__ bool receive_showing(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s,
                                                    const Experts e, std::uint32_t first, std::uint32_t n) {
  const std::uint32_t begin = first * a.common.parts;
  for (std::uint32_t unit = begin; unit < begin + n * a.common.parts; ++unit)
    if (!receive_part<true, kHooks>(a, step, unit, s, e)) return false;
  return true;
}

// Receives rows, by any warp of the block that has nothing else to do.
template <bool kMappedOnly, bool kHooks, bool kPieces>
__device__ inline void receive_dispatch(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, const Experts& e) {
  const Common& k = a.common;
  s.rows_known.wait();
  if (!s.good) return;
  if constexpr (kPieces)
    if (k.heap.in_pieces && s.many != 0) return DispatchExtras<!kPieces>::template receive_rounds<kHooks>(a, step, s, e);
  const std::uint32_t rows = s.rows_begin[k.c.world] * k.parts;
  const std::uint32_t padding = k.c.zero_pad && k.c.layout == LayoutKind::Ragged ? k.experts : 0;
  for (;;) {
    // Neighbours go to different multiprocessors: small steps use them all.
    const std::uint32_t unit = of_first_lane([&] { return atomicAdd(&s.next, 1) * gridDim.x + blockIdx.x; });
    if (unit < rows) {
      if (!receive_part<kMappedOnly, kHooks>(a, step, unit, s, e)) return;
    } else if (unit < rows + padding) {
      s.placed.wait();
      if (!s.placed_all) return;
      zero_padding<kHooks>(a, e, unit - rows, s.ragged_rows);
    } else {
      return;
    }
  }
}

}  // namespace pplx::cuda
