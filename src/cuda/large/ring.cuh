// A ring of places in shared memory, each with an mbarrier for its producer and one for its consumers.
#pragma once

#include "../plan/chunk_plan.cuh"

namespace pplx::cuda {

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

  std::uint32_t at = 0, turn = 0;

 private:
  const std::uint32_t places_;
};

}  // namespace pplx::cuda
