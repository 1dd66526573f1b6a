// Computes the layout of a rank's memory. The host does; kernels get the Heap.
#pragma once

#include "heap.h"
#include "parts.h"

namespace pplx {

constexpr Heap heap_of(const Config& c) {
  constexpr std::uint64_t page = 4096;
  Heap h;
  std::uint64_t at = Heap::kAborts * kWordBytes;
  h.arrival = at;
  at = align_up(at + std::uint64_t{kWordBytes} * c.in_flight * kSignals * c.world, page);
  if (c.node_ranks != 0) {
    h.turns = at;
    at += page;
  }
  if (in_pieces(c) || in_parts(c)) {
    const std::uint64_t words = std::uint64_t{kWordBytes} * c.in_flight * kPieceOps * c.world;
    h.pieces = at;
    h.consumed = h.pieces + align_up(words, 64);
    h.later_signals = h.consumed;
    at = align_up(in_pieces(c) ? h.consumed + words : h.later_signals + words * (kMostParts - 1), page);
  }
  h.counts = at;
  h.source_bytes = std::uint64_t{kVec16Bytes} * expert_vec16s(c);
  h.counts_bytes = c.world * (h.source_bytes + kVec16Bytes * ((c.replicas > 1 ? 2 : 1) + std::uint64_t{most_rounds(c)}));
  at = align_up(at + h.counts_bytes * c.in_flight, page);
  h.in_pieces = in_pieces(c);
  h.in_parts = in_parts(c);
  h.piece_rows = h.in_pieces ? piece_rows_of(c) : max_rows_of_block(c);
  h.slot_rows = h.in_pieces ? kPlaces * h.piece_rows : h.piece_rows;
  h.mapped_slots = c.on_gpu ? (c.mapped_slots != 0 ? c.mapped_slots : c.world) : rails_apart(c) ? c.node_ranks : c.world;
  h.remote_slots = c.on_gpu && c.remote_slots != 0 ? c.remote_slots : c.world;
  const std::uint64_t words_end = at;
  for (std::uint32_t op = 0; op < kOps; ++op) {
    h.slot_bytes[op] = align_up(largest_block(c, Op(op)).bytes(max_rows_of_block(c)), block_alignment(c));
    if (h.in_pieces && op < kPieceOps) {
      h.place_bytes[op] = align_up(block_layout(c, Op(op)).bytes(h.piece_rows), block_alignment(c));
      h.slot_bytes[op] = kPlaces * h.place_bytes[op];
    }
    h.slots[op] = h.remote_blocks[op] = at - h.slot_bytes[op] * c.mapped_first;
    at = align_up(at + h.slot_bytes[op] * c.in_flight * h.mapped_slots, page);
  }
  if (c.replicas > 1) {
    h.slices = at;
    h.slice_bytes = align_up(combine_block(c).bytes(max_rows_of_block(c)), block_alignment(c));
    at = align_up(at + h.slice_bytes * c.in_flight * c.replicas, page);
  }
  h.mapped_bytes = at;
  if (c.on_gpu) at = words_end;
  for (std::uint32_t op = 0; c.on_gpu && op < kOps; ++op) {
    h.remote_blocks[op] = at;
    at = align_up(at + h.slot_bytes[op] * c.in_flight * h.remote_slots, page);
  }
  h.shared_bytes = at;
  const std::uint64_t words = std::uint64_t{kWordBytes} * c.in_flight * kOps * c.world;
  h.mailbox = at;
  h.outgoing = h.mailbox + align_up(kWordBytes * h.mailbox_words(c), 64);
  h.sent = h.outgoing + align_up(words, 64);
  h.left = h.sent + align_up(words, 64);
  at = align_up(h.left + (h.in_pieces ? std::uint64_t{kWordBytes} * (c.on_gpu ? 2 : 1) * c.in_flight * kPieceOps * c.world : 0), page);
  // A token is sent once per rank that wants it, so its rows fill at most min(top_k, remote peers) places; a combine may
  // return every row of every remote peer.
  const std::uint64_t most = max_rows_of_block(c);
  const std::uint32_t peers = rails_apart(c) ? 0 : c.remote_peers;
  const std::uint64_t rows_out = most * (c.top_k < peers ? c.top_k : peers);
  const std::uint64_t rows[kOps] = {rows_out, most * peers, rows_out};
  for (std::uint32_t op = 0; op < kOps; ++op) {
    const BlockLayout block = largest_block(c, Op(op));
    h.send[op] = at;
    h.send_bytes[op] = c.on_gpu ? peers * align_up(block.bytes(most), 64) : packed_bytes(block, peers, rows[op]);
    if (h.in_pieces && op < kPieceOps) h.send_bytes[op] = peers * h.slot_bytes[op];
    at = align_up(at + h.send_bytes[op] * c.in_flight, page);
  }
  h.bytes = at;
  return h;
}

}  // namespace pplx
