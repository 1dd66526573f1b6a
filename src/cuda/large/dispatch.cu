// dispatch() of many tokens. With hooks, or with peers of other nodes, by the general kernel.
#include "dispatch_kernel.cuh"

namespace pplx::cuda {
namespace large {

Choice<DispatchArguments> choose_rounds(const Config& config, const DispatchCall& call);  // rounds/dispatch.cu

Choice<DispatchArguments> choose(const Config& c, const DispatchCall& call) {
  if (in_pieces(c)) return choose_rounds(c, call);
  return choose_mode(c, call, [&](auto mode) -> Choice<DispatchArguments> {
    using Mode = decltype(mode);
    if (call.general) return {"large::dispatch, general", dispatch<Mode, true, false>, kLargeThreads, DispatchMemory(c).bytes};
    return {"large::dispatch", dispatch<Mode, false, false>, kLargeThreads, DispatchMemory(c).bytes};
  });
}

}  // namespace large

bool can_dispatch_large(const Config& c, std::uint32_t shared_bytes) {
  const std::size_t shared = in_pieces(c) ? kBytesOfObject<DispatchShared<true>> : kBytesOfObject<DispatchShared<false>>;
  return (in_pieces(c) || c.replicas == 1) && payload_bytes(c) % 16 == 0 &&
         kWorkers * counting_bytes(c) <= kRingBytes && DispatchMemory(c).bytes + shared <= shared_bytes &&
         (can_deal_sends(c) || !quantised(c.wire));
}

}  // namespace pplx::cuda
