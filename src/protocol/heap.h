// A rank's memory, and where everything in it is; heap_layout.h computes it. The part that peers write into comes first and is the
// same on every rank; what only this rank and its proxy touch follows.
//
//   aborts | arrival[set][signal][peer] | turns | pieces[set][op][peer] | consumed[set][op][peer] | counts[set][s], rounds[set][s] | recv[set][s] | back[set][d] |
//   weights[set][s] | slices[set][replica] ||
//   mailbox | credits | outgoing | sent | left, rows in pieces | send areas
//
// On GPUs there are two memories, which begin with the same words: what mapped peers write into, up to slices, and what the proxy
// moves: slots for remote peers alone, then what follows the bars. On CPUs with node_ranks the proxy moves a RailArea (nodes.h).
//
// The words are explained in abort.h, arrival.h (arrival, counts), pieces.h (pieces, consumed, rounds, left) and mailbox.h
// (mailbox, credits, outgoing, sent); blocks in block.h. Only an AllToAll in pieces has the words that count them; one in parts has
// the first of these (parts.h).
#pragma once

#include "block.h"

namespace pplx {

// Arrival words of a rank, each per set and per peer. A header's word may be raised before its block's.
enum class Signal : std::uint8_t { Header, Dispatch, Combine, Weights, Slice };
inline constexpr std::uint32_t kSignals = 5;
constexpr Signal signal_of(Op op) {
  return op == Op::Dispatch ? Signal::Dispatch : op == Op::Combine ? Signal::Combine : Signal::Weights;
}

// Counts travel as vec16s, four numbers each: those of the local experts. Another vec16 begins with the rows, and
// where there are replicas one has what they compare: the number of tokens, and the digest of their ids, 21 bits in each number.
inline constexpr std::uint32_t kNumbersOfVec16 = 4;
constexpr std::uint32_t expert_vec16s(const Config& c) { return ceil_div(experts_per_rank(c), kNumbersOfVec16); }

struct Heap {
  std::uint64_t arrival = 0;            // u64 [in_flight][kSignals][world]
  std::uint64_t turns = 0;              // u64, with node_ranks: counts the proxy's. Mates see by it if this rank stands still
  std::uint64_t pieces = 0;             // u64 [in_flight][kPieceOps][world]
  std::uint64_t consumed = 0;           // u64 [in_flight][kPieceOps][world]
  std::uint64_t later_signals = 0;      // u64 [in_flight][kPieceOps][kMostParts - 1][world]: signals.h
  std::uint64_t counts = 0;             // vec16s [in_flight]: [world] rows, [world][expert_vec16s] choices, [world] what replicas compare,
                                        // on GPUs in pieces [world][most_rounds]
  std::uint64_t counts_bytes = 0, source_bytes = 0;  // sizes of a set's counts, and of one source's
  std::uint64_t slots[kOps] = {};       // blocks of mapped peers [in_flight][mapped_slots], by the op that fills them; from rank 0's on
  std::uint64_t remote_blocks[kOps] = {}; // blocks of remote peers [in_flight][remote_slots]; on the CPU the same slots
  std::uint64_t slot_bytes[kOps] = {};
  std::uint32_t mapped_slots = 0, remote_slots = 0;
  bool in_pieces = false, in_parts = false;
  std::uint32_t slot_rows = 0;          // rows of the largest block that is whole
  std::uint32_t piece_rows = 0;
  std::uint64_t place_bytes[kOps] = {}; // only in an AllToAll in pieces
  std::uint64_t slices = 0;              // blocks [in_flight][replicas]; none without replicas
  std::uint64_t slice_bytes = 0;        // size of one
  std::uint64_t mailbox = 0;            // u64 [in_flight][kOps][world], then credits [in_flight][kPieceOps][world]
  std::uint64_t outgoing = 0;           // u64 [in_flight][kOps][world]: where the announced block starts in this heap
  std::uint64_t sent = 0;               // u64 [in_flight][kOps][world]: arrival_word of the last block that left for good
  std::uint64_t left = 0;               // u64 [in_flight][kPieceOps][world]; on GPUs once more, of the rows in pieces
  std::uint64_t send[kOps] = {};        // blocks for remote peers [in_flight], packed back to back
  std::uint64_t send_bytes[kOps] = {};  // size of one set
  std::uint64_t mapped_bytes = 0;       // size of the part that mapped peers write into
  std::uint64_t shared_bytes = 0;       // size of the part that remote peers write into
  std::uint64_t bytes = 0;

  // Generations take turns. A rank that was left out at a reset still has this memory mapped. When it wakes up in an old step, it
  // aborts a generation that no rank uses any more.
  static constexpr std::uint32_t kAborts = 8;
  static constexpr std::uint64_t abort_at(std::uint32_t generation) { return std::uint64_t{kWordBytes} * (generation % kAborts); }

