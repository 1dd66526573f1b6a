// dispatch() of few tokens that tells the caller's kernels which rows have come (extras/hooks.cuh), by the general kernel in every
// case: hooks are for rows that a network spreads over time.
#include "../decode/dispatch_kernel.cuh"
#include "../remote/dispatch_extras.cuh"
#include "hooks.cuh"

namespace pplx::cuda::decode {

Choice<DispatchArguments> choose_with_hooks(const Config& c, const DispatchCall& call) {
  return choose_mode(c, call, [&](auto mode) {
    return decode_choice("decode::dispatch with hooks", c, dispatch<decltype(mode), false, true>, bytes_of_rounds(c));
  });
}

}  // namespace pplx::cuda::decode
