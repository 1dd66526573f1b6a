// A carrier that GPUs drive themselves, as kernels see it: five calls, and no library's name. docs/carriers.md has what each promises,
// and what other libraries would take. Kernels are compiled once for each carrier; PPLX_CARRIER names the header that has the five. In
// the build without one a host thread carries, and nobody calls them.
//
//   put(k, peer, ctx, to, from, bytes, signal)   the bytes land at the peer, then its signal counts one more. Nothing orders two puts.
//                                                A thread's. Does not wait for the peer
//   signal(k, peer, ctx, signal)                 the count alone
//   reached(signal, n)                           whether this rank's signal has counted to n: then all that it counted is there
//   left(k, peer, ctx)                           whether what was put may be written again, once the peer has answered it
//   error(k)                                     0, or what the library says is wrong
//
// `to` and `signal` are where this rank has the same place: its memory is laid out like the peer's. ctx: who puts with the same one
// follows the other, and has released what it puts to the system.
//
// Remote peers are those that stores do not reach: the others' memory is mapped, whoever made it (pplx_comm/wiring/gpu_memory.py).
#pragma once

#include "words.cuh"

#ifdef PPLX_CARRIER
#include PPLX_CARRIER
#endif

namespace pplx::cuda {

#ifdef PPLX_CARRIER

inline constexpr bool kCarrier = true;

__device__ inline char* signal_of(const Common& k, std::uint32_t step, Op op, std::uint32_t source) {
  return k.blocks + signal_at(k.heap, k.c, set_of(k.c, step), op, source);
}
__device__ inline std::uint64_t* of_signal(std::uint64_t (*counts)[kOps][kMaxPeers], const Common& k, std::uint32_t step, Op op,
                                           std::uint32_t peer) {
  return &counts[set_of(k.c, step)][static_cast<int>(op)][peer];
}
__device__ inline std::uint32_t context_of(const Common& k, std::uint32_t step, Op op) {
  return set_of(k.c, step) * kOps + static_cast<std::uint32_t>(op);
}

// This rank's block for the peer, by one thread: one put, and one signal. What other threads stored of it, they released to this one.
__device__ inline void put_block(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows) {
  const BlockLayout& layout = op == Op::Dispatch ? k.dispatch : op == Op::Combine ? k.combine : k.weights;
  const std::uint32_t set = set_of(k.c, step);
  linger(k, std::uint64_t{step} << 32 | peer << 8 | static_cast<std::uint32_t>(op));
  ++*of_signal(k.puts->posted, k, step, op, peer);
  carrier::put(k, peer, context_of(k, step, op), k.blocks + k.heap.slot_at(k.c, set, op, k.c.rank), block_for(k, set, op, peer),
               layout.bytes(rows), signal_of(k, step, op, k.c.rank));
  note(k, Stage::Told);
}

// Waits for the peer's block: for as many puts as there are turns of its set, since the generation began.
static __device__ __noinline__ bool wait_for_put(const Common& k, std::uint32_t step, Op op, Phase phase, std::uint32_t peer) {
  const char* const word = signal_of(k, step, op, peer);
  std::uint64_t* const turns = of_signal(k.puts->turns, k, step, op, peer);
  const std::uint64_t turn = op == Op::Weights ? *turns + 1 : turn_of(k.c, step, *turns);
  const std::uint64_t wanted = *of_signal(k.puts->base, k, step, op, peer) + turn;
  // What has been seen is the peer's step before, as far as anybody can say.
  const std::uint64_t seen = arrival_word(k.generation, step - k.c.in_flight);
  const bool good = keep_looking(k, word, phase, step, peer, seen, [&] {
    if (carrier::reached(word, wanted)) return true;
    if (const std::uint64_t error = carrier::error(k))
      fail(k, {AbortReason::Fabric, phase, k.c.rank, peer, step}, arrival_word(k.generation, step), error);
    return false;
  });
  linger(k, wanted);
  if (good) *turns = turn;
  return good;
}

// Once the peer has answered it: waits until the block may be written again.
__device__ inline bool wait_until_left(const Common& k, std::uint32_t step, Op op, Phase phase, std::uint32_t peer) {
  const std::uint64_t seen = arrival_word(k.generation, step - k.c.in_flight);
  return keep_looking(k, nullptr, phase, step, peer, seen, [&] { return carrier::left(k, peer, context_of(k, step, op)); });
}

#else

inline constexpr bool kCarrier = false;
__device__ inline void put_block(const Common&, std::uint32_t, Op, std::uint32_t, std::uint32_t) {}
__device__ inline bool wait_for_put(const Common&, std::uint32_t, Op, Phase, std::uint32_t) { return false; }
__device__ inline bool wait_until_left(const Common&, std::uint32_t, Op, Phase, std::uint32_t) { return true; }

#endif

}  // namespace pplx::cuda
