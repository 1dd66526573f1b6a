// What the kernels of a combine of many tokens have in common: their shared memory, and how they begin and end.
#pragma once

#include "combiner.cuh"

namespace pplx::cuda {
namespace {

inline constexpr std::uint32_t kCombineManyThreads = 32 * (kCombiners + 1);

struct CombineManyShared {
  CombineShared combine;
  CombinerTurns turns[kCombiners];
};

// By one warp: this block's share, and headers that nobody has sent yet. Behind the words of those who send weights. kRemote: those for peers of
// other nodes are sent elsewhere.
template <bool kRemote = false>
__device__ inline void begin_to_send(const CombineArguments& a, std::uint32_t step, CombineShared& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  if (lane == 0) s.mine = take_share(k, Op::Combine, blockIdx.x, step);
  s.claimed.set();
  for (std::uint32_t begin = kRemote ? remote_peers(k) : 0; begin < k.living; begin += 32) {
    const bool mine = begin + lane < k.living && take_share(k, Op::Weights, kMaxPeers + begin + lane, step);
    for (std::uint32_t bits = __ballot_sync(~0u, mine); bits != 0; bits &= bits - 1)
      send_combine_header<true>(a, step, k.order[begin + __ffs(static_cast<int>(bits)) - 1], s, 0);
  }
}

template <bool kRemote = false>
__device__ inline void receive_all_headers(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  for (std::uint32_t i = (kRemote ? remote_peers(k) : 0) + threadIdx.x % 32 * gridDim.x + blockIdx.x; i < k.living; i += 32 * gridDim.x) receive_header(a, step, k.order[i]);
  __syncwarp();
}

constexpr std::uint32_t kCombineManyBytes = kCombiners * kCombinerBytes;

}  // namespace
}  // namespace pplx::cuda
