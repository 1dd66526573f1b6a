// What the receive half of a dispatch in pieces does beside rows, whatever it receives them with.
#pragma once

#include "dispatch_recv.cuh"
#include "rounds.cuh"

namespace pplx::cuda {

// For a warp that knows how many rows there are: whether any source's blocks come in pieces.
__device__ inline bool any_in_pieces(const Common& k, const ReceiveShared& s) {
  bool any = false;
  for (std::uint32_t i = threadIdx.x % 32; i < k.living; i += 32) any = any || s.showing[k.order[i]] == 0;
  return __any_sync(~0u, any);
}

// By the warp that has counted rows: one thread block tells the combine, and makes its counts 0.
__device__ inline void hear_of_rounds(const DispatchArguments& a, std::uint32_t step, const ReceiveShared& s) {
  if (!reports_counts() || !s.good) return;
  const bool any = any_in_pieces(a.common, s);
  if (threadIdx.x % 32 == 0) a.received.step[1] = any;
  if (any) forget_rounds(a.common, a.pieces, step, Op::Combine);
}

// For a warp, behind all rows: nobody waits for what is between the segments of experts.
__device__ inline void clear_padding(const DispatchArguments& a, ReceiveShared& s, const Experts& e) {
  const Common& k = a.common;
  if (!k.c.zero_pad || k.c.layout != LayoutKind::Ragged) return;
  s.placed.wait();
  for (std::uint32_t expert = 0; s.placed_all;) {
    if (threadIdx.x % 32 == 0) expert = atomicAdd(&s.next, 1u) * gridDim.x + blockIdx.x;
    expert = __shfl_sync(~0u, expert, 0);
    if (expert >= k.experts) return;
    zero_padding<false>(a, e, expert, s.ragged_rows);
  }
}

}  // namespace pplx::cuda
