// The pieces of one peer's block, as they come: that their headers fit, where their rows lie, and the credits for those that have
// been read.
#pragma once

#include <cstring>

#include "blocks.h"

namespace pplx::cpu {

class PieceArrivals {
 public:
  // `first`: the header of piece 0, which has been checked.
  PieceArrivals(Blocks& blocks, Phase phase, Op op, const BlockHeader& first)
      : b_(blocks), phase_(phase), op_(op), first_(first), shape_(shape_of(blocks.heap(), first.rows)),
        row_bytes_(block_layout(blocks.config(), op).row_bytes), header_bytes_(block_layout(blocks.config(), op).header_bytes),
        slot_(blocks.own_slot(set_of(blocks.config(), first.step), op, first.source)) {}

  const BlockShape& shape() const { return shape_; }
  std::uint32_t peer() const { return first_.source; }
  std::uint64_t bytes() const { return std::uint64_t{shape_.pieces} * header_bytes_ + std::uint64_t{shape_.rows} * row_bytes_; }

  // One thread at a time. No piece is asked for after its credit.
  bool has(std::uint32_t piece) {
    if (piece < here_) return true;
    const std::uint32_t here = std::min(b_.pieces_here(first_.step, op_, peer()), shape_.pieces);
    for (; here_ < here; ++here_) {
      if (here_ == 0) continue;
      BlockHeader header;
      std::memcpy(&header, slot_ + b_.heap().piece_at(op_, here_), sizeof header);
      b_.check_piece(header, first_, phase_, op_, peer(), here_);
    }
    return piece < here_;
  }
  const char* row(std::uint32_t row) const {
    const std::uint32_t piece = shape_.piece_of(row);
    return slot_ + b_.heap().piece_at(op_, piece) + header_bytes_ + std::uint64_t{row - shape_.begin(piece)} * row_bytes_;
  }
  // One thread at a time: `pieces` leading pieces have been read. A credit that lets nothing go would come after the step.
  void have_read(std::uint32_t pieces) {
    const std::uint32_t credit = std::min(pieces, useful_credits(shape_));
    if (credit == credit_) return;
    credit_ = credit;
    b_.give_credit(first_.step, op_, peer(), credit);
  }
  Waiting waiting(std::uint32_t piece) const { return b_.waiting_for_piece(first_.step, op_, peer(), piece); }

 private:
  Blocks& b_;
  const Phase phase_;
  const Op op_;
  const BlockHeader first_;
  const BlockShape shape_;
  const std::uint32_t row_bytes_, header_bytes_;
  char* const slot_;
  std::uint32_t here_ = 0, credit_ = 0;   // pieces that are here, with checked headers; those that the peer knows have been read
};

}  // namespace pplx::cpu
