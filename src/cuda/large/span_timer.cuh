// Times what the warps of a large launch do, in a build for bench/stages.py (PPLX_CUDA_STAGES). Other builds measure
// nothing.
#pragma once

#include "../common/debug.cuh"
#include "spans.h"

namespace pplx::cuda {

#ifdef PPLX_CUDA_STAGES
// Counts the time until its end as its warp's, for `what`.
class SpanTimer {
 public:
  __device__ SpanTimer(const Common&, Span what) : spent_(of_block() + static_cast<std::uint32_t>(what) * kMostWarps + threadIdx.x / 32), begun_(cycles()) {}
  __device__ ~SpanTimer() {
    if (threadIdx.x % 32 == 0) *spent_ += static_cast<std::uint64_t>(cycles() - begun_);
  }
  // Called by all lanes of a warp, first and last.
  __device__ static void begin() {
    for (std::uint32_t i = threadIdx.x % 32; i < kSpanNames; i += 32) of_block()[i * kMostWarps + threadIdx.x / 32] = 0;
    __syncwarp();
  }
  __device__ static void end(const Common& k) {
    __syncwarp();
    for (std::uint32_t i = threadIdx.x % 32; k.stages != nullptr && i < kSpanNames; i += 32)
      k.stages[(sizeof kStages / sizeof *kStages + i) * k.stage_warps + blockIdx.x * kMostWarps + threadIdx.x / 32] +=
          of_block()[i * kMostWarps + threadIdx.x / 32];
  }

 private:
  static constexpr std::uint32_t kSpanNames = sizeof kSpans / sizeof *kSpans;
  __device__ static std::uint64_t* of_block() {
    __shared__ std::uint64_t spent[kSpanNames * kMostWarps];
    return spent;
  }
  __device__ static long long cycles() {
    long long now;
    asm volatile("mov.u64 %0, %clock64;" : "=l"(now)::"memory");
    return now;
  }

  std::uint64_t* const spent_;
  const long long begun_;
};
#else
struct SpanTimer {
  __device__ SpanTimer(const Common&, Span) {}
  __device__ static void begin() {}
  __device__ static void end(const Common&) {}
};
#endif

}  // namespace pplx::cuda
