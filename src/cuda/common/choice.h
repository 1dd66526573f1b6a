// The choice of a call's kernel, by facts of the call. The launch table (host/launch_table.h) makes it.
#pragma once

#include "arguments.h"

namespace pplx::cuda {

// True if all peers are on this node, at most 32 and none dead, there are no replicas, and the plan is made from ids.
inline bool is_mapped_only(const DispatchArguments& a) {
  const Common& k = a.common;
  return k.remote == 0 && k.dead == 0 && k.c.world <= 32 && k.c.replicas == 1 && (a.ids != nullptr || !a.send);
}
// True if all peers are on this node, and there are neither replicas, tails nor weights of combine's own.
inline bool is_mapped_only(const CombineArguments& a) {
  return a.common.remote == 0 && a.common.c.replicas == 1 && !a.has_tail && !a.uses_weights;
}

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
        hooks(a.hooks.planned != nullptr && (a.recv || large)) {}
};

struct CombineCall {
  bool large = false;
  bool mapped_only = false;  // is_mapped_only()
  bool few = false;  // strips of kSentVectorsOfFew
  bool fetches = false;  // rows of peers that offer theirs

  CombineCall() = default;
  CombineCall(const CombineArguments& a, bool large)
      : large(large),
        mapped_only(is_mapped_only(a)),
        few(a.sent.vectors == kSentVectorsOfFew),
        fetches(a.fetches) {}
};

template <typename Arguments>
struct Choice {
  const char* name = nullptr;
  void (*kernel)(Arguments) = nullptr;
  std::uint32_t block = 0, smem = 0;
};

}  // namespace pplx::cuda
