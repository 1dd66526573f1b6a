// The hardware barriers of a thread block of dispatch. Workers go on while the last warp, the publisher, waits for their stores to
// have reached the peers: a release at system scope takes as long as the link is behind.
#pragma once

#include "arguments.h"
#include "device.cuh"

namespace pplx::cuda {

inline constexpr std::uint32_t kAmongWorkers = 1;
inline constexpr std::uint32_t kStored = 2;  // and 3, for units in turn: workers to publisher
inline constexpr std::uint32_t kPublished = 4;  // and 5: publisher to workers
inline constexpr std::uint32_t kPlaced = 6;  // workers to publisher, once
inline constexpr std::uint32_t kStepKnown = 7;  // workers to publisher, once, where there are remote peers
inline constexpr std::uint32_t kCleared = 8;  // publisher to workers, after that

__device__ inline bool is_publisher() { return threadIdx.x >= kWorkers; }

__device__ inline void sync_workers() { barrier_sync<kAmongWorkers, kWorkers>(); }
__device__ inline bool all_workers(bool good) { return barrier_all<kAmongWorkers, kWorkers>(good); }

// One side signals, the other waits.
__device__ inline void signal(std::uint32_t barrier) {
  __threadfence_block();
  barrier_arrive<kThreads>(barrier);
}
__device__ inline void await(std::uint32_t barrier) { barrier_sync<kThreads>(barrier); }

}  // namespace pplx::cuda
