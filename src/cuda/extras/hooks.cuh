// The words of src/protocol/hooks.h, as dispatch_recv raises them; a launch may have none. A warp that has placed its part
// of a row counts it, with a release for this GPU and without waiting for anything; the warp that turns counts into places knows how
// many there will be.
#pragma once

#include "../../protocol/hooks.h"
#include "../plan/counts.cuh"

namespace pplx::cuda {

template <>
struct HookWords<true> {
  // Counts `units` of a row that this warp has stored. place: where this lane's choice went; Compact: the row.
  __device__ static void count_placed(const DispatchArguments& a, std::uint32_t place, std::uint32_t units) {
    const Config& c = a.common.c;
    const bool mine = a.hooks.planned != nullptr && place != kNone && (c.layout != LayoutKind::Compact || threadIdx.x % 32 == 0);
    __syncwarp();
    if (!mine) return;
    fuzz_delay(a.common, place);
    add_in_order(a.hooks.arrived + hook_word_of(c, place), units);
  }

  // Counts whole rows that this warp has cleared.
  __device__ static void count_cleared(const DispatchArguments& a, std::uint32_t begin, std::uint32_t end) {
    __syncwarp();
    if (a.hooks.planned == nullptr) return;
    for (std::uint32_t place = begin + threadIdx.x % 32; place < end; place += 32)
      add_in_order(a.hooks.arrived + hook_word_of(a.common.c, place), a.hooks.row_units);
  }

  // Raises `planned` by the warp that has told the caller counts and offsets. Each word of `arrived` expects its block's rows then.
  __device__ static void raise_planned(const DispatchArguments& a, const ReceiveShared& s, const Experts& e) {
    __syncwarp();
    for (std::uint32_t word = threadIdx.x % 32; word < a.hooks.words; word += 32) {
      fuzz_delay(a.common, word);
      add_in_order(a.hooks.arrived + word, kRaised - a.hooks.row_units * rows_of_hook(a, s, e, word));
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0 && a.hooks.planned != nullptr) add_in_order(a.hooks.planned, kRaised);
  }

  // Raises all words after a failure, by all threads of a block, behind all that it has counted: a word may have overflowed.
  __device__ static void raise_after_failure(const DispatchArguments& a) {
    if (a.hooks.planned == nullptr) return;
    __syncthreads();
    if (!stopped(a.common, false)) return;
    for (std::uint32_t word = threadIdx.x; word < a.hooks.words; word += blockDim.x) atomicOr(a.hooks.arrived + word, kRaised);
    if (threadIdx.x == 0) atomicOr(a.hooks.planned, kRaised);
  }

 private:
  // Returns how many rows that some rank sends, or padding, lie in a word's block of the output.
  __device__ static std::uint32_t rows_of_hook(const DispatchArguments& a, const ReceiveShared& s, const Experts& e, std::uint32_t word) {
    const Common& k = a.common;
    if (k.c.layout == LayoutKind::Padded) return min(e.at(k.c.world, word) - e.at(0, word), k.c.max_per_expert);
    const std::uint32_t begin = word * kHookRows, end = min(begin + kHookRows, k.c.max_rows);
    const auto overlap = [&](std::uint32_t from, std::uint32_t to) { return max(min(to, end), begin) - min(max(from, begin), end); };
    if (k.c.layout == LayoutKind::Compact) return overlap(0, s.rows_begin[k.c.world]);
    if (k.c.zero_pad) return overlap(0, s.ragged_rows);
    std::uint32_t first = 0, last = k.experts;  // the first expert that ends behind the block's beginning
    while (first < last) {
      const std::uint32_t middle = (first + last) / 2;
      if (e.at(k.c.world, middle) > begin)
        last = middle;
      else
        first = middle + 1;
    }
    std::uint32_t rows = 0;
    for (; first < k.experts && e.at(0, first) < end; ++first) rows += overlap(e.at(0, first), e.at(k.c.world, first));
    return rows;
  }
};

}  // namespace pplx::cuda
