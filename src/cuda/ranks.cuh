// Sets of ranks: a bit each, of 32 bits where there are no more ranks than that.
#pragma once

#include "device.cuh"

namespace pplx::cuda {

template <typename Ranks>
__device__ inline std::uint32_t count_ranks(Ranks ranks) {
  if constexpr (sizeof(Ranks) == sizeof(std::uint32_t))
    return __popc(ranks);
  else
    return __popcll(ranks);
}

// There is one.
template <typename Ranks>
__device__ inline std::uint32_t lowest_rank(Ranks ranks) {
  if constexpr (sizeof(Ranks) == sizeof(std::uint32_t))
    return static_cast<std::uint32_t>(__ffs(static_cast<int>(ranks))) - 1;
  else
    return static_cast<std::uint32_t>(__ffsll(static_cast<long long>(ranks))) - 1;
}

template <typename Ranks>
__device__ inline std::uint32_t count_ranks_below(Ranks ranks, std::uint32_t rank) {
  return count_ranks(static_cast<Ranks>(ranks & ((Ranks{1} << rank) - 1)));
}

}  // namespace pplx::cuda
