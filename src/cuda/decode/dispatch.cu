// dispatch() of few tokens.
#include "../host/launch_table.h"
#include "dispatch_kernel.cuh"

namespace pplx::cuda::decode {

Choice<DispatchArguments> choose_with_extras(const Config& config, const DispatchCall& call);  // remote/dispatch.cu

Choice<DispatchArguments> choose(const Config& c, const DispatchCall& call) {
  if (!call.mapped_only || call.general || in_pieces(c)) return choose_with_extras(c, call);
  return choose_mode(c, call, [&](auto mode) { return decode_choice("decode::dispatch", c, dispatch<decltype(mode), true>); });
}

}  // namespace pplx::cuda::decode
