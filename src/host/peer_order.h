// The order in which a rank visits the others, on both devices.
#pragma once

#include <cstdint>
#include <vector>

#include "../protocol/replicas.h"
#include "failure.h"

namespace pplx {

// Starts at rank + 1, so that ranks do not all hit one peer at once; ends with this rank. Only the living.
inline std::vector<std::uint32_t> peer_order(const Config& c, const std::vector<bool>& alive) {
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 1; i <= c.world; ++i) {
    const std::uint32_t peer = (c.rank + i) % c.world;
    if (alive[peer]) order.push_back(peer);
  }
  return order;
}

// Other living ranks that hold the same tokens, in that order. They store into each other's memory.
template <typename IsMapped>
std::vector<std::uint32_t> other_replicas(const Config& c, const std::vector<std::uint32_t>& order, const IsMapped& is_mapped) {
  std::vector<std::uint32_t> replicas;
  for (std::uint32_t peer : order) {
    if (peer == c.rank || first_replica(c, peer) != first_replica(c, c.rank)) continue;
    if (!is_mapped(peer)) throw Misuse("replicas must share a node, and " + rank_text(peer) + " is behind the proxy");
    replicas.push_back(peer);
  }
  return replicas;
}

}  // namespace pplx
