// Instruments of kernels: stages, delays. A build without their macros has none.
#pragma once

#include "arguments.h"
#include "ptx.cuh"
#include "stages.h"

namespace pplx::cuda {

// ---- PPLX_CUDA_STAGES: when each warp last came to each stage of a step, and for bench/stages.py the time that large launches spend ----

#ifdef PPLX_CUDA_STAGES
__device__ inline void mark_stage_here(const Common& k, std::uint32_t step, Stage stage) {
  if (k.stages == nullptr) return;
  k.stages[stage_word(step % k.stage_steps, stage, k.stage_warps, blockIdx.x * kMostWarps + threadIdx.x / 32)] = nanoseconds();
}
__device__ inline void mark_stage(const Common& k, std::uint32_t step, Stage stage) {
  if (threadIdx.x % 32 == 0) mark_stage_here(k, step, stage);
}
// Any thread of a warp may call it.
__device__ inline void mark_told(const Common& k, std::uint32_t step, Op op) {
  mark_stage_here(k, step, op == Op::Dispatch ? Stage::Told : Stage::ToldOfSums);
}
#else
__device__ inline void mark_told(const Common&, std::uint32_t, Op) {}
__device__ inline void mark_stage(const Common&, std::uint32_t, Stage) {}
#endif

#if defined(PPLX_CUDA_STAGES) && !defined(PPLX_EMULATION)

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
      k.stages[(k.stage_steps * kStagesOfStep + i) * k.stage_warps + blockIdx.x * kMostWarps + threadIdx.x / 32] +=
          of_block()[i * kMostWarps + threadIdx.x / 32];
  }

 private:
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

// ---- delays for tests ----

// PPLX_CUDA_FUZZ lets time pass before every publish, after every acquire and between the stores of rows. The delay follows from
// the seed (PPLX_COMM_CUDA_FUZZ), the thread and the event. Other builds have none.
#ifdef PPLX_CUDA_FUZZ
__device__ inline std::uint64_t mixed(std::uint64_t h) {
  h = (h ^ h >> 31) * 0x7fb5d329728ea185ull;
  h = (h ^ h >> 27) * 0x81dadef4bc2dd44dull;
  return h ^ h >> 33;
}
__device__ inline void fuzz_delay(const Common& k, std::uint64_t what) {
  const std::uint64_t h = mixed(what ^ k.fuzz_seed << 32 ^ std::uint64_t{blockIdx.x} << 16 ^ threadIdx.x);
  // Most events have no delay: an early read shows only where no thread waits, and a warp waits for its slowest lane.
  const std::uint32_t chance = h & 63;
  if (chance < 4) __nanosleep(h >> 32 & 0x3fff);
  if (chance == 4) __nanosleep(h >> 32 & 0x1ffff);
}
// One thread block in eight, drawn anew for each step, waits so long here that others may have ended already.
__device__ inline void come_late(const Common& k, std::uint32_t step) {
  if (mixed(step ^ k.fuzz_seed << 32 ^ std::uint64_t{blockIdx.x} << 48) % 8 != 0) return;
  for (int i = 0; i < 16; ++i) __nanosleep(0x1ffff);
}
#else
__device__ inline void come_late(const Common&, std::uint32_t) {}
__device__ inline void fuzz_delay(const Common&, std::uint64_t) {}
#endif

}  // namespace pplx::cuda
