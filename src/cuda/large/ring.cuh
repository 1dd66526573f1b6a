// How warps share work: counts that they claim from, and rings of places, each with mbarriers for its producer and its consumers.
#pragma once

#include "../common/wait.cuh"

namespace pplx::cuda {

// Claims the next `n` of what a count deals out, for a warp. Returns the first.
__device__ inline std::uint32_t take_next(std::uint32_t* count, std::uint32_t n = 1) {
  return of_first_lane([&] { return atomicAdd(count, n); });
}

// Counts `more` that the lanes of a warp have done. Returns the count before.
__device__ inline std::uint32_t count_of_warp(std::uint32_t* count, std::uint32_t more) {
  __syncwarp();
  const std::uint32_t before = of_first_lane([&] { return count_in_order(count, more); });
  __syncwarp();
  return before;
}

// Waits for the nth turn. A lane that looks only after the next one is over waits for ever, so no lane of a warp may fill a place
// again that another one still waits for: the one that fills it waits alone, or the lanes meet.
__device__ inline void await_turn(std::uint64_t* turns, std::uint32_t nth) {
  while (!phase_wait(turns, nth & 1)) {
  }
}

// Waits likewise, and counts the time as `what`.
__device__ inline void await_turn(const Common& k, Span what, std::uint64_t* turns, std::uint32_t nth) {
  const SpanTimer waits(k, what);
  await_turn(turns, nth);
}

// True if the nth turn is over, for all lanes of a warp.
__device__ inline bool is_over(std::uint64_t* turns, std::uint32_t nth) { return __all_sync(~0u, phase_test(turns, nth & 1)); }

// Waits until all but this thread's `most` last groups of stores are where they belong: at most kMost of them.
template <std::uint32_t kMost>
__device__ inline void bulk_await_all_but(std::uint32_t most) {
  if constexpr (kMost != 0)
    if (most < kMost) return bulk_await_all_but<kMost - 1>(most);
  bulk_await_stored<kMost>();
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
  __device__ void await_free(const Common& k, Span what, std::uint64_t* turns) const {
    if (turn != 0) await_turn(k, what, turns + at, turn - 1);
    __syncwarp();
  }

  // True if this warp has filled an earlier place of its again.
  __device__ bool is_past(const Ring& place) const { return turn > place.turn + (at > place.at ? 0 : 1); }

  std::uint32_t at = 0, turn = 0;

 private:
  std::uint32_t places_;
};

}  // namespace pplx::cuda
