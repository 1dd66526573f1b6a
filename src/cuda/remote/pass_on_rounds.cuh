// Passes on what the proxy, or a carrier's signals, say of blocks in pieces: one warp of a launch looks, and writes it to device memory.
// It waits for none of these words alone, and it ends when all has come that the launch waits for.
#pragma once

#include "../rounds/rounds.cuh"

namespace pplx::cuda {

__device__ inline std::uint32_t pieces_at_host(const Common& k, std::uint64_t words, std::uint32_t step, Op op, std::uint32_t peer) {
  return pieces_in(load_acquire(k.host + k.heap.count_at(k.c, words, set_of(k.c, step), op, peer)), k.generation, step);
}
// Leading pieces of the peer's block that are here. `known` of them were passed on, and there are `most`: a carrier's signals count on from there.
__device__ inline std::uint32_t landed_pieces(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t known, std::uint32_t most) {
  if (kCarrier) return landed_by_signals(k, step, op, peer, known, most);
  return pieces_at_host(k, k.heap.pieces, step, op, peer);
}
// Those of this rank's block that both the peer and the network are done with.
__device__ inline std::uint32_t free_pieces(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t known, std::uint32_t most) {
  if (kCarrier) return free_by_signals(k, step, op, peer, known, most);
  return min(pieces_at_host(k, k.heap.consumed, step, op, peer), pieces_at_host(k, k.heap.left, step, op, peer));
}

// The header of a piece that has come. False: it is not what this step must have there, which `expected` and `seen` say.
__device__ inline bool check_piece_header(const Common& k, const BlockHeader& h, Phase phase, std::uint32_t step, std::uint32_t peer, std::uint32_t piece,
                                          std::uint32_t pieces, const PieceRows& of) {
  if (!check_header(k, h, phase, step, peer)) return false;
  if (h.piece == piece && h.pieces == pieces && h.begin == of.begin && h.end == of.end) return true;
  return blame(k, phase, step, peer, piece, h.piece);
}

// A lane's view of one remote peer: how far it is, and how far it must come.
struct PassedPeer {
  std::uint32_t peer = 0, landed = 0, all_landed = 0, room = 0, all_room = 0;
  __device__ bool waits() const { return landed < all_landed || room < all_room; }
};
struct PassedPhases {
  Op op;
  Phase send, recv;
};

// One look at a peer's words. take(piece): checks what has come. False: it was wrong.
template <typename Take>
__device__ inline bool pass_on_peer(const Common& k, const PieceArguments& p, std::uint32_t step, Op op, PassedPeer& of, bool& moved, const Take& take) {
  if (of.landed < of.all_landed) {
    const std::uint32_t landed = min(landed_pieces(k, step, op, of.peer, of.landed, of.all_landed), of.all_landed), before = of.landed;
    for (; of.landed < landed; ++of.landed)
      if (!take(of.peer, of.landed)) return false;
    if (of.landed != before) {
      if (kCarrier) hear_landed(k, step, op, of.peer, before, of.landed);
      fuzz_delay(k, of.landed);
      store_release_here(remote_word(k, p, RemoteWord::Landed, step, op, of.peer), pieces_word(k.generation, step, of.landed));
      moved = true;
    }
  }
  if (of.room < of.all_room) {
    const std::uint32_t room = min(free_pieces(k, step, op, of.peer, of.room, of.all_room), of.all_room);
    if (room != of.room) {
      if (kCarrier) hear_free(k, step, op, of.peer, of.room, room);
      of.room = room;
      fuzz_delay(k, room);
      store_release_here(remote_word(k, p, RemoteWord::Room, step, op, of.peer), pieces_word(k.generation, step, room));
      moved = true;
    }
  }
  return true;
}

// Passes on, by a warp. begin(PassedPeer&): what a lane's peer is known to have done, and is to do. False: something failed.
template <typename Begin, typename Take>
__device__ inline bool pass_on_rounds(const Common& k, const PieceArguments& p, std::uint32_t step, const PassedPhases& phases, const Begin& begin,
                                      const Take& take) {
  constexpr std::uint32_t kOfLane = kMaxPeers / 32, kLooks = 16;
  PassedPeer peers[kOfLane];
  std::uint64_t first = nanoseconds(), begun = first;
#pragma unroll
  for (std::uint32_t i = 0; i < kOfLane; ++i) {
    const std::uint32_t nth = threadIdx.x % 32 + 32 * i;
    if (nth >= remote_peers(k)) continue;
    peers[i].peer = k.order[nth];
    begin(peers[i]);
  }
  for (std::uint32_t looks = 1;; ++looks) {
    bool good = true, waits = false, moved = false;
#pragma unroll
    for (std::uint32_t i = 0; i < kOfLane; ++i) {
      if (good && peers[i].waits()) good = pass_on_peer(k, p, step, phases.op, peers[i], moved, take);
      waits = waits || peers[i].waits();
    }
    if (moved) begun = nanoseconds();
    if (good && waits && looks % kLooks == 0) {
      const PassedPeer& of = peers[0].waits() ? peers[0] : peers[kOfLane - 1];
      const bool lands = of.landed < of.all_landed;
      const Phase phase = lands ? phases.recv : phases.send;
      const std::uint64_t expected = kRound | (lands ? 0 : kToBeRead) | (lands ? of.landed : of.room);
      look_for_carrier_errors(k, step, phase);
      const Verdict verdict = ask_for_round(k, looks / kLooks, first, begun, phase, step, of.peer, expected, false, kPassersWait);
      if (verdict == Verdict::Busy) begun = nanoseconds();
      if (verdict == Verdict::Failed) good = false;
      if (verdict == Verdict::Left) {
        // All that it sent was there before it said so.
        good = landed_pieces(k, step, phases.op, of.peer, of.landed, of.all_landed) > of.landed ||
               free_pieces(k, step, phases.op, of.peer, of.room, of.all_room) > of.room;
        if (!good) fail(k, {AbortReason::Closed, phase, k.c.rank, of.peer, step}, expected, 0);
      }
    }
    if (!all_of_warp(good)) return false;
    if (!__any_sync(~0u, waits)) return true;
  }
}

// Waits until the last block of that set has left, whole or in pieces: see_it_leave() of remote/proxy.cuh.
__device__ inline void see_pieces_leave(const Common& k, const PieceArguments& p, std::uint32_t step, Op op, Phase phase, std::uint32_t peer) {
  if (kCarrier) return see_it_leave(k, step, op, phase, peer);
  const std::uint64_t last = *announced(k, step, op, peer);
  if (is_seen_to_leave(k, last, step, op, peer)) return;
  const auto its_step = static_cast<std::uint32_t>(last);
  const std::uint32_t told = pieces_in(*remote_word(k, p, RemoteWord::Told, step, op, peer), k.generation, its_step);
  const char* const left = k.host + k.heap.count_at(k.c, k.heap.left, set_of(k.c, step), op, peer);
  const std::uint32_t piece = max(1u, told) - 1;
  if (says_round(k, left, its_step, piece, false) || await_round(k, left, phase, its_step, peer, piece, Says::Read))
    *seen_to_leave(k, step, op, peer) = last;
}

// How many rounds must have room again before this launch has sent `rounds` rounds to a peer.
__device__ inline std::uint32_t rounds_to_be_free(const PieceArguments& p, std::uint32_t rounds) {
  const std::uint32_t sent = min(rounds, p.end);
  return sent > kPlaces ? sent - kPlaces : 0;
}

}  // namespace pplx::cuda
