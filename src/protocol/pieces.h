// Large steps: blocks in numbered pieces, for an AllToAll whose slots do not hold max_tokens rows.
//
// A slot has two places. A block of at most slot_rows rows is whole: it takes both, as a slot of full size would be taken. A larger
// one goes in pieces of piece_rows rows, the last one with what is left. Each piece is a block of its own, header and rows, and
// piece p lies in place p mod 2. The header of every piece has the rows and the pieces of the whole block; that of piece 0 has the
// counts.
//
// Three words for each set, op and peer count pieces, in the form of pieces_word():
//
//   pieces    pieces[set][op][peer]: how many pieces of that peer's block are there. Written by the peer, or by this rank's proxy; read
//             by the receive phases. The arrival word rises with piece 0, so a reader of whole blocks looks at nothing else.
//   consumed  consumed[set][op][peer]: how many pieces of this rank's block that peer has read, its credit. Written by the peer, or by
//             this rank's proxy when a Credit comes; read before piece p is written into the place that had piece p - 2.
//   left      left[set][op][peer]: how many pieces have left for good, to a remote peer. Written by the proxy; read as `consumed` is,
//             for the place in the send area.
//
// A word of another step or another generation counts no pieces, so none of them is ever reset.
//
// GPUs cut a step by tokens, not each block by rows: the kernels of a rank cannot wait for one peer's piece while another peer
// waits for them. Round k is tokens [k * S, (k + 1) * S) of every rank; a token sends a peer one row at most, so S rows are room
// enough. A rank without tokens has a round without rows.
//
//   places    a slot has 2 * S rows behind one header. Rows of round k take those from (k mod 2) * S on, in their order, so a row of a slot has
//             its parts where rows of whole blocks have them
//   rows      each has an arrival word: pieces_word(), with round + 1 in place of a number of pieces. What a round left is no other's.
//             A rank of few tokens has one round, whose rows show by themselves as those of a whole block do (arrival.h)
//   rounds    rounds[set][source][round], tagged pieces: how many of the source's rows come before that round, and in the first one how
//             many rounds there are
//   consumed  consumed[set][op][peer] for even rounds, pieces[set][op][peer] for odd ones: pieces_word() with how many rounds the peer has
//             read, of this rank and of all others. Read before round k is sent to that peer; k - 1 is asked for
//
// All ranks pass the rounds in order, whatever their tokens, so ranks do not wait in a circle: the earliest round that is not read
// yet waits for nothing but itself.
//
// Between nodes a round is a piece, with the words of above and a header of its own, which has the first and the last of its rows
// (block.h): src/cuda/rounds/remote.cuh. Where kernels drive the network themselves, signals take the place of `pieces` and
// `consumed` (signals.h).
#pragma once

#include "heap.h"

