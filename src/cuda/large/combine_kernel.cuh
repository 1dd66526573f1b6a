// The common part of the kernels of a large combine: headers, and whole blocks of remote peers.
#pragma once

#include "../remote/relay_combine.cuh"
#include "../rounds/combine.cuh"
#include "tuning.h"

namespace pplx::cuda {
namespace {

// Sends a remote peer's header of a whole block, by a warp. parts: a row counts as that number.
__device__ inline void send_remote_header(const CombineArguments& a, std::uint32_t step, std::uint32_t peer, std::uint32_t rows,
                                          std::uint32_t flags, std::uint32_t parts) {
  const Common& k = a.common;
  if (a.uses_weights && !await_weights(k, step, peer)) return;
  write_header(k, block_for(k, set_of(k.c, step), Op::Combine, peer), step, rows, flags, threadIdx.x % 32);
  __syncwarp();
  if (threadIdx.x % 32 == 0) count_header(k, step, Op::Combine, peer, rows, parts);
}

// Waits for a remote peer's whole block, and passes on what comes of it, by one thread.
__device__ inline void receive_remote_header(const CombineArguments& a, std::uint32_t step, std::uint32_t peer) {
  const Common& k = a.common;
  if (!wait_for_block(k, step, Op::Combine, Phase::CombineRecv, peer)) return;
  const char* const block = own_slot(k, set_of(k.c, step), Op::Combine, peer);
  const BlockHeader h = load_header(block);
  if (!check_header(k, h, Phase::CombineRecv, step, peer)) return;
  if (has_relays(k)) note_overflows(a, peer, load_arrived(block + offsetof(BlockHeader, overflowed)).x);
  if (check_combine_header(a, step, peer, h.rows, h.flags)) pass_on_rows(k, step, Op::Combine, Phase::CombineRecv, peer, h.rows);
  see_it_leave(k, step, Op::Dispatch, Phase::DispatchSend, peer);
}

// The shares of these follow those of weights: a header for each rank, and 32 remote peers whose blocks a warp passes on.
__device__ inline bool take_header(const Common& k, std::uint32_t step, std::uint32_t n) {
  return take_share(k, Op::Weights, kMaxPeers + n, step);
}
__device__ inline bool take_peers(const Common& k, std::uint32_t step, std::uint32_t first) {
  return of_first_lane([&] { return take_header(k, step, kMaxPeers + first / 32); }) != 0;
}

// Sends remote peers' headers of whole blocks, once this rank's weights have gone: peers' are waited for.
__device__ inline void send_remote_headers(const CombineArguments& a, std::uint32_t step, const CombineShared& s) {
  const Common& k = a.common;
  const std::uint32_t flags = flags_of(a) | (*a.received.overflowed != 0 ? kOverflowed : 0u);
  if (!may_write_all(k, step, Op::Combine)) return;
  for (std::uint32_t n = 0; n < remote_peers(k); ++n) {
    if (of_first_lane([&] { return take_header(k, step, n); }) == 0) continue;
    const std::uint32_t peer = k.order[n];
    send_remote_header(a, step, peer, s.rows_begin[peer + 1] - s.rows_begin[peer], flags, 1);
  }
}

// Passes on remote peers' whole blocks, by one warp of a launch that receives: a lane looks after a peer.
__device__ inline void pass_on_blocks(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  for (std::uint32_t first = 0; first < remote_peers(k); first += 32) {
    if (!take_peers(k, step, first)) continue;
    const std::uint32_t n = first + threadIdx.x % 32;
    if (n < remote_peers(k) && (a.relays.skipped >> k.order[n] & 1) == 0) receive_remote_header(a, step, k.order[n]);
    __syncwarp();
  }
}

// Takes this block's share, and sends headers that are not sent yet, by one warp. Those that the proxy carries come later.
template <bool kExtras = false>
__device__ inline void begin_to_send(const CombineArguments& a, std::uint32_t step, CombineShared& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, carried = kExtras && has_relays(k) ? 0 : remote_peers(k);
  if (lane == 0) s.mine = take_share(k, Op::Combine, blockIdx.x, step);
  s.claimed.set();
  for (std::uint32_t n = carried + lane; n < k.living; n += 32) {
    if (!take_header(k, step, n)) continue;
    const std::uint32_t peer = k.order[n], rows = a.release ? 0 : s.rows_begin[peer + 1] - s.rows_begin[peer];
    const std::uint32_t flags = flags_of(a) | (*a.received.overflowed != 0 ? kOverflowed : 0u);
    fuzz_delay(k, rows);
    store_tagged(k, block_of_sums<!kExtras>(a, step, peer), step, rows, flags, k.c.rank);
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
