// A large combine whose experts wrote into one of the heap's buffers (Config::lent): receivers fetch the rows that they are offered. Rows of a
// source that has few, and of one of whose rows some have no place, are stored.
//
// Fetches are not acknowledged. A buffer is lent again to a dispatch at least `in_flight` later (pplx_comm/device/lent.py), and written behind its
// receive half. All peers have sent theirs by then, so they have closed the step in which they fetched from it.
#pragma once

#include "../decode/combine_recv.cuh"
#include "span_timer.cuh"
#include "tuning.h"

namespace pplx::cuda {

// True if this source is offered its rows: it has many tokens then, and receives by a kernel that fetches. All rows of a source lie side by side.
__device__ inline bool is_offered(const CombineArguments& a, const CombineShared& s, std::uint32_t source) {
  const std::uint32_t end = s.rows_begin[source + 1];
  return a.made_at != 0 && has_many(s, source) && end <= a.expert_rows;
}

// Finds out where each peer's rows are fetched from, null where they are stored. By a dealer. False: something failed.
__device__ inline bool hear_of_rows(const CombineArguments& a, std::uint32_t step, char** rows_at) {
  const Common& k = a.common;
  const SpanTimer waits(k, Span::AwaitingSums);
  bool good = true;
  for (std::uint32_t n = threadIdx.x % 32; n < k.living; n += 32) {
    const std::uint32_t peer = k.order[n], set = set_of(k.c, step);
    rows_at[peer] = nullptr;
    uint4 vec16;
    good = good && await_tagged(k, own_slot(k, set, Op::Combine, peer), Phase::CombineRecv, step, peer, vec16);
    if (!good || (vec16.y & kOffered) == 0) continue;
    const std::uint64_t bytes = std::uint64_t{a.plan.rows[peer]} * k.row_bytes;
    good = await_tagged(k, k.peers[k.c.rank] + k.heap.offer_at(k.c, set, peer), Phase::CombineRecv, step, peer, vec16);
    if (!good) continue;
    const std::uint64_t at = vec16.x | std::uint64_t{vec16.y} << 32;
    good = k.heap.has_made(k.c, at, bytes);
    if (good)
      rows_at[peer] = k.peers[peer] + at;
    else
      fail(k, {AbortReason::Protocol, Phase::CombineRecv, k.c.rank, peer, step}, k.heap.made, at);
  }
  fence_system();
  return all_of_warp(good);
}

}  // namespace pplx::cuda
