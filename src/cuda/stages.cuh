// A build for bench/stages.py (PPLX_CUDA_STAGES) notes when each warp last came to each stage. In any other build there is nothing
// here.
#pragma once

#include "arguments.h"
#include "stages.h"

namespace pplx::cuda {

#ifdef PPLX_CUDA_STAGES
__device__ inline void note(const Common& k, Stage stage) {
  if (k.stages == nullptr || threadIdx.x % 32 != 0) return;
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  k.stages[static_cast<std::uint32_t>(stage) * k.stage_warps + blockIdx.x * kMostWarps + threadIdx.x / 32] = now;
}

// As long as it lives, its warp spends its time so.
class Spends {
 public:
  __device__ Spends(const Common& k, Span what)
      : spent_(k.stages + (sizeof kStages / sizeof *kStages + static_cast<std::uint32_t>(what)) * k.stage_warps + blockIdx.x * kMostWarps + threadIdx.x / 32),
        notes_(k.stages != nullptr && threadIdx.x % 32 == 0),
        begun_(cycles()) {}
  __device__ ~Spends() {
    if (notes_) *spent_ += static_cast<std::uint64_t>(cycles() - begun_);
  }

 private:
  __device__ static long long cycles() {
    long long now;
    asm volatile("mov.u64 %0, %clock64;" : "=l"(now)::"memory");
    return now;
  }

  std::uint64_t* const spent_;
  const bool notes_;
  const long long begun_;
};
#else
__device__ inline void note(const Common&, Stage) {}
struct Spends {
  __device__ Spends(const Common&, Span) {}
};
#endif

}  // namespace pplx::cuda
