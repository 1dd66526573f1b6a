// A block: everything one rank sends to one peer in one operation of a step.
//
//   header (with the counts, in a dispatch) | row 0 | row 1 | ... | row n-1
//
// A dispatch block for a node has the counts of all its ranks' experts, then a mask for each token of the source: which of its ranks
// want it. A token that some want has a row, in the order of tokens.
// Dispatch row: payload | scales | route | arrival word.   Combine row: payload | tail | arrival word.
// A tail is one float per choice of the token, in k order; only those of choices that live on the sender mean anything.
// Weights row: one float per choice: on CPUs of the token, in k order, on GPUs of that dispatch row. Every part starts at a multiple
// of 16 bytes.
// Slice row, from a replica to the others: like a combine row, but of the output; its tail is the token's.
#pragma once

#include "route.h"
#include "wire.h"

namespace pplx {

// Those that fill blocks, and a credit, which is an immediate alone.
enum class Op : std::uint8_t { Dispatch, Combine, Weights, Credit = 4 };
inline constexpr std::uint32_t kOps = 3;
inline constexpr std::uint32_t kPieceOps = 2;    // those that may go in pieces; weights blocks are small, and always whole
inline constexpr std::uint32_t kPlaces = 2;      // a slot's, for pieces in turn: pieces.h
inline constexpr std::uint32_t kMostParts = 8;   // a block's, for another node: parts.h; three bits of an immediate

constexpr const char* op_name(Op op) {
  return op == Op::Dispatch ? "dispatch" : op == Op::Combine ? "combine" : op == Op::Weights ? "weights" : "credit";
}

enum BlockFlags : std::uint32_t {
  kReleased = 1,       // combine: closed by release(), no rows
  kUsesWeights = 2,    // combine: this rank passed weights=
  kOverflowed = 4,     // combine: this rank's output buffer was too small, its missing rows came back as zero
  kHasTail = 8,        // combine: this rank passed tail=
  kAccumulates = 16,   // slice: this rank passed accumulate=True
};

struct BlockHeader {
  std::uint32_t step = 0;
  std::uint32_t generation = 0;
  std::uint32_t rows = 0;
  std::uint32_t flags = 0;
  std::uint32_t source = 0;
  std::uint32_t tokens = 0;        // dispatch: what replicas must have in common, with the digest
  std::uint64_t ids_digest = 0;
  std::uint32_t piece = 0;         // this piece's number, of `pieces`: pieces.h
  std::uint32_t pieces = 1;
  std::uint32_t begin = 0;         // on GPUs in pieces: of the block's rows, the piece's first one
  std::uint32_t end = 0;           // and the one behind its last
  std::uint32_t overflowed = 0;    // combine, a node's answer: a bit for each of its ranks whose output buffer was too small
  std::uint32_t masks = 0;         // dispatch, for a node: how many there are
  std::uint32_t reserved[2] = {};
};
static_assert(sizeof(BlockHeader) == 64, "the header travels as it is");

inline constexpr std::uint32_t kWordBytes = 8;
inline constexpr std::uint32_t kVec16Bytes = 16;  // a GPU stores and loads one whole or not at all

struct BlockLayout {
  std::uint32_t header_bytes = 0;
  std::uint32_t row_bytes = 0;
  std::uint32_t scales_at = 0;     // dispatch: in the row
  std::uint32_t route_at = 0;      // dispatch: in the row
  std::uint32_t tail_at = 0;       // combine: in the row
  std::uint32_t arrival_at = 0;    // in the row: never used for payload by any path

