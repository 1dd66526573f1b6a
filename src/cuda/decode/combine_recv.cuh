// combine_recv: a warp per strip of a token takes it from each of its rows, and adds them, ranks ascending, or by node. Every
// peer's header is waited for too: it says that the peer has read this rank's dispatch.
#pragma once

#include "combine_send.cuh"

namespace pplx::cuda {

// Returns true if a header is what this rank expects; fails otherwise.
__device__ inline bool check_combine_header(const CombineArguments& a, std::uint32_t step, std::uint32_t peer, std::uint32_t rows,
                                            std::uint32_t its_flags) {
  const Common& k = a.common;
  const std::uint32_t expected = a.release ? 0 : a.plan.rows[peer], flags = flags_of(a);
  if ((its_flags & kOverflowed) != 0) k.report->notices.overflowed = 1 + peer;
  if ((its_flags & kFlagsAlike) != flags) return blame(k, Phase::CombineRecv, step, peer, kFlags | flags, its_flags);
  return rows == expected || blame(k, Phase::CombineRecv, step, peer, expected, rows);
}

__device__ inline void receive_header(const CombineArguments& a, std::uint32_t step, std::uint32_t peer) {
  const Common& k = a.common;
  uint4 vec16;
  const std::uint64_t begun = nanoseconds();
  if (!await_tagged(k, own_slot<true>(k, set_of(k.c, step), Op::Combine, peer), Phase::CombineRecv, step, peer, vec16)) return;
  count_wait(k, Op::Combine, peer, nanoseconds() - begun);
  if (vec16.z == peer)
    check_combine_header(a, step, peer, vec16.x, vec16.y);
  else
    fail(k, {AbortReason::Protocol, Phase::CombineRecv, k.c.rank, peer, step}, peer, vec16.z);
}

// Returns this lane's row of one of this rank's tokens, or kNone. The plan is known before the send half, so it is loaded early.
__device__ inline std::uint32_t load_token_row(const CombineArguments& a, std::uint32_t unit) {
  const std::uint32_t lane = threadIdx.x % 32, token = a.received_in.by_strips.divide(unit);
  return lane < a.common.c.top_k && token < a.own && !a.release
             ? a.plan.token_rows[std::uint64_t{token} * a.common.c.top_k + lane]
             : kNone;
}

// A warp's strip of a few rows of a token: a node's peer leaves no other trace than its row, and a place is blank again once it
// was read; a remote peer's rows are there when their part of its block is.
template <int kVectors>
struct ArrivingStrips {
  static constexpr int kRows = 4;
  std::uint32_t begin, end;  // begin: this lane's
  uint4 v[kRows][kVectors] = {};
  char* row[kRows];
  std::uint32_t there = 0;  // rows of remote blocks, whose places need not be blank again: a bit each
  std::uint32_t missing = 0;  // vec16s, a bit each

  __device__ ArrivingStrips(std::uint32_t begin, std::uint32_t end) : begin(begin), end(end) {}
  __device__ bool has(int j) const { return begin + j * 512 < end; }

  __device__ bool look(bool all) {
    const std::uint32_t bits = looked_at(missing, all);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        if ((bits >> (i * kVectors + j) & 1) != 0) v[i][j] = load_vec16(row[i] + begin + j * 512);
    // All are checked, asked for or not: for want of predicates the compiler would wait for one before it loads the others.
    std::uint32_t blank = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kVectors; ++j) blank |= (is_blank(v[i][j]) ? 1u : 0u) << (i * kVectors + j);
    missing &= blank;
    return (missing & bits) == 0;
  }
  __device__ void make_places_blank() const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (row[i] == nullptr || (there >> i & 1) != 0) continue;
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        if (has(j)) make_blank(row[i] + begin + j * 512);
    }
  }
};