  constexpr std::uint64_t arrival_at(const Config& c, std::uint32_t set, Signal signal, std::uint32_t peer) const {
    return arrival + kWordBytes * ((std::uint64_t{set} * kSignals + std::uint32_t(signal)) * c.world + peer);
  }
  // Addresses words that count pieces: `words` is one of pieces, consumed and left.
  constexpr std::uint64_t count_at(const Config& c, std::uint64_t words, std::uint32_t set, Op op, std::uint32_t peer) const {
    return words + kWordBytes * ((std::uint64_t{set} * kPieceOps + std::uint32_t(op)) * c.world + peer);
  }
  // Where a carrier that kernels drive has the signal of a part behind the first.
  constexpr std::uint64_t later_signal_at(const Config& c, std::uint32_t set, Op op, std::uint32_t part, std::uint32_t peer) const {
    return later_signals + kWordBytes * (((std::uint64_t{set} * kPieceOps + std::uint32_t(op)) * (kMostParts - 1) + part - 1) * c.world + peer);
  }
  // On a GPU: two numbers of 32 bits, how many rows the piece in either place has.
  constexpr std::uint64_t rows_in_pieces_at(const Config& c, std::uint32_t set, Op op, std::uint32_t peer) const {
    return count_at(c, left, c.in_flight + set, op, peer);
  }
  // Addresses a GPU's word that says which rounds a peer has read.
  constexpr std::uint64_t read_at(const Config& c, std::uint32_t set, Op op, std::uint32_t round, std::uint32_t peer) const {
    return count_at(c, round % kPlaces == 0 ? consumed : pieces, set, op, peer);
  }
  // most: most_rounds().
  constexpr std::uint64_t round_at(const Config& c, std::uint32_t set, std::uint32_t source, std::uint32_t most, std::uint32_t round) const {
    return counts_at(c, set, c.world) + kVec16Bytes * (std::uint64_t{c.replicas > 1 ? c.world : 0} + std::uint64_t{source} * most + round);
  }
  // Index of a credit among the mailbox's words.
  constexpr std::uint64_t credit_index(const Config& c, std::uint32_t set, Op op, std::uint32_t peer) const {
    return (std::uint64_t{c.in_flight} * kOps + std::uint64_t{set} * kPieceOps + std::uint32_t(op)) * c.world + peer;
  }
  constexpr std::uint64_t mailbox_words(const Config& c) const {
    return std::uint64_t{c.in_flight} * (kOps + (in_pieces ? kPieceOps : 0)) * c.world;
  }
  // Offset of a piece in its slot, or in its part of the send area.
  constexpr std::uint64_t piece_at(Op op, std::uint32_t piece) const { return place_bytes[std::uint32_t(op)] * (piece % kPlaces); }
  // How many rows it sends, how many of them show by themselves, and whether it has many tokens: 1.
  constexpr std::uint64_t rows_at(const Config&, std::uint32_t set, std::uint32_t peer) const {
    return counts + counts_bytes * set + std::uint64_t{kVec16Bytes} * peer;
  }
  constexpr std::uint64_t compared_at(const Config& c, std::uint32_t set, std::uint32_t peer) const {
    return counts_at(c, set, c.world) + std::uint64_t{kVec16Bytes} * peer;
  }
  constexpr std::uint64_t counts_at(const Config& c, std::uint32_t set, std::uint32_t peer) const {
    return counts + counts_bytes * set + std::uint64_t{kVec16Bytes} * c.world + source_bytes * peer;
  }
  // A mapped peer's slot, or this rank's at that peer.
  constexpr std::uint64_t slot_at(const Config&, std::uint32_t set, Op op, std::uint32_t rank) const {
    return slots[std::uint32_t(op)] + slot_bytes[std::uint32_t(op)] * (std::uint64_t{set} * mapped_slots + rank);
  }
  // The slot of the nth remote peer; on the CPU that of rank n.
  constexpr std::uint64_t remote_slot_at(std::uint32_t set, Op op, std::uint32_t nth) const {
    return remote_blocks[std::uint32_t(op)] + slot_bytes[std::uint32_t(op)] * (std::uint64_t{set} * remote_slots + nth);
  }
  constexpr std::uint64_t slice_at(const Config& c, std::uint32_t set, std::uint32_t rank) const {
    return slices + slice_bytes * (std::uint64_t{set} * c.replicas + rank % c.replicas);
  }
  constexpr std::uint64_t word_index(const Config& c, std::uint32_t set, Op op, std::uint32_t peer) const {
    return (std::uint64_t{set} * kOps + std::uint32_t(op)) * c.world + peer;
  }
  constexpr std::uint64_t send_at(std::uint32_t set, Op op) const {
    return send[std::uint32_t(op)] + send_bytes[std::uint32_t(op)] * set;
  }
  // The block for the nth remote peer, on GPUs and in an AllToAll in pieces: each has one of full size.
  constexpr std::uint64_t spaced_send_at(const Config& c, std::uint32_t set, Op op, std::uint32_t nth) const {
    return send_at(set, op) + nth * (send_bytes[std::uint32_t(op)] / c.remote_peers);
  }
};

}  // namespace pplx
