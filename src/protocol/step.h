// Step numbers: 32 bits that wrap, compared by signed difference.
#pragma once

#include "config.h"

namespace pplx {

constexpr std::int32_t step_difference(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b); }
constexpr bool step_reached(std::uint32_t seen, std::uint32_t wanted) { return step_difference(seen, wanted) >= 0; }

// in_flight is a power of two, so consecutive steps take the sets in turn, across the wrap too.
constexpr std::uint32_t set_of(const Config& c, std::uint32_t step) { return step & (c.in_flight - 1); }

// The first step that uses `set`.
constexpr std::uint32_t first_step_of_set(const Config& c, std::uint32_t set) {
  return c.first_step + ((set - set_of(c, c.first_step)) & (c.in_flight - 1));
}

}  // namespace pplx
