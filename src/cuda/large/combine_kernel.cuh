// The common part of the kernels of a large combine: headers, and rows that are fetched.
//
// Experts may have written into one of the heap's buffers (Config::lent): receivers fetch the rows that they are offered then. Rows of a
// source that has few, and of one of whose rows some have no place, are stored.
//
// Fetches are not acknowledged. A buffer is lent again to a dispatch at least `in_flight` later (pplx_comm/device/lent.py), and written behind its
// receive half. All peers have sent theirs by then, so they have closed the step in which they fetched from it.
#pragma once

#include "../decode/combine_recv.cuh"
#include "../rounds/combine.cuh"
#include "tuning.h"

namespace pplx::cuda {
namespace {

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
    good = good && await_tagged(k, own_slot<true>(k, set, Op::Combine, peer), Phase::CombineRecv, step, peer, vec16);
    if (!good || (vec16.y & kOffered) == 0) continue;
    const std::uint64_t bytes = std::uint64_t{a.plan.rows[peer]} * k.row_bytes;
    good = await_tagged(k, k.peers[k.c.rank] + k.heap.offer_at(k.c, set, peer), Phase::CombineRecv, step, peer, vec16);
    if (!good) continue;
    const std::uint64_t at = vec16.x | std::uint64_t{vec16.y} << 32;
    good = k.heap.has_made(k.c, at, bytes) || blame(k, Phase::CombineRecv, step, peer, k.heap.made, at);
    if (good) rows_at[peer] = k.peers[peer] + at;
  }
  fence_system();
  return all_of_warp(good);
}

// Takes this block's share, and sends headers and offers that are not sent yet, by one warp. Their shares follow those of weights.
// Remote peers get a header with each round instead.
__device__ inline void begin_to_send(const CombineArguments& a, std::uint32_t step, CombineShared& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, set = set_of(k.c, step);
  if (lane == 0) s.mine = take_share(k, Op::Combine, blockIdx.x, step);
  s.claimed.set();
  for (std::uint32_t n = remote_peers(k) + lane; n < k.living; n += 32) {
    if (!take_share(k, Op::Weights, kMaxPeers + n, step)) continue;
    const std::uint32_t peer = k.order[n], rows = a.release ? 0 : s.rows_begin[peer + 1] - s.rows_begin[peer];
    std::uint32_t flags = flags_of(a) | (*a.received.overflowed != 0 ? kOverflowed : 0u);
    if (is_offered(a, s, peer)) {
      flags |= kOffered;
      const std::uint64_t at = a.made_at + std::uint64_t{s.rows_begin[peer]} * k.row_bytes;
      fence_system();  // experts' kernels have written
      fuzz_delay(k, at);
      store_tagged(k, k.peers[peer] + k.heap.offer_at(k.c, set, k.c.rank), step, static_cast<std::uint32_t>(at),
                   static_cast<std::uint32_t>(at >> 32), 0);
    }
    fuzz_delay(k, rows);
    store_tagged(k, block_for(k, set, Op::Combine, peer), step, rows, flags, k.c.rank);
  }
  __syncwarp();
}

__device__ inline void receive_all_headers(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  for (std::uint32_t i = remote_peers(k) + threadIdx.x % 32 * gridDim.x + blockIdx.x; i < k.living; i += 32 * gridDim.x)
    receive_header(a, step, k.order[i]);
  __syncwarp();
}

}  // namespace
}  // namespace pplx::cuda
