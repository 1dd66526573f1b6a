// The common part of the kernels of a large combine: headers.
#pragma once

#include "../decode/combine_recv.cuh"
#include "../rounds/combine.cuh"
#include "tuning.h"

namespace pplx::cuda {
namespace {

// Takes this block's share, and sends headers that are not sent yet, by one warp. Their shares follow those of weights.
// Remote peers get a header with each round instead.
__device__ inline void begin_to_send(const CombineArguments& a, std::uint32_t step, CombineShared& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, set = set_of(k.c, step);
  if (lane == 0) s.mine = take_share(k, Op::Combine, blockIdx.x, step);
  s.claimed.set();
  for (std::uint32_t n = remote_peers(k) + lane; n < k.living; n += 32) {
    if (!take_share(k, Op::Weights, kMaxPeers + n, step)) continue;
    const std::uint32_t peer = k.order[n], rows = a.release ? 0 : s.rows_begin[peer + 1] - s.rows_begin[peer];
    const std::uint32_t flags = flags_of(a) | (*a.received.overflowed != 0 ? kOverflowed : 0u);
    fuzz_delay(k, rows);
    store_tagged(k, block_for<true>(k, set, Op::Combine, peer), step, rows, flags, k.c.rank);
  }
  __syncwarp();
}

__device__ inline void receive_all_headers(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  for (std::uint32_t i = remote_peers(k) + threadIdx.x % 32 * gridDim.x + blockIdx.x; i < k.living; i += 32 * gridDim.x)
    receive_header(a, step, k.order[i]);
  __syncwarp();
}

}  // namespace
}  // namespace pplx::cuda
