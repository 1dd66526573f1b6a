// The memory of a GPU's relay, apart from its heap (nodes.h). On CPUs it is a RelayArea.
#pragma once

#include "block.h"

namespace pplx {

// A rank's memory for relays, laid anew in each generation:
//
//   rows[set][source][n] | combine blocks[nth source][set][mate] | numbers[nth source][set]: [mate], all, [row][mate]
//
// rows: the number, in the source's node block, of this rank's nth row. Written by the source's relay.
// blocks: what mates return to the sources of this relay. Written by mates.
// numbers: how many rows of the node block each mate has; how many there are; and each row's number among a mate's, or ~0.
struct RelayLayout {
  std::uint64_t blocks = 0, block_bytes = 0, numbers = 0, number_words = 0, bytes = 0;
};
constexpr RelayLayout relay_layout(const Config& c, std::uint32_t sources) {
  RelayLayout l;
  const std::uint64_t rows = max_rows_of_block(c), blocks = std::uint64_t{sources} * c.in_flight;
  l.blocks = align_up(4 * rows * c.world * c.in_flight, kLine);
  l.block_bytes = align_up(combine_block(c).bytes(rows), kLine);
  l.numbers = l.blocks + l.block_bytes * blocks * c.node_ranks;
  l.number_words = 1 + c.node_ranks * (1 + rows);
  l.bytes = l.numbers + 4 * l.number_words * blocks;
  return l;
}

}  // namespace pplx
