// dispatch() in pieces, whatever the number of tokens. The receive half sends what the send half must wait for.
#include "../large/dispatch_kernel.cuh"

namespace pplx::cuda {
namespace large_rounds {

Choice<DispatchArguments> choose(const Config& c, const DispatchCall& call) {
  return choose_mode(c, call, [&](auto mode) -> Choice<DispatchArguments> {
    return {"large::dispatch in rounds", large::dispatch<decltype(mode), true, true>, kLargeThreads, DispatchMemory(c).bytes};
  });
}

}  // namespace large_rounds
}  // namespace pplx::cuda
