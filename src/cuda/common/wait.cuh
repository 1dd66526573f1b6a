// Words between ranks, on the device: release stores, acquire loads, and waits that end.
//
// Readers: one thread acquires, its group synchronises, then plain loads that bypass L1. Writers: the group stores, synchronises,
// and one thread releases. A release at system scope takes about 2 us, so each warp (or thread block) has its own under way.
#pragma once

#include "../../protocol/deadlines.h"
#include "../../protocol/abort.h"
#include "../../protocol/arrival.h"
#include "ptx.cuh"
#include "debug.cuh"
#include "rows.cuh"

namespace pplx::cuda {

// Releases all that was stored before to any reader of this word.
__device__ inline void publish(const Common& k, void* word, std::uint64_t value) {
  fuzz_delay(k, value);
  store_release(word, value);
}

__device__ inline bool is_remote(const Common& k, std::uint32_t peer) { return (k.remote >> peer & 1) != 0; }

__device__ inline std::uint32_t first_expert_of(const Common& k, std::uint32_t rank) { return rank * k.experts_per_rank; }
__device__ inline std::uint32_t local_experts_of(const Common& k, std::uint32_t rank) {
  const std::uint32_t first = first_expert_of(k, rank);
  return first >= k.c.num_experts ? 0 : min(k.c.num_experts - first, k.experts_per_rank);
}

// Returns the block that came from the peer, or the one for the peer: in the peer's memory, or in what the proxy sends.
template <bool kMappedOnly = false>
__device__ inline char* own_slot(const Common& k, std::uint32_t set, Op op, std::uint32_t peer) {
  if (kMappedOnly || !is_remote(k, peer)) return k.peers[k.c.rank] + k.heap.slot_at(k.c, set, op, peer);
  return k.blocks + k.heap.remote_slot_at(set, op, count_ranks_below(k.rails, peer));
}
template <bool kMappedOnly = false>
__device__ inline char* block_for(const Common& k, std::uint32_t set, Op op, std::uint32_t peer) {
  if (kMappedOnly || !is_remote(k, peer)) return k.peers[peer] + k.heap.slot_at(k.c, set, op, k.c.rank);
  return k.blocks + k.heap.spaced_send_at(k.c, set, op, count_ranks_below(k.rails, peer));
}
// The first failure latches: here, at the host, and at every peer.
static __device__ __noinline__ void fail(const Common& k, const Abort& what, std::uint64_t expected, std::uint64_t seen) {
  const std::uint64_t word = abort_word(what);
  if (atomicCAS(&k.control->failure, 0ull, static_cast<unsigned long long>(word)) != 0) return;
  k.report->expected = expected;
  k.report->seen = seen;
  store_release(&k.report->failure, word);
  for (std::uint32_t i = 0; i < k.living; ++i) {
    if (is_remote(k, k.order[i])) continue;  // the host tells them
    atomicCAS_system(reinterpret_cast<unsigned long long*>(k.peers[k.order[i]] + Heap::abort_at(k.generation)), 0ull,
                     static_cast<unsigned long long>(word));
  }
}

// Fails of what a peer must not send. Returns false.
__device__ inline bool blame(const Common& k, Phase phase, std::uint32_t step, std::uint32_t peer, std::uint64_t expected,
                             std::uint64_t seen) {
  fail(k, {AbortReason::Protocol, phase, k.c.rank, peer, step}, expected, seen);
  return false;
}

// Returns true if any rank has failed. The host's word lies across PCIe, so callers rarely ask for it.
__device__ inline bool stopped(const Common& k, bool ask_host) {
  if (load_relaxed(&k.control->failure) != 0) return true;
  std::uint64_t word = load_relaxed(k.peers[k.c.rank] + Heap::abort_at(k.generation));
  if (word == 0 && ask_host) word = load_relaxed(&k.report->abort);
  if (word == 0) return false;
  if (atomicCAS(&k.control->failure, 0ull, static_cast<unsigned long long>(word)) == 0) store_release(&k.report->failure, word);
  return true;
}

__device__ inline bool said_goodbye(const Common& k, std::uint32_t peer) { return load_acquire(&k.report->left) >> peer & 1; }

// In-row words are written once a step and must be exact; others are monotonic.
enum class Match { Exact, Reached };

template <Match match>
__device__ inline bool matches(const Common& k, std::uint64_t word, std::uint32_t step) {
  return match == Match::Exact ? word == arrival_word(k.generation, step) : arrived(word, k.generation, step);
}

// Tells a wait that has looked in vain for a while how to go on. Left: the peer closed; all that it sent was there before it said
// so. Busy: some rank says that it comes later, so the peer's time begins anew.
enum class Verdict { GoOn, Failed, Left, Busy };

// A word of a remote peer in this GPU's memory is passed on by a warp that looks at the proxy's (remote/proxy.cuh), and that may
// wait for another peer meanwhile. The forwarding warp times out first, so the late peer is blamed.
inline constexpr auto kPassedOnNs = static_cast<std::uint64_t>(deadlines::kPassedOn.seconds * 1e9);
inline constexpr auto kBusyNs = static_cast<std::uint64_t>(deadlines::kBusy.seconds * 1e9);

// Decides how a long wait goes on. turn: earlier calls of this wait; one in 256 looks across PCIe at the host's words. first: when
// it began; begun: when the peer's time began.
static __device__ __noinline__ Verdict poll_failure(const Common& k, const void* word, std::uint32_t turn, std::uint64_t first,
                                           std::uint64_t begun, Phase phase, std::uint32_t step, std::uint32_t peer,
                                           std::uint64_t seen) {
  const auto at = reinterpret_cast<std::uint64_t>(word) - reinterpret_cast<std::uint64_t>(k.peers[k.c.rank]);
  const bool ask_host = (turn & 255) == 255, passed_on = is_remote(k, peer) && at < k.heap.mapped_bytes;
  if (stopped(k, ask_host)) return Verdict::Failed;
  if (ask_host && !passed_on && said_goodbye(k, peer)) return Verdict::Left;
  const std::uint64_t limit = k.timeout_ns * (step == k.c.first_step ? deadlines::kFirstStepFactor : 1) + (passed_on ? kPassedOnNs : 0);
  const std::uint64_t now = nanoseconds();
  const bool late = now - begun > limit;
  // Any rank: the one that is waited for may wait for the busy one itself.
  if ((late || ask_host) && load_acquire(&k.report->busy) != 0 && now - first < kBusyNs) return Verdict::Busy;
  if (!late) return Verdict::GoOn;
  fail(k, {AbortReason::Timeout, phase, k.c.rank, peer, step}, arrival_word(k.generation, step), seen);
  return Verdict::Failed;
}

// Calls look() until it returns true; false after a failure, which tells of seen(). kLooks: between two calls of poll_failure().
template <std::uint32_t kLooks = 256, typename Seen, typename Look>
__device__ inline bool keep_looking(const Common& k, const void* word, Phase phase, std::uint32_t step, std::uint32_t peer,
                                    const Seen& seen, const Look& look) {
  const std::uint64_t first = nanoseconds();
  std::uint64_t begun = first;
  for (std::uint32_t i = 1; !look(); ++i) {
    if (i % kLooks != 0) continue;
    const Verdict verdict = poll_failure(k, word, i / kLooks, first, begun, phase, step, peer, seen());
    if (verdict == Verdict::Failed) return false;
    if (verdict == Verdict::Busy) begun = nanoseconds();
    if (verdict != Verdict::Left || look()) continue;
    fail(k, {AbortReason::Closed, phase, k.c.rank, peer, step}, arrival_word(k.generation, step), seen());
    return false;
  }
  return true;
}

template <Match match>
__device__ __noinline__ bool wait_long(const Common& k, const void* word, Phase phase, std::uint32_t step, std::uint32_t peer,
                                       std::uint64_t& seen) {
  // Each acquire makes its multiprocessor forget what it has in L1, the stacks of other warps among it: there is one, at the end.
  return keep_looking(k, word, phase, step, peer, [&] { return seen; }, [&] {
    seen = load_relaxed(word);
    if (!matches<match>(k, seen, step)) return false;
    seen = load_acquire(word);
    return true;
  });
}

// False: something failed, here or elsewhere, and what was waited for may never come.
template <Match match>
__device__ inline bool wait(const Common& k, const void* word, Phase phase, std::uint32_t step, std::uint32_t peer) {
  std::uint64_t seen = load_acquire(word);
  const bool good = matches<match>(k, seen, step) || wait_long<match>(k, word, phase, step, peer, seen);
  fuzz_delay(k, seen);
  return good;
}

// Returns true if all lanes of a warp succeeded. Then every lane sees what any has waited for; a vote alone orders no memory.
__device__ inline bool all_of_warp(bool good) {
  __syncwarp();
  return __all_sync(~0u, good);
}

}  // namespace pplx::cuda
