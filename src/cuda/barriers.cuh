// The hardware barriers of a thread block of dispatch. Workers go on while the last warp, the publisher, waits for their stores to
// have reached the peers: a release at system scope takes as long as the link is behind.
#pragma once

#include "arguments.h"

namespace pplx::cuda {

inline constexpr std::uint32_t kAmongWorkers = 1;
inline constexpr std::uint32_t kStored = 2;  // and 3, for units in turn: workers to publisher
inline constexpr std::uint32_t kPublished = 4;  // and 5: publisher to workers
inline constexpr std::uint32_t kPlaced = 6;  // workers to publisher, once
inline constexpr std::uint32_t kStepKnown = 7;  // workers to publisher, once, where there are remote peers
inline constexpr std::uint32_t kCleared = 8;  // publisher to workers, after that

__device__ inline bool is_publisher() { return threadIdx.x >= kWorkers; }

__device__ inline void sync_workers() { asm volatile("barrier.cta.sync %0, %1;" ::"n"(kAmongWorkers), "n"(kWorkers) : "memory"); }

__device__ inline bool all_workers(bool good) {
  std::uint32_t all;
  asm volatile(
      "{\n\t.reg .pred p, q;\n\tsetp.ne.u32 p, %1, 0;\n\tbarrier.cta.red.and.pred q, %2, %3, p;\n\tselp.u32 %0, 1, 0, q;\n\t}"
      : "=r"(all)
      : "r"(static_cast<std::uint32_t>(good)), "n"(kAmongWorkers), "n"(kWorkers)
      : "memory");
  return all != 0;
}

// One side signals, the other waits.
__device__ inline void signal(std::uint32_t barrier) {
  __threadfence_block();
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}
__device__ inline void await(std::uint32_t barrier) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

}  // namespace pplx::cuda
