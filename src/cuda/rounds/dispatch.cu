// dispatch() of few tokens, in an AllToAll in pieces. One kernel does every case; another one raises words of hooks, too.
#include "../decode/dispatch_kernel.cuh"
#include "../extras/hooks.cuh"
#include "../remote/dispatch_extras.cuh"
#include "decode_dispatch.cuh"

namespace pplx::cuda {
namespace decode_rounds {
namespace {

template <typename Mode, bool kHooks>
__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch(const __grid_constant__ DispatchArguments a) {
  run_dispatch<Mode, false, kHooks, DispatchRounds>(a);
}

}  // namespace

Choice<DispatchArguments> choose(const Config& c, const DispatchCall& call) {
  return choose_mode(c, call, [&](auto mode) {
    using Mode = decltype(mode);
    return decode_choice("decode_rounds::dispatch", c, call.hooks ? dispatch<Mode, true> : dispatch<Mode, false>);
  });
}

}  // namespace decode_rounds
}  // namespace pplx::cuda
