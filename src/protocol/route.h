// The route of a row: which of its token's choices live on the destination, and where each goes.
//
//   token (32) | choices, a bit per k (16) | reserved (16) | entry[top_k]: expert (12), index (20), weight (float)
//
// `expert` is the destination's own number of it; in a block for a node experts of all its ranks count (experts_of_block).
// `index` counts the choices that this source sends to that expert, in (token, k) order. Entries follow in k order.
//
// GPUs write a vec16 for each k, here or not: place or kNowhere, weight, token, the step's tag (arrival.h).
#pragma once

#include "config.h"

namespace pplx {

struct RouteEntry {
  std::uint32_t place = 0;
  float weight = 0.0f;
};

struct RouteHead {
  std::uint32_t token = 0;
  std::uint16_t choices = 0;
  std::uint16_t reserved = 0;
};

static_assert(sizeof(RouteEntry) == 8 && sizeof(RouteHead) == 8, "both travel as they are");

constexpr std::uint32_t route_place(std::uint32_t local_expert, std::uint32_t index) { return local_expert << 20 | index; }
constexpr std::uint32_t route_expert(std::uint32_t place) { return place >> 20; }
constexpr std::uint32_t route_index(std::uint32_t place) { return place & 0xfffffu; }

constexpr std::uint32_t count_choices(std::uint16_t choices) {
  std::uint32_t n = 0;
  for (std::uint32_t bits = choices; bits != 0; bits &= bits - 1) ++n;
  return n;
}

inline constexpr std::uint32_t kNowhere = 0xffffffffu;
constexpr std::uint32_t route_bytes(const Config& c) {
  return c.on_gpu ? 16 * c.top_k : sizeof(RouteHead) + c.top_k * sizeof(RouteEntry);
}

}  // namespace pplx
