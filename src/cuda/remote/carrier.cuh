// A carrier that GPUs drive themselves, as kernels see it: put, signal, reached, left and error (docs/carriers.md). Kernels are compiled once
// for each carrier; PPLX_CARRIER names the header that has the five. In the build without one a host thread carries.
//
// The two places of blocks in pieces have a ctx each, and so have credits.
//
// Remote peers are those that stores do not reach: the others' memory is mapped, whatever made it (pplx_comm/wiring/gpu_memory.py).
#pragma once

#include "../common/counters.cuh"

#ifdef PPLX_CARRIER
#include PPLX_CARRIER
#include "../../protocol/signals.h"
#endif

namespace pplx::cuda {

#ifdef PPLX_CARRIER

inline constexpr bool kCarrier = true;

__device__ inline char* signal_of(const Common& k, std::uint32_t step, Op op, std::uint32_t part, std::uint32_t source) {
  return k.blocks + signal_at(k.heap, k.c, set_of(k.c, step), op, part, source);
}
__device__ inline std::uint64_t* of_signal(std::uint64_t (*counts)[kOps][kMostParts][kMaxPeers], const Common& k, std::uint32_t step, Op op,
                                           std::uint32_t part, std::uint32_t peer) {
  return &counts[set_of(k.c, step)][static_cast<int>(op)][part][peer];
}
__device__ inline std::uint32_t context_of(const Common& k, std::uint32_t step, Op op, std::uint32_t nth = 0) {
  return (nth * k.c.in_flight + set_of(k.c, step)) * kOps + static_cast<std::uint32_t>(op);
}

// Puts the bytes [begin, end) of this rank's block for the peer, a part, by one thread, to which others have released their stores.
__device__ inline void put_part(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t part, std::uint64_t begin, std::uint64_t end) {
  const std::uint32_t set = set_of(k.c, step);
  fuzz_delay(k, std::uint64_t{step} << 32 | part << 16 | peer << 8 | static_cast<std::uint32_t>(op));
  ++*of_signal(k.puts->posted, k, step, op, part, peer);
  carrier::put(k, peer, context_of(k, step, op), k.blocks + k.heap.remote_slot_at(set, op, k.slot_at[peer]) + begin,
               block_for(k, set, op, peer) + begin, end - begin, signal_of(k, step, op, part, k.c.rank));
  mark_told(k, step, op);
}

// A turn of a part that was not heard of yet, and how far its signal counts then, since there are signals.
struct AwaitedPut {
  std::uint64_t* turns;
  std::uint64_t turn, wanted;