// Loads a lane's numbers of an answer that came as codes, each with the scale of its 128.
template <typename T>
__device__ inline uint4 load_codes(const Relays& r, const char* row, std::uint32_t begin) {
  const std::uint32_t element = begin * T::kPerVector / 16;
  const float scale = __ldcg(reinterpret_cast<const float*>(row + r.answer.scales_at) + element / scale_block(Wire::FP8));
  return numbers_of<T>([&](std::uint32_t i) { return __ldcg(reinterpret_cast<const std::uint32_t*>(row + element) + i); }, scale);
}

// The rows first, first + 1 ... of a token's n. Each of the first n lanes has a row and its rank. False: they will not come.
template <bool kMappedOnly, typename T = void, int kVectors>
__device__ inline bool await_strips(const CombineArguments& a, std::uint32_t step, std::uint32_t first, std::uint32_t n, char* row,
                                    std::uint32_t entry, ArrivingStrips<kVectors>& strips) {
  const Common& k = a.common;
  const std::uint32_t rank = entry >> 20;
#pragma unroll
  for (int i = 0; i < strips.kRows; ++i) {
    strips.row[i] = nullptr;
    if (first + i >= n) continue;
    strips.row[i] = of_lane(row, static_cast<int>(first + i));
    const std::uint32_t source = kMappedOnly ? 0 : __shfl_sync(~0u, rank, first + i);
    if constexpr (!kMappedOnly)
      if (is_remote(k, source)) {
        const std::uint32_t at = __shfl_sync(~0u, entry, first + i) & 0xfffffu;
        if (!CombineExtras<kMappedOnly>::await_remote_row(k, step, source, at)) return false;
        strips.there |= 1u << i;
      }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (!strips.has(j)) continue;
      if constexpr (!kMappedOnly)
        if (k.c.combine_fp8 && (strips.there >> i & 1) != 0) {
          strips.v[i][j] = load_codes<T>(a.relays, strips.row[i], strips.begin + j * 512);
          continue;
        }
      if ((strips.there >> i & 1) != 0)
        strips.v[i][j] = load_arrived(strips.row[i] + strips.begin + j * 512);
      else
        strips.missing |= 1u << (i * kVectors + j);
    }
  }
  const auto waits_for = [&] {
    const std::uint32_t all = __reduce_or_sync(~0u, strips.missing);
    return __shfl_sync(~0u, rank, all == 0 ? first : first + (__ffs(static_cast<int>(all)) - 1) / kVectors);
  };
  return await_vec16s(k, Phase::CombineRecv, step, waits_for, [&](bool all) { return strips.look(all); });
}

// A strip of one of this rank's tokens. `entry`: this lane's row of it. kGives: replicas get it, too. when_there(): called once its rows
// have come. False: they will not.
template <typename T, bool kGives, bool kMappedOnly, int kVectors, typename WhenThere>
__device__ inline bool receive_strip(const CombineArguments& a, std::uint32_t step, std::uint32_t unit, std::uint32_t entry,
                                     const WhenThere& when_there) {
  const Common& k = a.common;
  const std::uint32_t own = a.received_in.by_strips.divide(unit), strip = unit - own * a.received_in.strips;
  std::uint32_t ends = 0;
  if constexpr (!kMappedOnly) ends = CombineExtras<kMappedOnly>::order_by_node(a, entry);
  const std::uint32_t n = __popc(__ballot_sync(~0u, entry != kNone)), rank = entry >> 20;
  char* row = nullptr;
  if (entry != kNone) {
    const bool answered = !kMappedOnly && is_remote(k, rank);
    row = own_slot<kMappedOnly>(k, set_of(k.c, step), Op::Combine, rank) +
          (answered ? a.relays.answer : k.combine).row_at(entry & 0xfffffu);
  }
  const std::uint32_t bytes = a.received_in.bytes();
  const std::uint32_t begin = strip * bytes + threadIdx.x % 32 * 16, end = min(k.row_bytes, (strip + 1) * bytes);
  char* y = a.y + std::uint64_t{k.slice.token(own)} * a.y_stride;
  Sums<T, kVectors> sums, of_node;
  if constexpr (!kMappedOnly) of_node.start(-0.0f);
  if (a.accumulate) sums.load(y, begin, end);
  for (std::uint32_t first = 0; first < n; first += ArrivingStrips<kVectors>::kRows) {
    ArrivingStrips<kVectors> strips(begin, end);
    if (!await_strips<kMappedOnly, T>(a, step, first, n, row, entry, strips)) return false;
    mark_stage(k, step, Stage::Came);
#pragma unroll
    for (int i = 0; i < strips.kRows; ++i) {
      if (strips.row[i] == nullptr) continue;
      if (kMappedOnly || ends == 0) {
        sums.add_row(strips.v[i], 1.0f);
      } else if constexpr (!kMappedOnly) {
        of_node.add_row(strips.v[i]);
        if ((ends >> (first + i) & 1) != 0) CombineExtras<kMappedOnly>::add_node(sums, of_node);
      }
    }
    strips.make_places_blank();
  }
  when_there();
  sums.store(y, begin, end);
  mark_stage(k, step, Stage::Added);
  if constexpr (kGives) CombineExtras<kMappedOnly>::give_strip(k, step, own, sums, begin, end);
  if constexpr (!kMappedOnly)
    if (a.has_tail && strip == a.received_in.strips - 1)
      return CombineExtras<kMappedOnly>::template read_tail<kGives>(a, step, own, n, row, rank);
  return true;
}

