// The common part of the kernels of a large combine: headers, and rows that one warp sends alone.
#pragma once

#include "../rounds/combine.cuh"
#include "fetch.cuh"

namespace pplx::cuda {
namespace {

// Takes this block's share, and sends headers and offers that are not sent yet, by one warp. Their shares follow those of weights.
// Remote peers get a header with each round instead.
__device__ inline void begin_to_send(const CombineArguments& a, std::uint32_t step, CombineShared& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, set = set_of(k.c, step);
  if (lane == 0) s.mine = take_share(k, Op::Combine, blockIdx.x, step);
  s.claimed.set();
  for (std::uint32_t n = remote_peers(k) + lane; n < k.living; n += 32) {
    if (!take_share(k, Op::Weights, kMaxPeers + n, step)) continue;
    const std::uint32_t peer = k.order[n], rows = a.release ? 0 : s.rows_begin[peer + 1] - s.rows_begin[peer];
    std::uint32_t flags = flags_of(a) | (*a.received.overflowed != 0 ? kOverflowed : 0u);
    if (is_offered(a, s, peer)) {
      flags |= kOffered;
      const std::uint64_t at = a.made_at + std::uint64_t{s.rows_begin[peer]} * k.row_bytes;
      fence_system();  // experts' kernels have written
      fuzz_delay(k, at);
      store_tagged(k, k.peers[peer] + k.heap.offer_at(k.c, set, k.c.rank), step, static_cast<std::uint32_t>(at),
                   static_cast<std::uint32_t>(at >> 32), 0);
    }
    fuzz_delay(k, rows);
    store_tagged(k, block_for(k, set, Op::Combine, peer), step, rows, flags, k.c.rank);
  }
  __syncwarp();
}

__device__ inline void receive_all_headers(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  for (std::uint32_t i = remote_peers(k) + threadIdx.x % 32 * gridDim.x + blockIdx.x; i < k.living; i += 32 * gridDim.x)
    receive_header(a, step, k.order[i]);
  __syncwarp();
}

// Sends a run's rows one after the other, by one warp: rows that show by themselves, or a run of which some row has no place.
template <typename T>
__device__ __noinline__ void send_run_alone(const CombineArguments& a, std::uint32_t step, const RowRun& run,
                                            const CombineShared& s) {
  const Common& k = a.common;
  for (std::uint32_t i = 0; i < run.rows; ++i) {
    char* const row = block_for(k, set_of(k.c, step), Op::Combine, run.source) + k.combine.row_at(run.first + i);
    Places places;
    places.load<true>(a, s.rows_begin[run.source] + run.first + i);
    const std::uint32_t n = places.check(a);
    for (std::uint32_t at = 0; at < k.row_bytes; at += strip_bytes(kSentVectors)) {
      const std::uint32_t begin = at + threadIdx.x % 32 * 16;
      Sums<T, kSentVectors> sums;
      sum_row(a, places, n, begin, k.row_bytes, sums);
      sums.send(row, begin, k.row_bytes);
      fuzz_delay(k, std::uint64_t{step} << 32 | at);
    }
    __syncwarp();
    if (has_many(s, run.source) && threadIdx.x % 32 == 0) publish(k, row + k.combine.arrival_at, arrival_word(k.generation, step));
  }
}

}  // namespace
}  // namespace pplx::cuda
