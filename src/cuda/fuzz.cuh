// A build for tests (PPLX_CUDA_FUZZ) lets time pass where others could come in between: before every publish, after every acquire
// and between the stores of rows. How much follows from the seed (PPLX_COMM_CUDA_FUZZ), the thread, and what happens. In any other
// build there is nothing here.
#pragma once

#include "arguments.h"

namespace pplx::cuda {

#ifdef PPLX_CUDA_FUZZ
__device__ inline std::uint64_t mixed(std::uint64_t h) {
  h = (h ^ h >> 31) * 0x7fb5d329728ea185ull;
  h = (h ^ h >> 27) * 0x81dadef4bc2dd44dull;
  return h ^ h >> 33;
}
__device__ inline void linger(const Common& k, std::uint64_t what) {
  const std::uint64_t h = mixed(what ^ k.fuzz_seed << 32 ^ std::uint64_t{blockIdx.x} << 16 ^ threadIdx.x);
  // Mostly nothing: what comes too early is seen only where nobody waits, and a warp waits for its slowest lane.
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
__device__ inline void linger(const Common&, std::uint64_t) {}
#endif

}  // namespace pplx::cuda
