// dispatch() of few tokens.
#include "dispatch_kernel.cuh"

namespace pplx::cuda {
namespace decode {

Choice<DispatchArguments> choose_with_hooks(const Config& config, const DispatchCall& call);  // dispatch_hooks.cu

namespace {

template <typename Mode, bool kPlain, bool kHooks>
__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch(const __grid_constant__ DispatchArguments a) {
  run_dispatch<Mode, kPlain, kHooks>(a);
}

}  // namespace

Choice<DispatchArguments> choose(const Config& c, const DispatchCall& call) {
  if (call.hooks) return choose_with_hooks(c, call);
  return choose_mode(c, call, [&](auto mode) {
    using Mode = decltype(mode);
    return decode_choice("decode::dispatch", c, call.mapped_only ? dispatch<Mode, true, false> : dispatch<Mode, false, false>);
  });
}

}  // namespace decode
}  // namespace pplx::cuda
