// The launch table: which kernel does a call, with how many threads and how much shared memory. Host calls choose by it, the constructor
// loads all that it may choose, and Exchange::explain() prints it. Errors of the runtime are returned unchanged.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/arguments.h"

namespace pplx::cuda {

// The facts that choose a dispatch's kernel, beside the configuration.
struct DispatchCall {
  bool large = false;
  bool mapped_only = false;  // is_mapped_only()
  bool given_scales = false;
  bool hooks = false;  // the launch raises words of hooks

  DispatchCall() = default;
  DispatchCall(const DispatchArguments& a, bool large)
      : large(large),
        mapped_only(is_mapped_only(a)),
        given_scales(a.scales != nullptr),
        hooks(large && !a.common.heap.in_pieces ? a.hooks.planned != nullptr : tells_of_rows(a)) {}
};

struct CombineCall {
  bool large = false;
  bool mapped_only = false;  // is_mapped_only()
  bool few = false;  // strips of kSentVectorsOfFew
  bool fetches = false, offers = false;  // rows of peers that offer theirs; this rank offers, or sends nothing

  CombineCall() = default;
  CombineCall(const CombineArguments& a, bool large)
      : large(large),
        mapped_only(is_mapped_only(a)),
        few(a.sent.vectors == kSentVectorsOfFew),
        fetches(a.fetches),
        offers(a.fetches && (a.made_at != 0 || !a.send)) {}
};

template <typename Arguments>
struct Choice {
  const char* name = nullptr;
  void (*kernel)(Arguments) = nullptr;
  std::uint32_t block = 0, smem = 0;
};

namespace decode {
Choice<DispatchArguments> choose(const Config& config, const DispatchCall& call);
Choice<CombineArguments> choose(const Config& config, const CombineCall& call);
}  // namespace decode
namespace decode_rounds {
Choice<DispatchArguments> choose(const Config& config, const DispatchCall& call);
Choice<CombineArguments> choose(const Config& config, const CombineCall& call);
}  // namespace decode_rounds
namespace large {
Choice<DispatchArguments> choose(const Config& config, const DispatchCall& call);
Choice<CombineArguments> choose(const Config& config, const CombineCall& call);
}  // namespace large
namespace large_rounds {
Choice<DispatchArguments> choose(const Config& config, const DispatchCall& call);
Choice<CombineArguments> choose(const Config& config, const CombineCall& call);
}  // namespace large_rounds

template <typename Call>
auto choose(const Config& c, const Call& call) {
  if (in_pieces(c)) return call.large ? large_rounds::choose(c, call) : decode_rounds::choose(c, call);
  return call.large ? large::choose(c, call) : decode::choose(c, call);
}

// Loads every kernel that steps of this size may choose, so that no later call loads a module.
cudaError_t load(const Config& config, bool large, bool hooks);
cudaError_t launch(const Choice<DispatchArguments>& choice, const DispatchArguments& arguments, std::uint32_t blocks, cudaStream_t stream);
cudaError_t launch(const Choice<CombineArguments>& choice, const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream);

// True if the GPU has the shared memory, and the configuration the shape, for large steps.
bool can_dispatch_many(const Config& config, std::uint32_t shared_bytes);
bool can_combine_many(const Config& config, std::uint32_t shared_bytes);
bool can_dispatch_many_pieces(const Config& config, std::uint32_t shared_bytes);
bool can_combine_many_pieces(const Config& config, std::uint32_t shared_bytes);
std::uint32_t dispatch_many_parts(const Config& config);  // of a row

cudaError_t load_hooks();
cudaError_t launch_clear_hooks(std::uint32_t* words, std::uint32_t count, cudaStream_t stream);
cudaError_t launch_await_experts(const AwaitedExperts& awaited, cudaStream_t stream);

}  // namespace pplx::cuda
