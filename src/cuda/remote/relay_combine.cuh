// A relay's part of a combine: it adds what its mates return for each row of a source, ranks ascending, and answers the source with one
// row for each. Any warp of a block that runs takes the next unit: all sources' headers come first, then strips of their rows.
#pragma once

#include "../decode/combine_recv.cuh"
#include "../extras/weights.cuh"
#include "relay_dispatch.cuh"

namespace pplx::cuda {

// Tells the caller which ranks of the answering node had too little room.
__device__ inline void note_overflows(const CombineArguments& a, std::uint32_t relay, std::uint32_t overflowed) {
  const Common& k = a.common;
  for (std::uint32_t rank = 0; overflowed != 0 && rank < k.c.world; ++rank)
    if (a.relays.rep[rank] == relay && (overflowed >> a.relays.number[rank] & 1) != 0) k.report->notices.overflowed = 1 + rank;
}

// Waits for a mate's header, and checks it, by one thread. It gives up before the sources do.
__device__ inline bool receive_mate(const CombineArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t mate, uint4& vec16) {
  const Common& k = a.common;
  const std::uint32_t set = set_of(k.c, step), rank = a.relays.rank[mate], flags = flags_of(a);
  const char* const block = block_of_mate(k, a.relays, set, source, mate);
  Deadline deadline(k, step, nanoseconds(), kReturnsSooner);
  const auto came = [&] {
    if (is_tagged(k, vec16 = load_vec16(block), step)) return true;
    deadline.look(k, Phase::CombineRecv, step, rank, 0);
    return false;
  };
  if (!keep_looking<kLooksBetween>(k, nullptr, Phase::CombineRecv, step, rank, [] { return std::uint64_t{0}; }, came)) return false;
  fuzz_delay(k, step);
  const std::uint32_t rows = a.release ? 0 : NumbersOfNode(k, a.relays, set, source).of_mate(mate);
  if (vec16.z != rank) return blame(k, Phase::CombineRecv, step, rank, rank, vec16.z);
  if ((vec16.y & kFlagsAlike) != flags) return blame(k, Phase::CombineRecv, step, rank, kFlags | flags, vec16.y);
  return vec16.x == rows || blame(k, Phase::CombineRecv, step, rank, rows, vec16.x);
}

// Writes the answer's header once all mates' are here: a warp, a lane for each. They prove that the mates have read the node block.
// parts: a row counts as that number.
__device__ inline bool answer_header(const CombineArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t rows,
                                     std::uint32_t parts) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const bool is_mate = (a.relays.mates >> lane & 1) != 0;
  uint4 vec16 = make_uint4(0, 0, 0, 0);
  if (!all_of_warp(!is_mate || receive_mate(a, step, source, lane, vec16))) return false;
  if (a.uses_weights && !await_weights(k, step, source)) return false;
  const std::uint32_t overflowed = __ballot_sync(~0u, is_mate && (vec16.y & kOverflowed) != 0);
  write_header(k, block_for(k, set_of(k.c, step), Op::Combine, source), step, rows, flags_of(a), lane, overflowed);
  __syncwarp();
  if (lane == 0) count_header(k, step, Op::Combine, source, rows, parts);
  return true;
}

// Takes the tail of a row of the node block: each choice's from its own rank. `lanes` have a mate's row and its rank each.
__device__ inline bool answer_tail(const CombineArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t row,
                                   std::uint32_t lanes, const char* from, std::uint32_t rank, char* to) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const bool comes = (lanes >> lane & 1) != 0;
  if (!all_of_warp(!comes || wait<Match::Exact>(k, from + k.combine.arrival_at, Phase::CombineRecv, step, rank))) return false;
  uint4 route = make_uint4(kNowhere, 0, 0, kNone);
  const char* const its_route = own_slot(k, set_of(k.c, step), Op::Dispatch, source) + k.dispatch.row_at(row) + k.dispatch.route_at;
  if (lane < k.c.top_k) route = load_arrived(its_route + 16 * lane);
  std::uint32_t value = 0;
  for (; lanes != 0; lanes &= lanes - 1) {
    const int of = __ffs(static_cast<int>(lanes)) - 1;
    const auto* its_row = of_lane(from, of);
    const bool is_its = __shfl_sync(~0u, rank, of) == route.w && route.x != kNowhere;
    if (is_its) value = __ldcg(reinterpret_cast<const std::uint32_t*>(its_row + k.combine.tail_at) + lane);
  }
  if (lane < k.c.top_k) reinterpret_cast<std::uint32_t*>(to + a.relays.answer.tail_at)[lane] = value;
  return true;
}

