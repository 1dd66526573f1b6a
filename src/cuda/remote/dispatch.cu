// dispatch() of few tokens in every case: peers of other nodes, dead ranks, replicas, a given plan, few tokens in pieces.
#include "../decode/dispatch_kernel.cuh"
#include "dispatch_extras.cuh"

namespace pplx::cuda::decode {

Choice<DispatchArguments> choose_general(const Config& c, const DispatchCall& call) {
  return choose_mode(c, call, [&](auto mode) {
    return decode_choice("decode::dispatch, general", c, dispatch<decltype(mode), false, false>, bytes_of_rounds(c));
  });
}

}  // namespace pplx::cuda::decode
