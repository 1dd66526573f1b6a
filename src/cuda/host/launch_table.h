// The launch table: which kernel does a call, with how many threads and how much shared memory. Host calls choose by it, the constructor
// loads all that it may choose, and Exchange::explain() prints it. Errors of the runtime are returned unchanged.
#pragma once

#include <cuda_runtime_api.h>

#include "../../protocol/heap_layout.h"
#include "../common/arguments.h"

namespace pplx::cuda {

// True if all peers are on this node, at most 32 and none dead, there are no replicas, and the plan is made from ids.
inline bool is_mapped_only(const DispatchArguments& a) {
  const Common& k = a.common;
  return k.remote == 0 && k.dead == 0 && k.c.world <= 32 && k.c.replicas == 1 && (a.ids != nullptr || !a.send);
}
// True if all peers are on this node, and there are neither replicas, tails nor weights of combine's own, nor sums by node.
inline bool is_mapped_only(const CombineArguments& a) {
  return a.common.remote == 0 && a.common.c.replicas == 1 && !a.has_tail && !a.uses_weights && !a.by_node;
}

// The facts that choose a dispatch's kernel, beside the configuration.
struct DispatchCall {
  bool large;
  bool mapped_only;  // is_mapped_only()
  bool general;  // some peers are of other nodes, or the launch raises words of hooks
  bool given_scales;
};
inline DispatchCall call_of(const DispatchArguments& a, bool large) {
  return {large, is_mapped_only(a), a.common.remote != 0 || (a.hooks.planned != nullptr && (a.recv || large)), a.scales != nullptr};
}

struct CombineCall {
  bool large;
  bool mapped_only;  // is_mapped_only()
  bool few;  // strips of kSentVectorsOfFew
};
inline CombineCall call_of(const CombineArguments& a, bool large) {
  return {large, is_mapped_only(a), a.sent.vectors == kSentVectorsOfFew};
}

template <typename Arguments>
struct Choice {
  const char* name = nullptr;
  void (*kernel)(Arguments) = nullptr;
  std::uint32_t block = 0, smem = 0;
};

// A wait for the rows of some experts, from `first` on.
struct AwaitedExperts {
  Common common;
  DispatchHooks hooks;
  const std::uint32_t* step = nullptr;
  const std::int32_t* counts = nullptr;
  const std::int32_t* offsets = nullptr;  // Ragged
  std::uint32_t first = 0, count = 0;
};

// How many tokens go to each rank and node, and how many choices to each expert, in this order; and where each token goes. At most
// kMostExperts experts, and kMaxPeers ranks.
struct RoutingCounts {
  const void* ids = nullptr;  // [tokens][top_k]
  std::uint32_t tokens = 0, top_k = 0, ranks = 0, nodes = 0, experts = 0;   // nodes: 0: not counted
  Divider per_rank;           // experts
  bool* goes = nullptr;       // [tokens][ranks]
  std::uint32_t* counts = nullptr;
  constexpr std::uint32_t numbers() const { return ranks + nodes + experts; }
};

namespace decode {
Choice<DispatchArguments> choose(const Config& config, const DispatchCall& call);
Choice<CombineArguments> choose(const Config& config, const CombineCall& call);
}  // namespace decode
namespace large {
Choice<DispatchArguments> choose(const Config& config, const DispatchCall& call);
Choice<CombineArguments> choose(const Config& config, const CombineCall& call);
}  // namespace large

template <typename Call>
auto choose(const Config& c, const Call& call) {
  return call.large ? large::choose(c, call) : decode::choose(c, call);
}

// Loads every kernel that steps of this size may choose, so that no later call loads a module.
cudaError_t load_dispatches(const Config& config, bool large, bool general);
cudaError_t load_combines(const Config& config, bool large);
template <typename Arguments>
cudaError_t launch(const Choice<Arguments>& choice, const Arguments& arguments, std::uint32_t blocks, cudaStream_t stream);

// True if the GPU has the shared memory, and the configuration the shape, for large steps.
bool can_dispatch_large(const Config& config, std::uint32_t shared_bytes);
bool can_combine_large(const Config& config, std::uint32_t shared_bytes);

cudaError_t load_hooks();
cudaError_t launch_clear_hooks(std::uint32_t* words, std::uint32_t count, cudaStream_t stream);
cudaError_t launch_clock(std::uint64_t* now, cudaStream_t stream);
cudaError_t launch_await_experts(const AwaitedExperts& awaited, cudaStream_t stream);
cudaError_t launch_count_routing(const RoutingCounts& a, bool wide_ids, cudaStream_t stream);

}  // namespace pplx::cuda
