#include "piece_sending.h"

namespace pplx::cpu {

PieceSending::PieceSending(Blocks& blocks, std::uint32_t step, Op op, const std::function<std::uint32_t(std::uint32_t peer)>& rows_of)
    : b_(blocks), step_(step), set_(set_of(blocks.config(), step)), op_(op), block_(block_layout(blocks.config(), op)) {
  for (const std::uint32_t peer : b_.peers()) {
    const std::uint32_t rows = rows_of(peer);
    std::uint32_t rows_per_unit = 1;
    units_of(rows, block_.row_bytes, &rows_per_unit);
    const std::uint64_t before = b_.mapped(peer) ? 0 : b_.announced_pieces(set_, op_, peer);
    outs_.emplace_back(peer, b_.outgoing_slot(set_, op_, peer), before, shape_of(b_.heap(), rows), rows_per_unit);
  }
}

bool PieceSending::place_has_left(const Out& out, std::uint32_t piece) const {
  if (b_.mapped(out.peer)) return true;
  // Piece 0 has waited for all of the last step's. Its own leaving ends what the words say of those.
  if (piece < kPlaces) return piece != 0 || b_.pieces_have_left(set_, op_, out.peer, out.before);
  return b_.pieces_left(step_, op_, out.peer) + kPlaces > piece;
}

bool PieceSending::may_write(const Out& out, std::uint32_t piece) {
  if (piece == 0 && !may_begin(out.peer)) return false;
  if (piece >= kPlaces && b_.pieces_consumed(step_, op_, out.peer) + kPlaces <= piece) return false;
  return place_has_left(out, piece);
}

bool PieceSending::poll(bool first) {
  bool all = true, progress = true;
  while (progress) {
    progress = false;
    all = true;
    for (Out& out : outs_) {
      const auto write = [&](const PieceStream::Unit& unit) {
        const BlockShape& shape = out.stream.shape();
        char* const to = out.slot + b_.heap().piece_at(op_, unit.piece);
        if (unit.begin == shape.begin(unit.piece)) write_header(out.peer, shape, unit.piece, to);
        write_rows(out.peer, unit.begin, unit.end, to + block_.row_at(unit.begin - shape.begin(unit.piece)));
      };
      const auto written = [&](std::uint32_t pieces) { b_.publish_pieces(step_, op_, out.peer, out.stream.shape(), pieces); };
      progress |= out.stream.advance(most(out, first), [&](std::uint32_t piece) { return may_write(out, piece); }, write, written);
      all &= out.stream.finished() >= most(out, first);
    }
  }
  return all;
}

Waiting PieceSending::waiting(bool first) const {
  for (const Out& out : outs_) {
    const std::uint32_t piece = out.stream.next();
    if (piece >= most(out, first)) continue;
    if (piece == 0)
      if (const Waiting w = waiting_to_begin(out.peer); w.peer != kNoRank) return w;
    if (piece >= kPlaces && b_.pieces_consumed(step_, op_, out.peer) + kPlaces <= piece)
      return b_.waiting_for_credit(step_, op_, out.peer, piece - kPlaces);
    if (!place_has_left(out, piece))
      return b_.waiting_for(step_, signal_of(op_), out.peer, "the network to take the pieces before");
  }
  return {};
}

}  // namespace pplx::cpu
