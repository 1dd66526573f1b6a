// The common part of the kernels of a large combine.
#pragma once

#include "combiner.cuh"

namespace pplx::cuda {
namespace {

inline constexpr std::uint32_t kLargeCombineThreads = 32 * (kCombiners + 1);

struct LargeCombineShared : CombineShared {
  CombinerTurns turns[kCombiners];

  // Initialises the barriers, by all threads, before the first `__syncthreads`.
  __device__ void prepare(std::uint32_t warp) {
    if (warp < kCombiners && threadIdx.x % 32 == 0) turns[warp].init();
  }
};

// Runs a large combine. How::Shared: its shared memory; prepare(warp): before the first `__syncthreads`. How::work: what each warp does.
template <typename T, typename How>
__device__ __forceinline__ void run_combine_large(const CombineArguments& a) {
  PPLX_LAUNCHED_SHARED(words);
  PPLX_SHARED(typename How::Shared, s);
  const Common& k = a.common;
  const std::uint64_t begun = k.stamps != nullptr ? nanoseconds() : 0;
  mark_stage(k, Stage::CombineBegins);
  SpanTimer::begin();
  const std::uint32_t warp = threadIdx.x / 32;
  s.prepare(warp);
  std::uint32_t step = 0;
  if (!begin_combine(a, step, 0, s)) return;
  if (a.recv) begin_to_close(k, step);
  How::template work<T>(a, step, s, reinterpret_cast<char*>(words), warp);
  if (a.recv) close_set(k, step);
  mark_stage(k, Stage::CombineEnds);
  SpanTimer::end(k);
  stamp(k, Op::Combine, step, begun);
}

// Takes this block's share, and sends headers that are not sent yet, by one warp. Their words lie behind those of weights. kRemote: but for
// remote peers.
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

constexpr std::uint32_t kLargeCombineBytes = kCombiners * kCombinerBytes;

}  // namespace
}  // namespace pplx::cuda
