// The order in which a rank visits the others, on both devices.
#pragma once

#include <cstdint>
#include <vector>

#include "../protocol/config.h"

namespace pplx {

// From rank + 1 on, so that nobody is hit by all at once; oneself last. Only the living.
inline std::vector<std::uint32_t> peer_order(const Config& c, const std::vector<bool>& alive) {
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 1; i <= c.world; ++i) {
    const std::uint32_t peer = (c.rank + i) % c.world;
    if (alive[peer]) order.push_back(peer);
  }
  return order;
}

}  // namespace pplx