namespace pplx {

inline constexpr std::uint32_t kMostPieces = 0xffff;

// Bytes of all slots in a set, for dispatch and combine blocks of `rows` rows.
constexpr std::uint64_t bytes_of_slots(const Config& c, std::uint64_t rows) {
  return c.world * (align_up(dispatch_block(c).bytes(rows), block_alignment(c)) + align_up(combine_block(c).bytes(rows), block_alignment(c)));
}

constexpr bool in_pieces(const Config& c) {
  return c.slot_bytes != 0 && max_rows_of_block(c) > c.whole_tokens && bytes_of_slots(c, max_rows_of_block(c)) > c.slot_bytes;
}

constexpr std::uint32_t piece_rows_of(const Config& c) {
  const BlockLayout dispatch = dispatch_block(c), combine = combine_block(c);
  const std::uint64_t each = c.slot_bytes / (std::uint64_t{c.world} * kPlaces);
  const std::uint64_t headers = dispatch.header_bytes + combine.header_bytes + 2 * (block_alignment(c) - 1);
  return each <= headers ? 0 : static_cast<std::uint32_t>((each - headers) / (dispatch.row_bytes + combine.row_bytes));
}

// The least slot_bytes with which steps of whole_tokens tokens are whole.
constexpr std::uint64_t least_slot_bytes(const Config& c) {
  const std::uint64_t rows = ceil_div(c.whole_tokens < max_rows_of_block(c) ? c.whole_tokens : max_rows_of_block(c), kPlaces);
  const BlockLayout dispatch = dispatch_block(c), combine = combine_block(c);
  return std::uint64_t{c.world} * kPlaces * (dispatch.bytes(rows) + combine.bytes(rows) + 2 * (block_alignment(c) - 1));
}

constexpr const char* invalid_pieces(const Config& c) {
  if (!in_pieces(c)) return nullptr;
  if (c.whole_tokens < 1 || c.slot_bytes < least_slot_bytes(c)) return "slot_bytes is too small for the steps that are never in pieces";
  if (ceil_div(max_rows_of_block(c), piece_rows_of(c)) > kMostPieces) return "slot_bytes makes more pieces than a word counts";
  return nullptr;
}

// How a block of `rows` rows travels.
struct BlockShape {
  std::uint32_t rows = 0;
  std::uint32_t pieces = 1;
  std::uint32_t piece_rows = 1;    // in every piece but the last

  constexpr std::uint32_t piece_of(std::uint32_t row) const { return row / piece_rows; }
  constexpr std::uint32_t begin(std::uint32_t piece) const { return piece * piece_rows; }
  constexpr std::uint32_t end(std::uint32_t piece) const { return piece + 1 >= pieces ? rows : (piece + 1) * piece_rows; }
};

constexpr BlockShape shape_of(const Heap& h, std::uint32_t rows) {
  if (rows <= h.slot_rows) return {rows, 1, rows > 0 ? rows : 1};
  return {rows, ceil_div(rows, h.piece_rows), h.piece_rows};
}

// How many credits a sender can still use: a piece that follows two later ones has a place without them.
constexpr std::uint32_t useful_credits(const BlockShape& shape) { return shape.pieces > kPlaces ? shape.pieces - kPlaces : 0; }

// generation (16) | pieces (16) | step (32)
constexpr std::uint64_t pieces_word(std::uint32_t generation, std::uint32_t step, std::uint32_t pieces) {
  return std::uint64_t{generation & 0xffffu} << 48 | std::uint64_t{pieces & 0xffffu} << 32 | step;
}
constexpr std::uint32_t pieces_in(std::uint64_t word, std::uint32_t generation, std::uint32_t step) {
  const bool current = word >> 48 == (generation & 0xffffu) && static_cast<std::uint32_t>(word) == step;
  return current ? static_cast<std::uint32_t>(word >> 32) & 0xffffu : 0;
}

// ---- on GPUs ----

inline constexpr std::uint32_t kMostRounds = 4096;

// Tokens of a round. Whole chunks of those that are counted together (src/cuda/common/tuning.h), where there is room for that.
constexpr std::uint32_t tokens_of_round(const Config& c) {
  const std::uint32_t rows = piece_rows_of(c);
  return rows >= 32 ? rows - rows % 32 : rows >= 8 ? rows - rows % 8 : rows;
}
constexpr std::uint32_t rounds_of(const Config& c, std::uint32_t tokens) { return ceil_div(tokens, tokens_of_round(c)); }
// The most rounds of a step in an AllToAll in pieces; 0: this is none, or not on a GPU.
constexpr std::uint32_t most_rounds(const Config& c) {
  return c.on_gpu && in_pieces(c) && tokens_of_round(c) != 0 ? rounds_of(c, max_rows_of_block(c)) : 0;
}

// Three bits of a piece's number travel. `known`: leading pieces known so far. Returns how far behind those the piece is. Two at
// most are in flight, so a piece further behind is an old one.
constexpr std::uint32_t pieces_ahead(std::uint32_t low, std::uint32_t known) { return (low - known) & 7u; }

}  // namespace pplx
