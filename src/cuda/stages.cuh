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
#else
__device__ inline void note(const Common&, Stage) {}
#endif

}  // namespace pplx::cuda