  __device__ AwaitedPut(const Common& k, std::uint32_t step, Op op, std::uint32_t part, std::uint32_t peer, bool in_pieces = false)
      : turns(of_signal(k.puts->turns, k, step, op, part, peer)),
        turn(in_pieces || op == Op::Weights || part != 0 ? *turns + 1 : turn_of(k.c, step, *turns)),
        wanted(*of_signal(k.puts->base, k, step, op, part, peer) + turn) {}
};

// With any peer: the one that is waited for may itself wait for what was lost on its way to another.
__device__ inline void look_for_carrier_errors(const Common& k, std::uint32_t step, Phase phase) {
  for (std::uint64_t peers = k.remote & ~k.dead; peers != 0; peers &= peers - 1) {
    const std::uint32_t peer = lowest_rank(peers);
    if (const std::uint64_t error = carrier::error(k, peer))
      fail(k, {AbortReason::Fabric, phase, k.c.rank, peer, step}, arrival_word(k.generation, step), error);
  }
}

// Waits for the first part of the peer's block: until the signal has counted the turns of its set since the generation began. kPieces: for the
// first piece, which is one put more than were heard of.
template <bool kPieces>
static __device__ __noinline__ bool wait_for_put(const Common& k, std::uint32_t step, Op op, Phase phase, std::uint32_t peer) {
  const char* const word = signal_of(k, step, op, 0, peer);
  const AwaitedPut put(k, step, op, 0, peer, kPieces);
  // The last step that was seen for certain is the peer's step before.
  const auto seen = [&] { return arrival_word(k.generation, step - k.c.in_flight); };
  WaitTimer timer;
  const bool good = keep_looking(k, word, phase, step, peer, seen, [&] {
    timer.look();
    if (carrier::reached(word, put.wanted)) return true;
    look_for_carrier_errors(k, step, phase);
    return false;
  });
  fuzz_delay(k, put.wanted);
  if (op != Op::Weights) timer.count(k, op, peer);
  if (good) *put.turns = put.turn;
  return good;
}

// True if a later part has landed. Then its turn is over.
__device__ inline bool later_part_landed(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t part) {
  const AwaitedPut put(k, step, op, part, peer);
  if (!carrier::reached(signal_of(k, step, op, part, peer), put.wanted)) return false;
  *put.turns = put.turn;
  return true;
}

// Once the peer has answered it: waits until the block may be written again.
__device__ inline bool wait_until_left(const Common& k, std::uint32_t step, Op op, Phase phase, std::uint32_t peer) {
  const auto seen = [&] { return arrival_word(k.generation, step - k.c.in_flight); };
  return keep_looking(k, nullptr, phase, step, peer, seen, [&] {
    if (carrier::left(k, peer, context_of(k, step, op)) && (!k.heap.in_pieces || carrier::left(k, peer, context_of(k, step, op, 1)))) return true;
    look_for_carrier_errors(k, step, phase);
    return false;
  });
}

// ---- blocks in pieces

__device__ inline char* piece_signal_of(const Common& k, std::uint32_t step, Op op, std::uint32_t nth, std::uint32_t source) {
  return k.blocks + piece_signal_at(k.heap, k.c, set_of(k.c, step), op, nth, source);
}

// Puts a piece of `rows` rows, which is complete: see put_part().
__device__ inline void put_piece(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t piece, std::uint32_t rows) {
  const BlockLayout& layout = op == Op::Dispatch ? k.dispatch : k.combine;
  const std::uint32_t set = set_of(k.c, step), place = piece % kPlaces;
  const std::uint64_t at = k.heap.piece_at(op, piece);
  ++*of_signal(k.puts->posted, k, step, op, place, peer);
  carrier::put(k, peer, context_of(k, step, op, place), k.blocks + k.heap.remote_slot_at(set, op, k.slot_at[peer]) + at,
               block_for(k, set, op, peer) + at, layout.bytes(rows), piece_signal_of(k, step, op, place, k.c.rank));
}

// This rank has read the peer's next piece. By one thread, which has seen that those before were told of.
__device__ inline void put_credit(const Common& k, std::uint32_t step, Op op, std::uint32_t peer) {
  fuzz_delay(k, std::uint64_t{step} << 32 | peer);
  ++*of_signal(k.puts->posted, k, step, op, kCreditSignal, peer);
  carrier::signal(k, peer, context_of(k, step, op, kCreditSignal), piece_signal_of(k, step, op, kCreditSignal, k.c.rank));
}

// True if a signal counts `more` beyond what was heard of it, and one.
__device__ inline bool counts_beyond(const Common& k, std::uint32_t step, Op op, std::uint32_t nth, std::uint32_t peer, std::uint32_t more) {
  const std::uint64_t heard = *of_signal(k.puts->base, k, step, op, nth, peer) + *of_signal(k.puts->turns, k, step, op, nth, peer);
  return carrier::reached(piece_signal_of(k, step, op, nth, peer), heard + more + 1);
}

// How many leading pieces of the peer's block have landed, and of how many this rank's block may be written again: the peer has read them, and
// they have left. `known` is how many were heard of, `most` how many there are.
__device__ inline std::uint32_t landed_by_signals(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t known, std::uint32_t most) {
  std::uint32_t n = known;
  while (n < most && counts_beyond(k, step, op, n % kPlaces, peer, (n - known) / kPlaces)) ++n;
  return n;
}
__device__ inline std::uint32_t free_by_signals(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t known, std::uint32_t most) {
  std::uint32_t n = known;
  while (n < most && counts_beyond(k, step, op, kCreditSignal, peer, n - known) && carrier::left(k, peer, context_of(k, step, op, n % kPlaces))) ++n;
  return n;
}
// Notes that they were heard of, by the one thread that looks for them.
__device__ inline void hear_landed(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t known, std::uint32_t now) {
  for (std::uint32_t n = known; n < now; ++n) ++*of_signal(k.puts->turns, k, step, op, n % kPlaces, peer);
}
__device__ inline void hear_free(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t known, std::uint32_t now) {
  *of_signal(k.puts->turns, k, step, op, kCreditSignal, peer) += now - known;
}

#else

inline constexpr bool kCarrier = false;
__device__ inline void put_part(const Common&, std::uint32_t, Op, std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t) {}
template <bool>
__device__ inline bool wait_for_put(const Common&, std::uint32_t, Op, Phase, std::uint32_t) { return false; }
__device__ inline bool later_part_landed(const Common&, std::uint32_t, Op, std::uint32_t, std::uint32_t) { return false; }
__device__ inline void look_for_carrier_errors(const Common&, std::uint32_t, Phase) {}
__device__ inline bool wait_until_left(const Common&, std::uint32_t, Op, Phase, std::uint32_t) { return true; }
__device__ inline void put_piece(const Common&, std::uint32_t, Op, std::uint32_t, std::uint32_t, std::uint32_t) {}
__device__ inline void put_credit(const Common&, std::uint32_t, Op, std::uint32_t) {}
__device__ inline std::uint32_t landed_by_signals(const Common&, std::uint32_t, Op, std::uint32_t, std::uint32_t, std::uint32_t) { return 0; }
__device__ inline std::uint32_t free_by_signals(const Common&, std::uint32_t, Op, std::uint32_t, std::uint32_t, std::uint32_t) { return 0; }
__device__ inline void hear_landed(const Common&, std::uint32_t, Op, std::uint32_t, std::uint32_t, std::uint32_t) {}
__device__ inline void hear_free(const Common&, std::uint32_t, Op, std::uint32_t, std::uint32_t, std::uint32_t) {}

#endif

}  // namespace pplx::cuda
