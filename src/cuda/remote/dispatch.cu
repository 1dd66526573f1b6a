// dispatch() of few tokens in every case: peers of other nodes, dead ranks, replicas, a given plan, hooks, few tokens in pieces.
#include "../decode/dispatch_kernel.cuh"
#include "../extras/hooks.cuh"
#include "dispatch_extras.cuh"

namespace pplx::cuda::decode {

Choice<DispatchArguments> choose_with_extras(const Config& c, const DispatchCall& call) {
  return choose_mode(c, call, [&](auto mode) {
    using Mode = decltype(mode);
    const std::uint32_t rounds = bytes_of_rounds(c);
    if (call.mapped_only && !call.general) return decode_choice("decode::dispatch in pieces", c, dispatch<Mode, true, true>, rounds);
    return decode_choice("decode::dispatch, general", c, dispatch<Mode, false>, rounds);
  });
}

}  // namespace pplx::cuda::decode
