// Who sends what. The send units of a launch are dealt out in shares, one for each thread block: unit u belongs to share u modulo the
// number of blocks. A thread block takes its own share, so it knows its first unit before it has loaded anything, and then looks for
// shares that nobody has taken: thread blocks that have found no room on the GPU yet.
//
// A share's word has the step that took it last, so none is ever reset.
//
// The step: every thread block of a dispatch that sends reads it on entry, then adds its part of 2^32 to the same word. The last part
// carries into the number above, after every block has read it. Nobody waits for the sum.
#pragma once

#include "words.cuh"

namespace pplx::cuda {

__device__ inline std::uint32_t step_of(unsigned long long word) { return static_cast<std::uint32_t>(word >> 32); }

// By one thread of a block, once it has read the step.
__device__ inline void pass_step(const Common& k) {
  add_relaxed(&k.control->step, blockIdx.x == 0 ? (1ull << 32) - (gridDim.x - 1) : 1ull);
}

__device__ inline std::uint32_t* shares_of(const Common& k, Op op) { return k.control->shares[static_cast<int>(op)]; }

// Whether it was still to be had.
__device__ inline bool take_share(const Common& k, Op op, std::uint32_t share, std::uint32_t step) {
  return atomicExch(shares_of(k, op) + share, step) != step;
}

// For a warp: a share that somebody has yet to take, or kNone. All words are asked for at once.
__device__ inline std::uint32_t find_share(const Common& k, Op op, std::uint32_t step, std::uint32_t shares) {
  constexpr int kAtOnce = 8;
  std::uint32_t found = kNone;
  for (std::uint32_t begin = 0; begin < gridDim.x; begin += 32 * kAtOnce) {
    std::uint32_t share[kAtOnce], taken_in[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::uint32_t nth = begin + 32 * i + threadIdx.x % 32;
      // From the next one on, so that not all go for the same.
      share[i] = nth < gridDim.x ? nth + blockIdx.x + 1 : kNone;
      if (nth < gridDim.x && share[i] >= gridDim.x) share[i] -= gridDim.x;
      taken_in[i] = share[i] < shares ? __ldcg(shares_of(k, op) + share[i]) : step;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (taken_in[i] != step) found = share[i];
  }
  const std::uint32_t who = __ballot_sync(~0u, found != kNone);
  return who == 0 ? kNone : __shfl_sync(~0u, found, __ffs(static_cast<int>(who)) - 1);
}

// For a warp whose block has done its own: another one that it has taken, or kNone. A block that has just found room takes its own.
__device__ inline std::uint32_t take_another_share(const Common& k, Op op, std::uint32_t step, std::uint32_t shares) {
  for (std::uint32_t looks = 1;; ++looks) {
    const std::uint32_t share = find_share(k, op, step, shares);
    if (share == kNone) return kNone;
    if (looks < kPatientLooks) {
      __nanosleep(kBetweenLooksNs);
      continue;
    }
    bool taken = false;
    if (threadIdx.x % 32 == 0) taken = take_share(k, op, share, step);
    if (__any_sync(~0u, taken)) return share;
  }
}

}  // namespace pplx::cuda