// A thread block's nth unit, which its warps take in turn. Neighbours go to different multiprocessors.
__device__ inline std::uint32_t receive_unit(std::uint32_t nth) { return nth * gridDim.x + blockIdx.x; }

// Returns the first unit of a warp, before any claim. The first warp, which looks for untaken shares, comes last.
__device__ inline std::uint32_t first_of_warp() { return (threadIdx.x / 32 + kCombineWarps - 1) % kCombineWarps; }

// Peers' headers, by the last warps, which have the least to do with a small step.
template <bool kMappedOnly>
__device__ inline void receive_headers(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const std::uint32_t last = (kCombineWarps - 1 - first_of_warp()) * gridDim.x + gridDim.x - 1 - blockIdx.x;
  for (std::uint32_t i = last; i < k.living; i += kCombineWarps * gridDim.x)
    if (threadIdx.x % 32 == 0 && (kMappedOnly || !is_remote(k, k.order[i]))) receive_header(a, step, k.order[i]);
}

// Receives what is this warp's, and the peers' headers.
template <typename T, bool kMappedOnly, int kVectors>
__device__ inline void receive_combine(const CombineArguments& a, std::uint32_t step, CombineShared& s) {
  const Common& k = a.common;
  if constexpr (!kMappedOnly) {
    if (k.remote != 0) CombineExtras<kMappedOnly>::receive_headers(a, step);
    if (a.relays.sources != 0 && !CombineExtras<kMappedOnly>::template answer_sources<T>(a, step)) return;
    if (k.slice.of > 1) {
      if (a.release || CombineExtras<kMappedOnly>::template receive_with_replicas<T>(a, step))
        receive_headers<kMappedOnly>(a, step);
      return;
    }
  }
  receive_headers<kMappedOnly>(a, step);
  constexpr int kWide = kMappedOnly && kVectors == kReceivedVectors ? kReceivedVectorsOfCopies : kVectors;
  const bool wide = kWide > kVectors && a.received_in.vectors > kVectors;
  const std::uint32_t units = a.release ? 0 : a.own * a.received_in.strips;
  std::uint32_t nth = first_of_warp(), unit = receive_unit(nth), entry = s.entries[threadIdx.x];
  while (nth * gridDim.x < units) {
    const auto take_next = [&] {  // not before: whose rows come first has more
      nth = of_first_lane([&] { return atomicAdd(&s.received, 1u); });
      unit = receive_unit(nth);
      if (nth * gridDim.x < units) entry = load_token_row(a, unit);
    };
    if (unit >= units)
      take_next();
    else if (!(wide ? receive_strip<T, false, kMappedOnly, kWide>(a, step, unit, entry, take_next)
                    : receive_strip<T, false, kMappedOnly, kVectors>(a, step, unit, entry, take_next)))
      return;
  }
}

}  // namespace pplx::cuda
