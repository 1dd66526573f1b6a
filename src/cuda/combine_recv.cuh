// combine_recv: a warp per strip of a token takes it from each of its rows, and adds them, ranks ascending. Every
// peer's header is waited for too: it says that the peer has read this rank's dispatch. Replicas: see slices.cuh.
#pragma once

#include "slices.cuh"

namespace pplx::cuda {

__device__ inline void receive_combine_header(const CombineArguments& a, std::uint32_t step, std::uint32_t peer) {
  const Common& k = a.common;
  const bool remote = is_remote(k, peer);
  if (remote ? !wait_for_proxy(k, step, Signal::Combine, Phase::CombineRecv, peer)
             : !wait<Match::Reached>(k, arrival(k, step, Signal::Combine, peer), Phase::CombineRecv, step, peer))
    return;
  bool good = true;
  const BlockHeader h = read_header(k, own_slot(k, set_of(k.c, step), Op::Combine, peer), Phase::CombineRecv, step, peer, good);
  if (!good) return;
  const std::uint32_t expected = a.release ? 0 : a.plan.rows[peer];
  const std::uint32_t flags = (a.release ? kReleased : 0u) | (a.uses_weights ? kUsesWeights : 0u) | (a.has_tail ? kHasTail : 0u);
  if ((h.flags & kFlagsAlike) != flags)
    fail(k, {AbortReason::Protocol, Phase::CombineRecv, k.c.rank, peer, step}, kFlags | flags, h.flags);
  else if (h.rows != expected)
    fail(k, {AbortReason::Protocol, Phase::CombineRecv, k.c.rank, peer, step}, expected, h.rows);
  else if (remote)
    pass_on(k, step, Signal::Combine, peer);
  if (remote) see_it_leave(k, step, Op::Dispatch, Phase::DispatchSend, peer);
  if ((h.flags & kOverflowed) != 0) k.report->notices.overflowed = 1 + peer;
}

// Before any thread block waits for rows of remote peers, one that runs looks after them: a thread for each.
__device__ inline void receive_remote_headers(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  bool mine = false;
  if (threadIdx.x == 0) mine = claim_words(k, step, Op::Combine);
  if (__syncthreads_or(mine) == 0) return;
  const std::uint32_t peer = threadIdx.x;
  if (peer < k.c.world && is_remote(k, peer) && (k.dead >> peer & 1) == 0) receive_combine_header(a, step, peer);
  __syncwarp();
}

// Neighbours go to different multiprocessors.
__device__ inline std::uint32_t first_receive_unit() { return threadIdx.x / 32 * gridDim.x + blockIdx.x; }

// This lane's row of one of this rank's tokens, if it has so many. Known before the send half: loaded early.
__device__ inline std::uint32_t load_token_row(const CombineArguments& a, std::uint32_t unit) {
  const std::uint32_t lane = threadIdx.x % 32, token = unit / strips_of_row(a.common, kReceivedVectors);
  return lane < a.common.c.top_k && token < a.own && !a.release
             ? a.plan.token_rows[std::uint64_t{token} * a.common.c.top_k + lane]
             : kNone;
}

// The floats that came behind a token's n rows, those of choices that went nowhere 0. Each of the first n lanes has a row and its
// rank. False: they will not come.
template <bool kGives>
__device__ inline bool read_tail(const CombineArguments& a, std::uint32_t step, std::uint32_t own, std::uint32_t n,
                                 const char* row, std::uint32_t rank) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const bool good =
      lane >= n || is_remote(k, rank) || wait<Match::Exact>(k, row + k.combine.arrival_at, Phase::CombineRecv, step, rank);
  if (!all_of_warp(good)) return false;
  const std::int32_t id = lane < k.c.top_k ? a.plan.ids[std::uint64_t{own} * k.c.top_k + lane] : -1;
  const std::uint32_t wanted = id < 0 ? kNone : k.per_rank.divide(static_cast<std::uint32_t>(id));
  std::uint32_t value = 0;
  for (std::uint32_t i = 0; i < n; ++i) {
    const std::uint32_t from = __shfl_sync(~0u, rank, i);
    const auto* its_row = reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), i));
    if (from == wanted) value = __ldcg(reinterpret_cast<const std::uint32_t*>(its_row + k.combine.tail_at) + lane);
  }
  if (lane < k.c.top_k) a.tail_out[std::uint64_t{k.slice.token(own)} * k.c.top_k + lane] = value;
  if (kGives) give_tail(k, step, own, value);
  return true;
}

