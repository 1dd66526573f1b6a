// The words of src/protocol/hooks.h, as dispatch_recv raises them. A warp that has placed its part of a row counts it, with a release for
// this GPU and without waiting for anything; the warp that turns counts into places knows how many there will be.
#pragma once

#include "../common/wait.cuh"

namespace pplx::cuda {

// For a warp that has stored so many units of a row. `place`: where this lane's choice went, Compact: the row.
__device__ inline void count_placed(const DispatchArguments& a, std::uint32_t place, std::uint32_t units) {
  const Config& c = a.common.c;
  const bool mine = place != kNone && (c.layout != LayoutKind::Compact || threadIdx.x % 32 == 0);
  __syncwarp();
  if (!mine) return;
  fuzz_delay(a.common, place);
  add_in_order(a.hooks.arrived + hook_word_of(c, place), units);
}

// For a warp that has cleared whole rows.
__device__ inline void count_cleared(const DispatchArguments& a, std::uint32_t begin, std::uint32_t end) {
  __syncwarp();
  for (std::uint32_t place = begin + threadIdx.x % 32; place < end; place += 32)
    add_in_order(a.hooks.arrived + hook_word_of(a.common.c, place), a.hooks.row_units);
}

// For the warp that has told the caller counts and offsets. rows_of(word): how many rows its block has.
template <typename Rows>
__device__ inline void raise_planned(const DispatchArguments& a, const Rows& rows_of) {
  __syncwarp();
  for (std::uint32_t word = threadIdx.x % 32; word < a.hooks.words; word += 32) {
    fuzz_delay(a.common, word);
    add_in_order(a.hooks.arrived + word, kRaised - a.hooks.row_units * rows_of(word));
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) add_in_order(a.hooks.planned, kRaised);
}

// By all threads of a block, at its end: each block does so after whatever it has counted, so a word that has overflowed is raised again.
__device__ inline void raise_after_failure(const DispatchArguments& a) {
  __syncthreads();
  if (!stopped(a.common, false)) return;
  for (std::uint32_t word = threadIdx.x; word < a.hooks.words; word += blockDim.x) atomicOr(a.hooks.arrived + word, kRaised);
  if (threadIdx.x == 0) atomicOr(a.hooks.planned, kRaised);
}

}  // namespace pplx::cuda
