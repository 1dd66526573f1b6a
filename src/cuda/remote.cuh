// Peers of other nodes: a host thread, the proxy, moves their blocks. Both ends of a block lie in this rank's pinned host memory,
// which kernels write and read as they do a peer's.
//
//   sending     Each warp (or thread block) that has stored its part of a block says so in a count, and the header, which knows how
//               many parts there are, counts, too. Whoever completes the count tells the proxy, by the peer's word in the mailbox.
//   receiving   The proxy raises arrival words in host memory, which lie across PCIe: one thread for each of them looks there, and
//               raises the same word in device memory for everybody else. Hundreds of threads that look at one word take 150 us.
//   writing     A block is written again only after all of it has left, which the proxy says in host memory, too. The thread that
//   again       looks after a peer's answer looks there as well: a set's dispatch has left before its combine is complete, a combine
//               and weights before the set's next dispatch. So who writes knows from device memory.
//
// The warp that looks is not chosen by number: it claims the task, since only a thread block that runs can be waited for.
//
// Why a block is there for whoever sees its arrival word:
//
//   blocks in host memory   The proxy raises the word after the provider's completion. A NIC writes a completion after the data, and
//                           posted writes of one requester do not pass each other (PCI Express Base Specification, 2.4.1, transaction
//                           ordering), so the CPU that sees it sees the data; a provider that copies has stored it on that CPU. The
//                           GPU reads host memory through the same coherent caches, and a read that it issues after it has seen the
//                           word (ld.acquire.sys) is served later. Whether the word lies in host memory or was written to the GPU
//                           makes no difference.
//   blocks in GPU memory    The NIC's data goes to the GPU, its completion to host memory, and no rule of PCIe orders writes to two
//                           targets where they arrive. CUDA says of a GPU (cudaDevAttrGPUDirectRDMAWritesOrdering) from which scope on
//                           it keeps the order: at "owner" and above, what a NIC wrote before is seen by the GPU that owns the memory
//                           before what it observes after. Below that such blocks are not placed there (pplx_comm/wiring/placement.py), for
//                           the other way, cudaDeviceFlushGPUDirectRDMAWrites, is a call into the driver while kernels wait.
//
// tests/gpu/test_placement.py attacks it with rows of one step after the other's in the same place.
#pragma once

#include "../protocol/mailbox.h"
#include "words.cuh"

namespace pplx::cuda {

// A count is complete when it has reached this. The header's share is that, less what the others will add.
inline constexpr std::uint32_t kComplete = 1u << 30;

__device__ inline MailboxEntry mailbox_of(const Common& k, std::uint32_t step, Op op, std::uint32_t peer) {
  return mailbox_entry(k.heap, k.c, k.host, step, op, peer);
}
__device__ inline std::uint64_t* announced(const Common& k, std::uint32_t step, Op op, std::uint32_t peer) {
  return &k.control->announced[set_of(k.c, step)][static_cast<int>(op)][peer];
}

// The proxy's word for that lies in host memory; this is the last that was seen of it.
__device__ inline std::uint64_t* seen_to_leave(const Common& k, std::uint32_t step, Op op, std::uint32_t peer) {
  return &k.control->left[set_of(k.c, step)][static_cast<int>(op)][peer];
}

// Whether the last block of that set is known to have left.
__device__ inline bool is_seen_to_leave(const Common& k, std::uint64_t last, std::uint32_t step, Op op, std::uint32_t peer) {
  return has_left(*seen_to_leave(k, step, op, peer), last);
}

// Whether the peer's block of this step may be written. No: something failed, and the proxy may still read the last one. A thread block
// that begins late may find this step's announced: others have asked before they wrote it.
__device__ inline bool may_write(const Common& k, std::uint32_t step, Op op, std::uint32_t peer) {
  const std::uint64_t last = load_relaxed(announced(k, step, op, peer));
  return last == arrival_word(k.generation, step) || is_seen_to_leave(k, last, step, op, peer);
}

// Waits until the last block of that set has left.
__device__ inline void see_it_leave(const Common& k, std::uint32_t step, Op op, Phase phase, std::uint32_t peer) {
  const std::uint64_t last = *announced(k, step, op, peer);
  if (is_seen_to_leave(k, last, step, op, peer)) return;
  if (wait<Match::Reached>(k, mailbox_of(k, step, op, peer).sent, phase, static_cast<std::uint32_t>(last), peer))
    *seen_to_leave(k, step, op, peer) = last;
}

// The block is complete, and this thread knows it.
__device__ inline void tell_proxy(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows) {
  linger(k, rows);
  announce<Atomics>(mailbox_of(k, step, op, peer), k.generation, {step, rows}, *announced(k, step, op, peer));
  note(k, Stage::Told);
}

// This thread's group has stored `parts` of the block's parts, and met at a barrier. rows(): of the block, asked of whoever
// completes it; what it reads may have been written by another part.
template <typename Rows>
__device__ inline void count_stored(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t parts,
                                    const Rows& rows) {
  std::uint32_t* count = &k.control->stored[set_of(k.c, step)][static_cast<int>(op)][peer];
  linger(k, std::uint64_t{step} << 32 | peer);
  if (count_in_order(count, parts) + parts != kComplete) return;
  *count = 0;
  tell_proxy(k, step, op, peer, rows());
}

// Whether this thread's block is the first to ask in this step: then it looks after the words of host memory.
__device__ inline bool claim_words(const Common& k, std::uint32_t step, Op op) {
  const unsigned long long mine = 1ull << 32 | step;
  return atomicExch(&k.control->looked_after[set_of(k.c, step)][static_cast<int>(op)], mine) != mine;
}

__device__ inline bool wait_for_proxy(const Common& k, std::uint32_t step, Signal signal, Phase phase, std::uint32_t peer) {
  return wait<Match::Reached>(k, k.arrivals + k.heap.arrival_at(k.c, set_of(k.c, step), signal, peer), phase, step, peer);
}

// For the other threads of this GPU, who wait for it in device memory.
__device__ inline void pass_on(const Common& k, std::uint32_t step, Signal signal, std::uint32_t peer) {
  char* word = k.peers[k.c.rank] + k.heap.arrival_at(k.c, set_of(k.c, step), signal, peer);
  const std::uint64_t value = arrival_word(k.generation, step);
  linger(k, value);
  store_release_here(word, value);
}

}  // namespace pplx::cuda
