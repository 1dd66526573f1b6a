// How warps share work: counts that they claim from, and rings of places in shared memory, each with an mbarrier for its producer and
// one for its consumers.
#pragma once

#include "../common/wait.cuh"

namespace pplx::cuda {

// Claims the next `n` of what a count deals out, for a warp. Returns the first.
__device__ inline std::uint32_t take_next(std::uint32_t* count, std::uint32_t n = 1) {
  std::uint32_t first = 0;
  if (threadIdx.x % 32 == 0) first = atomicAdd(count, n);
  return __shfl_sync(~0u, first, 0);
}

// Counts `more` that the lanes of a warp have done. Returns the count before.
__device__ inline std::uint32_t count_of_warp(std::uint32_t* count, std::uint32_t more) {
  __syncwarp();
  std::uint32_t before = 0;
  if (threadIdx.x % 32 == 0) before = count_in_order(count, more);
  before = __shfl_sync(~0u, before, 0);
  __syncwarp();
  return before;
}

// Waits for the nth turn. A lane that looks only after the next one is over waits for ever, so no lane of a warp may fill a place
// again that another one still waits for: the one that fills it waits alone, or the lanes meet.
__device__ inline void await_turn(std::uint64_t* turns, std::uint32_t nth) {
  while (!phase_wait(turns, nth & 1)) {
  }
}

// The place that a warp is at. Each warp goes through the ring by itself.
class Ring {
 public:
  __device__ explicit Ring(std::uint32_t places) : places_(places) {}
  __device__ void next() {
    if (++at != places_) return;
    at = 0;
    ++turn;
  }
  // Waits until the place is free, by a warp of which one lane fills it. The lanes meet: one that looks later would miss the turn.
  __device__ void await_free(std::uint64_t* turns) const {
    if (turn != 0) await_turn(turns + at, turn - 1);
    __syncwarp();
  }

  // True if this warp has filled an earlier place of its again.
  __device__ bool is_past(const Ring& place) const { return turn > place.turn + (at > place.at ? 0 : 1); }

  std::uint32_t at = 0, turn = 0;

 private:
  std::uint32_t places_;
};

}  // namespace pplx::cuda
