// The words by which kernels (or threads) of the caller run beside a dispatch. Its handle keeps them:
//
//   planned   [1]      raised by dispatch_recv once counts and offsets are there
//   arrived   [words]  a word per block of kHookRows rows of the output, Padded: per expert. Raised by dispatch_recv once all rows of the
//                      block are placed, whatever carried them; at once where it has none. A reader of a raised word sees the plan
//                      as well
//
// They are 0 when the step begins. `planned` and `arrived` are raised when they have kRaised, the top bit, and keep it: one load
// and one compare. Below it `arrived` counts what was placed; the planning warp adds kRaised less the final count, so the last
// addition raises it: no warp waits for a sum. After a failure dispatch_recv raises all of them: no consumer spins for ever.
#pragma once

#include "config.h"

namespace pplx {

inline constexpr std::uint32_t kRaised = 1u << 31;
inline constexpr std::uint32_t kHookRows = 128;  // rows of a block
inline constexpr std::uint32_t kHookAlign = 32;  // words: arrays begin on lines of their own

constexpr bool is_raised(std::uint32_t word) { return (word & kRaised) != 0; }

constexpr std::uint32_t hook_words(const Config& c) {
  return c.layout == LayoutKind::Padded ? local_experts(c, c.rank) : ceil_div(c.max_rows, kHookRows);
}
// Where the arrays begin, in words, and all of them.
constexpr std::uint32_t hook_arrived_at(const Config&) { return kHookAlign; }
constexpr std::uint32_t hook_words_in_all(const Config& c) {
  return hook_arrived_at(c) + static_cast<std::uint32_t>(align_up(hook_words(c), kHookAlign));
}

// The word of an output row.
constexpr std::uint32_t hook_word_of(const Config& c, std::uint32_t place) {
  return place / (c.layout == LayoutKind::Padded ? c.max_per_expert : kHookRows);
}

}  // namespace pplx