// Stores a lane's numbers of an answer as codes (combine_wire="fp8"): load_codes() reads them. at(j): where vector j begins, in numbers'
// bytes, up to `end`.
template <typename T, int kVectors, typename At>
__device__ inline void store_codes(const Sums<T, kVectors>& sums, const At& at, std::uint32_t end, char* codes, float* scales) {
  constexpr std::uint32_t kNumbers = T::kPerVector, kTogether = scale_block(Wire::FP8), kLanes = kTogether / kNumbers;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    const std::uint32_t begin = at(j);
    float f[kNumbers] = {};
    if (begin < end) T::unpack(T::pack(sums.sum[j]), f);
    std::uint32_t largest = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < kNumbers; ++i) largest = max(largest, __float_as_uint(f[i]) & 0x7fffffffu);
#pragma unroll
    for (std::uint32_t i = 1; i < kLanes; i *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, static_cast<int>(i)));
    if (begin >= end) continue;
    const BlockScale s = block_scale(Wire::FP8, float_of(largest));
    const std::uint32_t element = begin * kNumbers / 16;
#pragma unroll
    for (std::uint32_t i = 0; i < kNumbers; i += 4)
      *reinterpret_cast<std::uint32_t*>(codes + element + i) = largest < 0x7f800000u ? four_e4m3(f + i, s.multiplier) : 0x7f7f7f7fu;
    if (element % kTogether == 0) scales[element / kTogether] = s.scale;
  }
}

template <typename T>
__device__ inline bool answer_strip(const CombineArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t rows,
                                    std::uint32_t unit) {
  const Common& k = a.common;
  const Relays& r = a.relays;
  const std::uint32_t set = set_of(k.c, step), lane = threadIdx.x % 32, strips = a.received_in.strips;
  const std::uint32_t row = a.received_in.by_strips.divide(unit), strip = unit - row * strips;
  const std::uint32_t number = (r.mates >> lane & 1) != 0 ? NumbersOfNode(k, r, set, source).of_row(row, lane) : kNone;
  std::uint32_t some = __ballot_sync(~0u, number != kNone);
  const std::uint32_t n = __popc(some);
  for (std::uint32_t i = 0; i < lane; ++i) some &= some - 1;
  // Lanes take the row's mates in order: ranks ascend with their numbers.
  const std::uint32_t mate = some != 0 ? lowest_rank(some) : 0, rank = r.rank[mate];
  const std::uint32_t its_row = __shfl_sync(~0u, number, static_cast<int>(mate));
  char* const from = lane < n ? block_of_mate(k, r, set, source, mate) + k.combine.row_at(its_row) : nullptr;
  const std::uint32_t bytes = a.received_in.bytes(), begin = strip * bytes + lane * 16, end = min(k.row_bytes, (strip + 1) * bytes);
  char* const to = block_for(k, set, Op::Combine, source) + r.answer.row_at(row);
  Sums<T, kReceivedVectors> sums;
  sums.start(-0.0f);
  for (std::uint32_t first = 0; first < n; first += ArrivingStrips<kReceivedVectors>::kRows) {
    ArrivingStrips<kReceivedVectors> arriving(begin, end);
    if (!await_strips<false, T>(a, step, first, n, from, rank << 20, arriving)) return false;
#pragma unroll
    for (int i = 0; i < ArrivingStrips<kReceivedVectors>::kRows; ++i)
      if (arriving.row[i] != nullptr) sums.add_row(arriving.v[i]);
    arriving.make_places_blank();
  }
  if (k.c.combine_fp8)
    store_codes(sums, [&](int j) { return begin + j * 512; }, end, to, reinterpret_cast<float*>(to + r.answer.scales_at));
  else
    sums.store(to, begin, end);
  if (a.has_tail && strip == strips - 1 && !answer_tail(a, step, source, row, __ballot_sync(~0u, lane < n), from, rank, to)) return false;
  __syncwarp();
  if (lane == 0) count_part(k, step, Op::Combine, source, parts_of(k, Op::Combine).part_of(row), 1, strips, RowsOfBlock(rows));
  return true;
}

// Answers this relay's sources, by any warps: calls answer(source, rows, unit) for what no warp has begun, of units_of(rows) units of rows.
// parts: as above. False: something failed.
template <typename UnitsOf, typename Answer>
__device__ inline bool answer_sources(const CombineArguments& a, std::uint32_t step, std::uint32_t parts, const UnitsOf& units_of,
                                      const Answer& answer) {
  const Common& k = a.common;
  const std::uint32_t set = set_of(k.c, step), headers = count_ranks(a.relays.sources);
  for (;;) {
    std::uint32_t unit = of_first_lane([&] { return static_cast<std::uint32_t>(atomicAdd(answers_begun(k, step), 1ull)); });
    const bool header = unit < headers;
    if (!header) unit -= headers;
    for (std::uint64_t left = a.relays.sources;; left &= left - 1) {
      if (left == 0) return true;
      const std::uint32_t source = lowest_rank(left), rows = a.release ? 0 : NumbersOfNode(k, a.relays, set, source).all();
      const std::uint32_t units = header ? 1 : units_of(rows);
      if (unit >= units) {
        unit -= units;
        continue;
      }
      if (!(header ? answer_header(a, step, source, rows, parts) : answer(source, rows, unit))) return false;
      break;
    }
  }
}

}  // namespace pplx::cuda
