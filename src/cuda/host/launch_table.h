// The launch table: which kernel does a call, with how many threads and how much shared memory. Host calls choose by it, the constructor
// loads all that it may choose, and Exchange::explain() prints it. Errors of the runtime are returned unchanged.
#pragma once

#include <cuda_runtime_api.h>

#include "../../protocol/heap_layout.h"
#include "../common/choice.h"

namespace pplx::cuda {

// A wait for the rows of some experts, from `first` on.
struct AwaitedExperts {
  Common common;
  DispatchHooks hooks;
  const std::uint32_t* step = nullptr;
  const std::int32_t* counts = nullptr;
  const std::int32_t* offsets = nullptr;  // Ragged
  std::uint32_t first = 0, count = 0;
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
  return call.large || in_pieces(c) ? large::choose(c, call) : decode::choose(c, call);
}

// Loads every kernel that steps of this size may choose, so that no later call loads a module.
cudaError_t load(const Config& config, bool large, bool hooks);
template <typename Arguments>
cudaError_t launch(const Choice<Arguments>& choice, const Arguments& arguments, std::uint32_t blocks, cudaStream_t stream);

// True if the GPU has the shared memory, and the configuration the shape, for large steps.
bool can_dispatch_large(const Config& config, std::uint32_t shared_bytes);
bool can_combine_large(const Config& config, std::uint32_t shared_bytes);

cudaError_t load_hooks();
cudaError_t launch_clear_hooks(std::uint32_t* words, std::uint32_t count, cudaStream_t stream);
cudaError_t launch_await_experts(const AwaitedExperts& awaited, cudaStream_t stream);

}  // namespace pplx::cuda
