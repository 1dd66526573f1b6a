// The kernels of combine(): one launch, or one per half; release() is a combine without rows.
#pragma once

#include "../host/launch_table.h"
#include "combine_recv.cuh"

namespace pplx::cuda::decode {
namespace {

// kMappedOnly: see is_mapped_only(); the other kernels handle every case. kSent: a lane's vectors of a strip that is summed. kPieces: also
// steps in pieces.
template <typename T, bool kMappedOnly, int kSent, bool kPieces = !kMappedOnly>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocksPerSm) combine(const __grid_constant__ CombineArguments a) {
  PPLX_SHARED(typename CombineExtras<!kPieces>::Shared, s);
  const Common& k = a.common;
  PPLX_SHARED(LaunchTime::Begun, begun);
  const LaunchTime time(k, begun, kCombineWarps - 1);
  mark_stage(k, 0, Stage::CombineBegins);
  FirstStrip<T, kMappedOnly, kSent> first;
  if (a.send) first.load_places(a);
  const std::uint32_t entry = a.recv ? load_token_row(a, receive_unit(first_of_warp())) : kNone;
  std::uint32_t step = 0;
  const auto load_first_strip = [&] {
    if (kMappedOnly && a.send) first.load(a);
  };
  if (!begin_combine(a, step, kCombineWarps, s, load_first_strip)) return;
  s.entries[threadIdx.x] = entry;  // registers are for the sums meanwhile
  if (a.recv) begin_to_close(k, step);
  time.keep(Op::Combine, step, a.send, a.recv);
  bool rounds = false;
  if constexpr (kPieces) rounds = k.heap.in_pieces && s.many != 0;
  if (rounds) {
    if constexpr (kPieces) CombineExtras<!kPieces>::template send_rounds<T>(a, step, s);
  } else if (a.send) {
    const CombineUnits units(a, s);
    const bool copies = k.c.layout == LayoutKind::Compact;
    const std::uint32_t senders = kCombineWarps - (kMappedOnly && a.recv ? receivers_of_combine(units.all, gridDim.x, copies) : 0);
    if (threadIdx.x / 32 == kCombineWarps - 1) {  // the others ask whose the block's share is when their first sums are ready
      if (threadIdx.x % 32 == 0) s.mine = take_share(k, Op::Combine, blockIdx.x, step);
      s.claimed.set();
    }
    if constexpr (!kMappedOnly)
      if (k.remote != 0 && !has_relays(k)) CombineExtras<kMappedOnly>::find_what_may_be_sent(k, step, s);
    const bool sent = kMappedOnly && units.small && (copies || kSent == kSentVectorsOfFew);
    if (sent) first.send(a, step, units, s);
    if (threadIdx.x / 32 < senders) send_combine<T, kMappedOnly, kSent>(a, step, units, senders, first.places, sent, s);
  }
  if (a.recv) {
    count_step(a, s.rows_begin);
    receive_combine<T, kMappedOnly, received_vectors(kSent)>(a, step, s);
    close_set(k, step);
  }
  mark_stage(k, step, Stage::CombineEnds);
  time.end(Op::Combine, step, a.send, a.recv, false);
}

}  // namespace
}  // namespace pplx::cuda::decode
