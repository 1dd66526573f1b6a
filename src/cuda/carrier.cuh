// A carrier that GPUs drive themselves, as kernels see it: five calls, and no library's name. docs/carriers.md has what each promises,
// and what other libraries would take. Kernels are compiled once for each carrier; PPLX_CARRIER names the header that has the five. In
// the build without one a host thread carries, and nobody calls them.
//
//   put(k, peer, ctx, to, from, bytes, signal)   the bytes land at the peer, then its signal counts one more. Nothing orders two puts.
//                                                A thread's, or with kWarp a warp's. Neither waits for a peer
//   signal(k, peer, ctx, signal)                 the count alone
//   reached(signal, n)                           whether this rank's signal has counted to n: then all that it counted is there
//   left(k, peer, ctx)                           whether what was put may be written again, once the peer has answered it
//   error(k)                                     0, or what the library says is wrong
//
// `to` and `signal` are where this rank has the same place: its memory is laid out like the peer's. ctx: who puts with the same one
// follows the other, and has released what it puts to the system.
#pragma once

#include <cstddef>

#include "words.cuh"

#ifdef PPLX_CARRIER
#include PPLX_CARRIER
#endif

namespace pplx::cuda {

#ifdef PPLX_CARRIER

inline constexpr bool kCarrier = true;

// Remote, and reached by stores: rows go to it one by one, by whoever has them; a warp copies each.
__device__ inline bool is_near(const Common& k, std::uint32_t peer) { return (k.near >> peer & 1) != 0; }
// To these a block goes as a whole.
__device__ inline std::uint64_t far_peers(const Common& k) { return k.remote & ~k.near; }

__device__ inline char* signal_of(const Common& k, std::uint32_t step, PutSignal signal, std::uint32_t source) {
  return k.blocks + signal_at(k.heap, k.c, set_of(k.c, step), signal, source);
}
__device__ inline std::uint64_t* of_signal(std::uint64_t (*counts)[kPutSignals][kMaxPeers], const Common& k, std::uint32_t step,
                                           PutSignal signal, std::uint32_t peer) {
  return &counts[set_of(k.c, step)][static_cast<int>(signal)][peer];
}
__device__ inline std::uint32_t context_of(const Common& k, std::uint32_t step, Op op) {
  return set_of(k.c, step) * kOps + static_cast<std::uint32_t>(op);
}

// A part of this rank's block for the peer. What other threads stored of it, they released to this one.
template <bool kWarp>
__device__ inline void put_part(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, const char* from, std::uint64_t bytes,
                                PutSignal signal) {
  const std::uint32_t set = set_of(k.c, step);
  char* to = k.blocks + k.heap.slot_at(k.c, set, op, k.c.rank) + (from - block_for(k, set, op, peer));
  linger(k, std::uint64_t{step} << 32 | peer << 8 | static_cast<std::uint32_t>(signal));
  if (!kWarp || threadIdx.x % 32 == 0)
    add_relaxed(reinterpret_cast<unsigned long long*>(of_signal(k.puts->posted, k, step, signal, peer)), 1);
  carrier::put<kWarp>(k, peer, context_of(k, step, op), to, from, bytes, signal_of(k, step, signal, k.c.rank));
}

// How many puts of rows there will have been for the peer after this block, of so many. Where there are none, nothing is said.
__device__ inline std::uint64_t row_puts_with(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t more) {
  return is_near(k, peer) ? *of_signal(k.puts->promised, k, step, rows_signal(op), peer) + more : 0;
}

// A block as a whole, by one thread.
__device__ inline void put_block(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows) {
  const BlockLayout& layout = op == Op::Dispatch ? k.dispatch : op == Op::Combine ? k.combine : k.weights;
  put_part<false>(k, step, op, peer, block_for(k, set_of(k.c, step), op, peer), layout.bytes(rows), header_signal(op));
  note(k, Stage::Told);
}

// A block's first bytes, by a warp whose lanes have met since they were stored.
__device__ inline void put_first(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint64_t bytes,
                                 std::uint64_t row_puts) {
  if (threadIdx.x % 32 == 0 && op != Op::Weights) *of_signal(k.puts->promised, k, step, rows_signal(op), peer) = row_puts;
  put_part<true>(k, step, op, peer, block_for(k, set_of(k.c, step), op, peer), bytes, header_signal(op));
  note(k, Stage::Told);
}

// Waits until this rank's signal has counted so many since its generation began.
static __device__ __noinline__ bool wait_for_puts(const Common& k, std::uint32_t step, PutSignal signal, Phase phase,
                                                  std::uint32_t peer, std::uint64_t n) {
  const char* const word = signal_of(k, step, signal, peer);
  const std::uint64_t wanted = *of_signal(k.puts->base, k, step, signal, peer) + n;
  // What has been seen is the peer's step before, as far as anybody can say.
  const std::uint64_t seen = arrival_word(k.generation, step - k.c.in_flight);
  const bool good = keep_looking(k, word, phase, step, peer, seen, [&] {
    if (carrier::reached(word, wanted)) return true;
    if (const std::uint64_t error = carrier::error(k))
      fail(k, {AbortReason::Fabric, phase, k.c.rank, peer, step}, arrival_word(k.generation, step), error);
    return false;
  });
  linger(k, wanted);
  return good;
}

// Waits for the first put of the peer's block: its header is there, and of a block that came as a whole all of it.
__device__ inline bool wait_for_first(const Common& k, std::uint32_t step, Op op, Phase phase, std::uint32_t peer) {
  std::uint64_t* const turns = of_signal(k.puts->turns, k, step, header_signal(op), peer);
  const std::uint64_t turn = op == Op::Weights ? *turns + 1 : turn_of(k.c, step, *turns);
  if (!wait_for_puts(k, step, header_signal(op), phase, peer, turn)) return false;
  *turns = turn;
  return true;
}

// After its header was checked: waits for the rows that came by themselves.
__device__ inline bool wait_for_rows(const Common& k, std::uint32_t step, Op op, Phase phase, std::uint32_t peer) {
  const auto* words = reinterpret_cast<const std::uint32_t*>(own_slot(k, set_of(k.c, step), op, peer) + offsetof(BlockHeader, row_puts));
  const std::uint64_t row_puts = __ldcg(words) | std::uint64_t{__ldcg(words + 1)} << 32;
  return row_puts == 0 || wait_for_puts(k, step, rows_signal(op), phase, peer, row_puts);
}

// Once the peer has answered it: waits until the block may be written again.
__device__ inline bool wait_until_left(const Common& k, std::uint32_t step, Op op, Phase phase, std::uint32_t peer) {
  const std::uint64_t seen = arrival_word(k.generation, step - k.c.in_flight);
  return keep_looking(k, nullptr, phase, step, peer, seen, [&] { return carrier::left(k, peer, context_of(k, step, op)); });
}

#else

inline constexpr bool kCarrier = false;
__device__ inline bool is_near(const Common&, std::uint32_t) { return false; }
__device__ inline std::uint64_t far_peers(const Common& k) { return k.remote; }
__device__ inline std::uint64_t row_puts_with(const Common&, std::uint32_t, Op, std::uint32_t, std::uint32_t) { return 0; }
__device__ inline void put_block(const Common&, std::uint32_t, Op, std::uint32_t, std::uint32_t) {}
__device__ inline void put_first(const Common&, std::uint32_t, Op, std::uint32_t, std::uint64_t, std::uint64_t) {}
template <bool kWarp>
__device__ inline void put_part(const Common&, std::uint32_t, Op, std::uint32_t, const char*, std::uint64_t, PutSignal) {}
__device__ inline bool wait_for_first(const Common&, std::uint32_t, Op, Phase, std::uint32_t) { return false; }
__device__ inline bool wait_for_rows(const Common&, std::uint32_t, Op, Phase, std::uint32_t) { return true; }
__device__ inline bool wait_until_left(const Common&, std::uint32_t, Op, Phase, std::uint32_t) { return true; }

#endif

}  // namespace pplx::cuda
