// Sums by node (protocol/nodes.h) of tokens whose rows lanes have, those of a token in a group of lanes as their choices.
#pragma once

#include "../common/arguments.h"
#include "../common/sum.cuh"

namespace pplx::cuda {

// Returns a lane's row, once each token's are sorted by node, then rank. All lanes of a warp call it; those without a row stay last.
[[maybe_unused]] static __device__ __noinline__ std::uint32_t order_by_node(const CombineArguments& a, std::uint32_t entry) {
  const std::uint32_t lane = threadIdx.x % 32, width = 1u << a.common.group_shift, first = lane & ~(width - 1);
  const std::uint32_t node = entry == kNone ? kNone : a.node_of[entry >> 20];
  std::uint32_t place = first, from = lane;
#pragma unroll 1
  for (std::uint32_t i = first; i < first + width; ++i) {
    const std::uint32_t other = __shfl_sync(~0u, node, i);
    place += other < node || (other == node && i < lane) ? 1 : 0;
  }
#pragma unroll 1
  for (std::uint32_t i = first; i < first + width; ++i)
    if (__shfl_sync(~0u, place, i) == lane) from = i;
  return __shfl_sync(~0u, entry, from);
}

// Returns the lanes whose row is the last of its node, where rows are in order.
__device__ inline std::uint32_t ends_of_nodes(const CombineArguments& a, std::uint32_t entry) {
  const std::uint32_t next = __shfl_sync(~0u, entry, (threadIdx.x + 1) % 32), width = 1u << a.common.group_shift;
  const bool is_last = (threadIdx.x + 1) % width == 0 || next == kNone;
  return __ballot_sync(~0u, entry != kNone && (is_last || a.node_of[next >> 20] != a.node_of[entry >> 20]));
}

// Adds the sum of a node that has ended, rounded as a row that is sent. The next node's begins with -0: that changes no number.
template <typename T, int kVectors>
__device__ inline void add_node(Sums<T, kVectors>& sums, Sums<T, kVectors>& of_node) {
#pragma unroll
  for (int j = 0; j < kVectors; ++j) sums.add_vector(j, T::pack(of_node.sum[j]));
  of_node.start(-0.0f);
}

}  // namespace pplx::cuda
