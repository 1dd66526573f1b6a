// dispatch() of few tokens that tells the caller's kernels which rows have come: extras/hooks.cuh.
#include "../decode/dispatch_kernel.cuh"
#include "../remote/dispatch_extras.cuh"
#include "hooks.cuh"

namespace pplx::cuda {
namespace decode {

Choice<DispatchArguments> choose_with_hooks(const Config& c, const DispatchCall& call) {
  return choose_mode(c, call, [&](auto mode) {
    using Mode = decltype(mode);
    return decode_choice("decode::dispatch with hooks", c, call.mapped_only ? dispatch<Mode, true, true> : dispatch<Mode, false, true>);
  });
}

}  // namespace decode
}  // namespace pplx::cuda