  constexpr std::uint64_t bytes(std::uint64_t rows) const { return header_bytes + rows * row_bytes; }
  constexpr std::uint64_t row_at(std::uint64_t row) const { return header_bytes + row * row_bytes; }
};

// On a GPU a long row begins at a line of memory: a copy of a line that lies across two is two of them, also for a link. 4,096
// tokens of 7168 numbers on 24 multiprocessors of two H200: combine 228 us in place of 240.
inline constexpr std::uint32_t kLine = 128, kLongRow = 2048;
constexpr std::uint64_t block_alignment(const Config& c) { return c.on_gpu ? kLine : 64; }
constexpr std::uint64_t row_alignment(const Config& c, std::uint64_t bytes, std::uint64_t least) { return c.on_gpu && bytes >= kLongRow ? kLine : least; }

constexpr std::uint64_t masks_at(const Config& c) { return sizeof(BlockHeader) + 4ull * experts_of_block(c); }

constexpr BlockLayout dispatch_block(const Config& c) {
  BlockLayout b;
  b.header_bytes = static_cast<std::uint32_t>(
      align_up(masks_at(c) + (c.node_ranks == 0 ? 0 : 4ull * max_rows_of_block(c)), block_alignment(c)));
  b.scales_at = static_cast<std::uint32_t>(align_up(payload_bytes(c), 16));
  b.route_at = static_cast<std::uint32_t>(align_up(b.scales_at + scale_bytes(c), 16));
  const std::uint64_t row = b.route_at + route_bytes(c) + kWordBytes;
  b.row_bytes = static_cast<std::uint32_t>(align_up(row, row_alignment(c, row, 16)));
  b.arrival_at = b.row_bytes - kWordBytes;
  return b;
}

constexpr BlockLayout combine_block(const Config& c) {
  BlockLayout b;
  b.header_bytes = static_cast<std::uint32_t>(align_up(sizeof(BlockHeader), block_alignment(c)));
  b.tail_at = static_cast<std::uint32_t>(align_up(std::uint64_t{c.hidden} * dtype_bytes(c.dtype), 16));
  // Short rows start at a GPU's sectors of 32 bytes: with every other one across two, 512 tokens took 41.1 us in place of 39.8.
  const std::uint64_t row = b.tail_at + 4ull * c.top_k + kWordBytes;
  b.row_bytes = static_cast<std::uint32_t>(align_up(row, row_alignment(c, row, 32)));
  b.arrival_at = b.row_bytes - kWordBytes;
  return b;
}

// A relay's answer to a source: a combine block, whose rows may be codes and scales.
constexpr BlockLayout answer_block(const Config& c) {
  BlockLayout b = combine_block(c);
  if (!c.combine_fp8) return b;
  b.scales_at = static_cast<std::uint32_t>(align_up(c.hidden, 16));
  b.tail_at = static_cast<std::uint32_t>(align_up(b.scales_at + 4ull * ceil_div(c.hidden, scale_block(Wire::FP8)), 16));
  const std::uint64_t row = b.tail_at + 4ull * c.top_k + kWordBytes;
  b.row_bytes = static_cast<std::uint32_t>(align_up(row, row_alignment(c, row, 32)));
  b.arrival_at = b.row_bytes - kWordBytes;
  return b;
}

constexpr BlockLayout weights_block(const Config& c) {
  BlockLayout b;
  b.header_bytes = sizeof(BlockHeader);
  b.row_bytes = static_cast<std::uint32_t>(align_up(4ull * c.top_k, 16));
  return b;
}

constexpr BlockLayout block_layout(const Config& c, Op op) {
  return op == Op::Dispatch ? dispatch_block(c) : op == Op::Combine ? combine_block(c) : weights_block(c);
}

// Blocks between ranks that the network joins.
constexpr BlockLayout network_block(const Config& c, Op op) { return op == Op::Combine ? answer_block(c) : block_layout(c, op); }

// The room that a block takes in a heap. Codes and scales of a short row take more than its numbers.
constexpr BlockLayout largest_block(const Config& c, Op op) {
  BlockLayout b = block_layout(c, op);
  if (const std::uint32_t row = network_block(c, op).row_bytes; row > b.row_bytes) b.row_bytes = row;
  return b;
}

// The most that blocks of `rows` rows in all take, one behind the other, each at a multiple of 64.
constexpr std::uint64_t packed_bytes(const BlockLayout& block, std::uint32_t blocks, std::uint64_t rows) {
  return align_up(blocks * (align_up(block.header_bytes, 64) + 64ull) + rows * block.row_bytes, 64);
}

// Rows of the parts of a block for another node (parts.h): four pairs of equal parts. A pair has 2^growth_log times the rows of the
// one before.
struct PartSizes {
  std::uint32_t first_log = 31;    // rows of a part of the first pair, as a power of two
  std::uint32_t growth_log = 0;

  constexpr std::uint32_t begin(std::uint32_t part) const {
    std::uint32_t at = 0, rows = first_log;
    for (; part >= 2; part -= 2, rows += growth_log) at += 2u << rows;
    return at + (part << rows);
  }
  constexpr std::uint32_t part_of(std::uint32_t row) const {
    std::uint32_t part = 0, rows = first_log;
    for (; row >> rows >= 2; part += 2, rows += growth_log) row -= 2u << rows;
    return part + (row >> rows);
  }
  // The number of parts of a block of `rows` rows.
  constexpr std::uint32_t count(std::uint32_t rows) const { return rows == 0 ? 1 : part_of(rows - 1) + 1; }
};

}  // namespace pplx
