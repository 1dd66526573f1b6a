// Replicas: ranks in a row that hold the same tokens, as the ranks of a tensor parallel group do. Of the t tokens of a step each
// sends those of its own slice, t = slice mod slices, and adds up what comes back for them; the rows of the output that it finished
// so it stores into the others' slices[set][replica]. Replicas share a node.
#pragma once

#include <vector>

#include "config.h"

namespace pplx {

constexpr std::uint32_t first_replica(const Config& c, std::uint32_t rank) { return rank / c.replicas * c.replicas; }

// The living members of a rank's group deal the tokens out between them. `alive` null: all are.
inline Slice slice_of(const Config& c, std::uint32_t rank, const std::vector<bool>* alive = nullptr) {
  Slice slice{0, 0};
  for (std::uint32_t r = first_replica(c, rank); r < first_replica(c, rank) + c.replicas; ++r) {
    if (alive != nullptr && !(*alive)[r] && r != rank) continue;
    if (r < rank) ++slice.number;
    ++slice.of;
  }
  return slice;
}

// Replicas compare the sum of this over all choices, in any order, so that one that passes other expert ids is found out.
// Any negative id is the same.
constexpr std::uint64_t id_digest(std::uint32_t choice, std::int64_t id) {
  std::uint64_t mixed = std::uint64_t{choice} << 32 | static_cast<std::uint32_t>(id < 0 ? -1 : id);
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9ull;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebull;
  return mixed ^ mixed >> 31;
}

}  // namespace pplx
