// dispatch() of few tokens.
#include "../host/launch_table.h"
#include "dispatch_kernel.cuh"

namespace pplx::cuda::decode {

Choice<DispatchArguments> choose_general(const Config& config, const DispatchCall& call);  // remote/dispatch.cu
Choice<DispatchArguments> choose_with_hooks(const Config& config, const DispatchCall& call);  // extras/dispatch_hooks.cu

Choice<DispatchArguments> choose(const Config& c, const DispatchCall& call) {
  if (call.hooks) return choose_with_hooks(c, call);
  if (!call.mapped_only || in_pieces(c)) return choose_general(c, call);
  return choose_mode(c, call, [&](auto mode) { return decode_choice("decode::dispatch", c, dispatch<decltype(mode), true, false>); });
}

}  // namespace pplx::cuda::decode