// A strip of one of this rank's tokens. `entry`: this lane's row of it. kGives: replicas get it, too. False: its rows will not
// come.
template <typename T, bool kTail, bool kGives>
__device__ inline bool receive_strip(const CombineArguments& a, std::uint32_t step, std::uint32_t unit, std::uint32_t entry) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, set = set_of(k.c, step);
  const std::uint32_t bytes = row_bytes(k), strips = strips_of_row(k, kReceivedVectors);
  const std::uint32_t own = unit / strips, strip = unit % strips;
  const std::uint32_t n = __popc(__ballot_sync(~0u, entry != kNone));
  char* row = nullptr;
  if (entry != kNone) row = own_slot(k, set, Op::Combine, entry >> 20) + k.combine.row_at(entry & 0xfffffu);
  const std::uint32_t begin = strip * strip_bytes(kReceivedVectors) + lane * 16;
  const std::uint32_t end = min(bytes, (strip + 1) * strip_bytes(kReceivedVectors));
  char* y = a.y + k.slice.token(own) * a.y_stride;
  Sums<T, kReceivedVectors> sums;
  if (a.accumulate) sums.load(y, begin, end);
  const auto pointer = [&](std::uint32_t i) {
    return reinterpret_cast<char*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), i));
  };
  const auto rank = [&](std::uint32_t i) { return __shfl_sync(~0u, entry, i) >> 20; };
  if (!sums.add_arriving(k, step, n, begin, end, pointer, rank)) return false;
  sums.store(y, begin, end);
  note(k, Stage::Added);
  if (kGives) give_strip(k, step, own, sums, begin, end);
  return !kTail || strip != strips - 1 || read_tail<kGives>(a, step, own, n, row, entry >> 20);
}

// A replica does its own strips first, which the others wait for, then takes theirs. False: something failed.
template <typename T, bool kTail>
__device__ __noinline__ bool receive_with_replicas(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const std::uint32_t others = k.slice.of - 1, strips = strips_of_row(k, kReceivedVectors), units = others + a.own * strips;
  std::uint32_t unit = claim_slice(k, step, units);
  while (unit < units) {
    const std::uint32_t next = claim_slice(k, step, units);
    if (unit < others)
      send_slice_header(a, step, member(k, k.slice.number + 1 + unit));
    else if (!receive_strip<T, kTail, true>(a, step, unit - others, load_token_row(a, unit - others)))
      return false;
    unit = next;
  }
  const std::uint32_t warp = first_receive_unit(), warps = kWarps * gridDim.x;
  for (unit = warp; unit < (a.tokens - a.own) * strips; unit += warps)
    if (!take_strip<kTail>(a, step, unit)) return false;
  for (std::uint32_t i = warps - 1 - warp; i < others; i += warps)
    if (threadIdx.x % 32 == 0) receive_slice_header(a, step, (k.slice.number + 1 + i) % k.slice.of);
  return true;
}

template <typename T, bool kTail>
__device__ void receive_combine(const CombineArguments& a, std::uint32_t step, std::uint32_t entry) {
  const Common& k = a.common;
  const std::uint32_t warp = first_receive_unit(), warps = kWarps * gridDim.x;
  if (k.remote != 0) receive_remote_headers(a, step);
  if (k.slice.of == 1) {
    const std::uint32_t units = a.release ? 0 : a.own * strips_of_row(k, kReceivedVectors);
    for (std::uint32_t unit = warp; unit < units; unit += warps) {
      if (unit != warp) entry = load_token_row(a, unit);
      if (!receive_strip<T, kTail, false>(a, step, unit, entry)) return;
    }
  } else if (!a.release && !receive_with_replicas<T, kTail>(a, step)) {
    return;
  }
  // The last warps, which have the least to do.
  for (std::uint32_t i = warps - 1 - warp; i < k.living; i += warps)
    if (threadIdx.x % 32 == 0 && !is_remote(k, k.order[i])) receive_combine_header(a, step, k.order[i]);
}

}  // namespace pplx::cuda
