// Where a row goes, and all that goes with it but its payload.
#pragma once

#include "counts.cuh"

namespace pplx::cuda {

// A row as a warp sees it: lane i has choice i.
struct ArrivedRow {
  std::uint32_t source, at;  // at: among the rows of all sources
  std::uint32_t token, choices;  // choices: a bit each
  std::uint32_t expert, out_row;  // this lane's choice's; out_row is kNone if the choice is not here or the output is too small
  float weight;
};

// Finds the output row of this lane's choice. place: the route's, if the choice is here. False: the source must not send it.
__device__ inline bool find_place(const DispatchArguments& a, bool here, std::uint32_t place, const Experts& e, ArrivedRow& r) {
  const Common& k = a.common;
  const bool compact = k.c.layout == LayoutKind::Compact;
  r.expert = route_expert(place);
  r.out_row = compact && r.at < k.c.max_rows ? r.at : kNone;
  bool good = r.choices != 0 && (!here || r.expert < k.experts);
  if (good && here && !compact) {
    const std::uint32_t begin = e.at(r.source, r.expert), end = e.at(r.source + 1, r.expert), at = begin + route_index(place);
    good = at - begin < end - begin;
    const bool fits = k.c.layout == LayoutKind::Padded ? at - r.expert * k.c.max_per_expert < k.c.max_per_expert : at < k.c.max_rows;
    if (good && fits) r.out_row = at;
  }
  return good;
}

// False: the row is not one that this peer may send. `vec16`: of the route, this lane's choice.
__device__ inline bool read_route(const DispatchArguments& a, std::uint32_t step, const uint4& vec16, const Experts& e,
                                  ArrivedRow& r) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const bool here = lane < k.c.top_k && vec16.x != kNowhere;
  r.token = __shfl_sync(~0u, vec16.z, 0);
  r.choices = __ballot_sync(~0u, here);
  r.weight = __uint_as_float(vec16.y);
  if (__all_sync(~0u, find_place(a, here, vec16.x, e, r))) return true;
  if (lane == 0) fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, r.source, step}, r.at, r.choices);
  return false;
}

// The lanes whose places get a copy of the row.
__device__ inline std::uint32_t copies_of(const Common& k, const ArrivedRow& r) {
  return k.c.layout == LayoutKind::Compact ? (r.out_row != kNone ? 1u : 0u) : __ballot_sync(~0u, r.out_row != kNone);
}

// Places everything that goes with a row, except its payload. lane: among those of the row.
__device__ inline void place_words(const DispatchArguments& a, const ArrivedRow& r, std::uint32_t lane = threadIdx.x % 32) {
  const Common& k = a.common;
  const std::uint64_t at = r.at;
  const bool here = (r.choices >> lane & 1) != 0, compact = k.c.layout == LayoutKind::Compact;
  if (lane == 0) a.received.choices[at] = r.choices;
  if (compact && lane == 0) a.received.out_row[at] = r.out_row;
  if (!compact && here) {
    const std::uint64_t entry = at * k.c.top_k + __popc(r.choices & ((1u << lane) - 1));
    a.received.out_row[entry] = r.out_row;
    a.received.weight[entry] = r.weight;
  }
  if (r.out_row == kNone) return;
  if (compact && lane < k.c.top_k) {
    a.out.topk_ids[at * k.c.top_k + lane] = here ? static_cast<std::int32_t>(r.expert) : -1;
    a.out.topk_weights[at * k.c.top_k + lane] = here ? r.weight : 0.0f;
  }
  if (compact ? lane != 0 : !here) return;
  if (!compact) a.out.weights[r.out_row] = r.weight;
  a.out.src_rank[r.out_row] = static_cast<std::int32_t>(r.source);
  a.out.src_token[r.out_row] = static_cast<std::int32_t>(r.token);
}

__device__ inline char* scale_place(const DispatchArguments& a, std::uint32_t place, std::uint32_t expert) {
  const bool padded = a.common.c.layout == LayoutKind::Padded;
  const std::uint32_t group = padded ? expert : 0;
  return a.out.scales + group * a.out.scale.group + std::uint64_t{place - group * a.common.c.max_per_expert} * a.out.scale.row;
}

// The words of scales [first, first + 4), of the scales that begin at `to`, anywhere: by column, or in rows of any length.
static __device__ __noinline__ void store_scale_words(const DispatchArguments& a, char* to, std::uint32_t first, uint4 words) {
  const Common& k = a.common;
  const std::uint32_t each = scale_bytes_each(k.c.wire), scales = scales_per_row(k.c);
#pragma unroll 1
  for (std::uint32_t i = 0; i < 16; i += each) {
    const std::uint32_t j = 4 * first / each + i / each, pair = i < 8 ? i : i - 8;
    const std::uint64_t half = i < 8 ? words.x | std::uint64_t{words.y} << 32 : words.z | std::uint64_t{words.w} << 32;
    if (j >= scales) return;
    char* place = to + j * a.out.scale.scale;
    if (each == 4)
      *reinterpret_cast<std::uint32_t*>(place) = static_cast<std::uint32_t>(half >> 8 * pair);
    else
      *place = static_cast<char>(half >> 8 * pair);
  }
}

// `vec16`: this lane's four words of scales, of which it has the nth. to: where the row's scales begin.
__device__ inline void place_scale(const DispatchArguments& a, char* to, const uint4& vec16, std::uint32_t nth) {
  const Common& k = a.common;
  if (nth >= k.scale_vec16s) return;
  if (k.scales_in_pieces)
    store16(to + 16 * nth, vec16);
  else
    store_scale_words(a, to, 4 * nth, vec16);
}

// Ragged(zero_pad=True): a warp clears the rows between this expert's last and the next one's first.
template <bool kHooks>
__device__ inline void zero_padding(const DispatchArguments& a, const Experts& e, std::uint32_t expert, std::uint32_t needed) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, bytes = k.payload_bytes;
  const std::uint32_t end = expert + 1 < k.experts ? e.at(0, expert + 1) : needed;
  for (std::uint32_t place = e.at(k.c.world, expert); place < min(end, k.c.max_rows); ++place) {
    for (std::uint32_t at = lane * 16; at < bytes; at += 512)
      store_words(a.out.x + std::uint64_t{place} * bytes + at, make_uint4(0, 0, 0, 0), min(16u, bytes - at));
    for (std::uint32_t j = 4 * lane; quantised(k.c.wire) && j < scale_words(k.c); j += 4 * 32)
      store_scale_words(a, scale_place(a, place, 0), j, make_uint4(0, 0, 0, 0));
    if (lane == 0) {
      a.out.weights[place] = 0.0f;
      a.out.src_rank[place] = a.out.src_token[place] = -1;
    }
  }
  if constexpr (kHooks) HookWords<kHooks>::count_cleared(a, e.at(k.c.world, expert), min(end, k.c.max_rows));
}

}  // namespace pplx::cuda
