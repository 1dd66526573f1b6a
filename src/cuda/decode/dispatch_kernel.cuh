// The kernels of dispatch(): one launch, or one per half.
#pragma once

#include "dispatch_recv.cuh"
#include "dispatch_send.cuh"
#include "../host/launch_table.h"

namespace pplx::cuda {
namespace {

struct DispatchShared {
  SendShared send;
  ReceiveShared receive;
};
template <typename Rounds>
struct DispatchRoundsShared : DispatchShared {
  typename Rounds::Rows rounds[kDispatchWarps];
};

// All blocks are whole. rounds/decode_dispatch.cuh has the other case.
struct WholeBlocks {
  static constexpr bool kPieces = false;
};

// kMappedOnly: all peers are on this node, at most 32 and none dead, there are no replicas, and the plan is made from ids. The other kernels
// can do all. kHooks: the caller's kernels hear of what has come. Rounds: how blocks come. What this rank sends is whole.
template <typename Mode, bool kMappedOnly, bool kHooks, typename Rounds = WholeBlocks>
__device__ __forceinline__ void run_dispatch(const DispatchArguments& a) {
  using Shared = std::conditional_t<Rounds::kPieces, DispatchRoundsShared<Rounds>, DispatchShared>;
  PPLX_LAUNCHED_SHARED(words);  // the send half's counts by expert, then the receive half's places
  PPLX_SHARED(Shared, s);
  const Common& k = a.common;
  const std::uint64_t begun = k.stamps != nullptr ? nanoseconds() : 0;
  mark_stage(k, Stage::DispatchBegins);
  if (threadIdx.x == 0) {
    s.receive.rows_known.init();
    s.receive.placed.init();
    s.receive.next = 0;
  }
  if (threadIdx.x < kMaxPeers) s.receive.choices[threadIdx.x] = 0;
  std::uint32_t step = 0;
  if (a.send) {
    EarlyLoads<Mode, kMappedOnly> early;
    if (is_publisher()) {
      read_step(a, s.send);
    } else if (is_sender()) {
      early.load(a, blockIdx.x);
      forget_counts(k, s.send, words);
    }
    __syncthreads();
    mark_stage(k, Stage::Claimed);
    step = s.send.step;
    if (is_sender()) send_dispatch<Mode, kMappedOnly>(a, early, s.send, words);
    if (is_publisher()) publish_dispatch<kMappedOnly>(a, s.send);
  } else if (!find_open_step(a, step)) {
    if (kHooks) raise_after_failure(a);
    return;
  }
  if (a.recv) {
    const Experts experts{words + align_up(k.c.num_experts, kNumbersOfPiece), k.expert_pieces};
    if (counts_rows()) count_rows(a, step, s.receive);
    if constexpr (Rounds::kPieces)
      if (counts_rows()) Rounds::hear(a, step, s.receive);
    if (places_rows()) place_rows<kMappedOnly, kHooks>(a, step, s.receive, experts);
    if constexpr (!kMappedOnly)
      if (k.remote != 0 && looks_after_proxy()) DispatchExtras<kMappedOnly>::template pass_on<Rounds::kPieces>(a, step);
    if constexpr (Rounds::kPieces)
      Rounds::template receive<kMappedOnly, kHooks>(a, step, s.receive, experts, s.rounds[warp_of_block()]);
    else
      receive_dispatch<kMappedOnly, kHooks>(a, step, s.receive, experts);
    if (kHooks) raise_after_failure(a);
  }
  mark_stage(k, Stage::DispatchEnds);
  stamp(k, Op::Dispatch, step, begun);
}

std::uint32_t shared_bytes(const Config& c) {
  return 4 * (static_cast<std::uint32_t>(align_up(c.num_experts, 4)) + (c.world + 1) * kNumbersOfPiece * expert_pieces(c));
}

inline Choice<DispatchArguments> decode_choice(const char* name, const Config& c, void (*kernel)(DispatchArguments)) {
  return {name, kernel, kDispatchThreads, shared_bytes(c)};
}

}  // namespace
}  // namespace pplx::cuda
