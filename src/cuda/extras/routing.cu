// Counts of a routing, for code that is written for DeepEP: its get_dispatch_layout.
#include "../common/ptx.cuh"
#include "../host/launch_table.h"

namespace pplx::cuda {
namespace {

inline constexpr std::uint32_t kRoutingThreads = 256;

// A thread for each token; a thread block adds up its counts before all do.
template <typename Id>
__global__ void __launch_bounds__(kRoutingThreads) count_routing_kernel(const __grid_constant__ RoutingCounts a) {
  PPLX_LAUNCHED_SHARED(counts);
  for (std::uint32_t i = threadIdx.x; i < a.numbers(); i += kRoutingThreads) counts[i] = 0;
  __syncthreads();
  const std::uint32_t token = blockIdx.x * kRoutingThreads + threadIdx.x;
  if (token < a.tokens) {
    std::uint64_t ranks = 0;
    for (std::uint32_t choice = 0; choice < a.top_k; ++choice) {
      const std::int64_t id = static_cast<const Id*>(a.ids)[std::uint64_t{token} * a.top_k + choice];
      if (id < 0 || id >= a.experts) continue;   // dropped
      atomicAdd(&counts[a.ranks + a.nodes + id], 1u);
      ranks |= 1ull << a.per_rank.divide(static_cast<std::uint32_t>(id));
    }
    for (std::uint32_t rank = 0; rank < a.ranks; ++rank) {
      const bool goes = (ranks >> rank & 1) != 0;
      a.goes[std::uint64_t{token} * a.ranks + rank] = goes;
      if (goes) atomicAdd(&counts[rank], 1u);
    }
    for (std::uint32_t node = 0, wide = a.nodes == 0 ? 0 : a.ranks / a.nodes; node < a.nodes; ++node)
      if ((ranks >> node * wide & ((1ull << wide) - 1)) != 0) atomicAdd(&counts[a.ranks + node], 1u);
  }
  __syncthreads();
  for (std::uint32_t i = threadIdx.x; i < a.numbers(); i += kRoutingThreads)
    if (counts[i] != 0) atomicAdd(a.counts + i, counts[i]);
}

}  // namespace

cudaError_t launch_count_routing(const RoutingCounts& a, bool wide_ids, cudaStream_t stream) {
  const std::size_t bytes = sizeof(std::uint32_t) * a.numbers();
  const cudaError_t error = cudaMemsetAsync(a.counts, 0, bytes, stream);
  if (error != cudaSuccess || a.tokens == 0) return error;
  void* parameters[] = {const_cast<RoutingCounts*>(&a)};
  const auto kernel = wide_ids ? count_routing_kernel<std::int64_t> : count_routing_kernel<std::int32_t>;
  return cudaLaunchKernel(kernel, dim3(ceil_div(a.tokens, kRoutingThreads)), dim3(kRoutingThreads), parameters, bytes, stream);
}

}  // namespace pplx::cuda
