// The kernels of dispatch(): one launch, or one per half.
#pragma once

#include "../host/launch_table.h"
#include "dispatch_recv.cuh"
#include "dispatch_send.cuh"

namespace pplx::cuda::decode {
namespace {

struct DispatchShared {
  SendShared send;
  ReceiveShared receive;
};

// Warps behind the senders with a part of their own. All warps receive rows once they have done theirs.
inline constexpr std::uint32_t kPublisher = kSenderWarps, kRowCounter = kPublisher + 1, kRowPlacer = kPublisher + 2;
inline constexpr std::uint32_t kProxyWatcher = kPublisher + 3, kObserver = kPublisher + 4;
static_assert(kObserver < kDispatchWarps);

// Meets the whole block, while its first loads are under way. Returns the step, which the publisher has read.
__device__ inline std::uint32_t hear_step(const Common& k, const SendShared& s) {
  __syncthreads();
  mark_stage(k, s.step, Stage::Claimed);
  return s.step;
}

// kMappedOnly: see is_mapped_only(); the other kernels handle every case, and raise words of hooks, if there are any. kPieces: also steps
// in pieces.
template <typename Mode, bool kMappedOnly, bool kPieces = !kMappedOnly>
__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch(const __grid_constant__ DispatchArguments a) {
  constexpr bool kHooks = !kMappedOnly;
  PPLX_LAUNCHED_SHARED(words);  // the send half's counts by expert, then the receive half's places
  PPLX_SHARED(DispatchShared, s);
  const Common& k = a.common;
  const std::uint32_t warp = threadIdx.x / 32;
  PPLX_SHARED(LaunchTime::Begun, begun);
  const LaunchTime time(k, begun, kObserver);
  mark_stage(k, 0, Stage::DispatchBegins);
  if (threadIdx.x == 0) {
    s.receive.rows_known.init();
    s.receive.placed.init();
    s.receive.next = 0;
  }
  if (threadIdx.x < kMaxPeers) s.receive.choices[threadIdx.x] = 0;
  std::uint32_t step = 0;
  if (a.send) {
    if (warp < kSenderWarps) {
      EarlyLoads<Mode, kMappedOnly> early;
      early.load(a, blockIdx.x);
      forget_counts(k, s.send, words);
      step = hear_step(k, s.send);
      send_dispatch<Mode, kMappedOnly>(a, early, s.send, words);
    } else {
      if (warp == kPublisher) read_step(a, s.send);
      step = hear_step(k, s.send);
      time.keep(Op::Dispatch, step, true, a.recv);
      if (warp == kPublisher) publish_dispatch<kMappedOnly>(a, s.send);
    }
  } else if (!find_open_step(a, step)) {
    if constexpr (kHooks) HookWords<kHooks>::raise_after_failure(a);
    return;
  } else {
    time.keep(Op::Dispatch, step, false, true);
  }
  if (a.recv) {
    const Experts experts{words + align_up(k.c.num_experts, kNumbersOfVec16), k.expert_vec16s};
    if (warp == kRowCounter) {
      count_rows(a, step, s.receive);
    } else if (warp == kRowPlacer) {
      place_rows<kMappedOnly, kHooks>(a, step, s.receive, experts);
    } else if (warp == kObserver) {
      if (counts_here(k)) count_waits(a, step, s.receive);
    } else if constexpr (!kMappedOnly) {
      if (warp == kProxyWatcher && k.remote != 0) DispatchExtras<kMappedOnly>::pass_on(a, step);
    }
    receive_dispatch<kMappedOnly, kHooks, kPieces>(a, step, s.receive, experts);
    if constexpr (kHooks) HookWords<kHooks>::raise_after_failure(a);
  }
  mark_stage(k, step, Stage::DispatchEnds);
  time.end(Op::Dispatch, step, a.send, a.recv, false);
}

// more: bytes of shared memory behind the places of experts.
inline Choice<DispatchArguments> decode_choice(const char* name, const Config& c, void (*kernel)(DispatchArguments), std::uint32_t more = 0) {
  const auto counts = static_cast<std::uint32_t>(align_up(c.num_experts, kNumbersOfVec16));
  return {name, kernel, kDispatchThreads, 4 * (counts + (c.world + 1) * kNumbersOfVec16 * expert_vec16s(c)) + more};
}

}  // namespace
}  // namespace pplx::cuda::decode
