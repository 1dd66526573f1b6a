// Parts of a block for another node: on GPUs, a block that fits its slot leaves in up to eight of them, so that the network works
// while the rest is still being stored, and rows are read while later ones come.
//
// Part p has the rows [begin(p), begin(p + 1)), the last one what is left; part 0 has the header, too. Where parts begin follows
// from the configuration alone: a warp that stores a row need not know how many there will be. There are four pairs of parts, equal
// within a pair; a pair's are 2^growth_log times the last pair's.
//
// Parts may arrive in any order; those that stand complete from the first on are counted in pieces[set][op][peer] (pieces.h), by
// the proxy. The arrival word rises with part 0. With relays part 0 has all masks, too.
#pragma once

#include "pieces.h"

namespace pplx {

// Only a block for the proxy of a GPU goes in parts; one whose slot is too small for it goes in pieces.
constexpr bool in_parts(const Config& c) { return c.part_bytes != 0 && !in_pieces(c); }

constexpr PartSizes part_sizes(const Config& c, Op op) {
  const std::uint32_t most = max_rows_of_block(c), row = network_block(c, op).row_bytes;
  PartSizes sizes;
  sizes.first_log = 0;
  if (!in_parts(c) || op == Op::Weights) {
    while (1u << sizes.first_log < most) ++sizes.first_log;
    return sizes;
  }
  while (1u << sizes.first_log < most && std::uint64_t{row} << (sizes.first_log + 1) <= c.part_bytes) ++sizes.first_log;
  while (sizes.begin(kMostParts) < most) ++sizes.growth_log;
  return sizes;
}

}  // namespace pplx
