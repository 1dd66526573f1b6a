// The kernels of a dispatch of many tokens have two things in common: the beginning of a launch, and that of their shared memory.
#pragma once

#include "../plan/chunk_plan.cuh"
#include "../plan/counts.cuh"

namespace pplx::cuda {
namespace {

// Shared memory of a launch: sums of what comes before a chunk, counts of the planner's own, the places of experts, then what each kernel wants.
struct ManyMemory {
  std::uint32_t counts, places, others;  // where each begins; sums come first

  constexpr explicit ManyMemory(const Config& c)
      : counts(4 * chunk_columns(c)),
        places(counts + counting_bytes(c)),
        others(static_cast<std::uint32_t>(align_up(places + 4ull * (c.world + 1) * kNumbersOfPiece * expert_pieces(c), kLine))) {}
};

// users: warps that say that they have done with a chunk.
template <typename Shared>
__device__ inline void prepare(Shared& s, std::uint32_t users) {
  if (threadIdx.x == 0) {
    s.plan.claimed.init();
    s.receive.rows_known.init();
    s.receive.placed.init();
    s.receive.next = 0;
  }
  if (threadIdx.x < kMaxPeers) s.receive.choices[threadIdx.x] = 0;
  if (threadIdx.x % 32 == 0 && is_planner())
    for (std::uint32_t i = 0; i < 2; ++i) {
      mbarrier_init(s.plan.known + i, 1);
      mbarrier_init(s.plan.planned + i, 1);
      mbarrier_init(s.plan.used + i, users);
    }
}

}  // namespace
}  // namespace pplx::cuda
