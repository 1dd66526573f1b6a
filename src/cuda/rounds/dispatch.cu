// dispatch() in pieces, whatever the number of tokens. The receive half sends what the send half must wait for.
#include "../large/dispatch_kernel.cuh"

namespace pplx::cuda::large {

Choice<DispatchArguments> choose_rounds(const Config& c, const DispatchCall& call) {
  return choose_mode(c, call, [&](auto mode) -> Choice<DispatchArguments> {
    return {"large::dispatch in rounds", dispatch<decltype(mode), true, true>, kLargeThreads, DispatchMemory(c).bytes};
  });
}

}  // namespace pplx::cuda::large
