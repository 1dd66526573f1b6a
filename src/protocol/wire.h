// Wire formats: how many bytes a token's payload and scales take in a row, and what the scales are.
//
//   Native      the tokens' own dtype
//   FP8         e4m3, a float scale per 128 elements: amax / 448
//   FP8_UE8M0   e4m3, a float scale per 128 elements, a power of two
//   MXFP8       e4m3, an e8m0 scale (one byte) per 32 elements
#pragma once

#include "config.h"
#include "number.h"

namespace pplx {

constexpr bool quantised(Wire wire) { return wire != Wire::Native; }
constexpr std::uint32_t scale_block(Wire wire) { return wire == Wire::MXFP8 ? 32 : 128; }  // elements that share a scale
constexpr std::uint32_t scale_bytes_each(Wire wire) { return wire == Wire::MXFP8 ? 1 : 4; }

constexpr std::uint32_t payload_element_bytes(const Config& c) { return quantised(c.wire) ? 1 : dtype_bytes(c.dtype); }
constexpr std::uint32_t payload_bytes(const Config& c) { return c.hidden * payload_element_bytes(c); }
constexpr std::uint32_t scales_per_row(const Config& c) {
  return quantised(c.wire) ? ceil_div(c.hidden, scale_block(c.wire)) : 0;
}
constexpr std::uint32_t scale_bytes(const Config& c) { return scales_per_row(c) * scale_bytes_each(c.wire); }
// 128 elements have a word of scales on every wire that has any: one float, or four bytes.
constexpr std::uint32_t scale_words(const Config& c) { return ceil_div(scale_bytes(c), 4); }

// The scale of a block whose largest magnitude is `amax`.
PPLX_BOTH static inline BlockScale block_scale(Wire wire, float amax) {
  return wire == Wire::FP8 ? e4m3_scale(amax) : e4m3_scale_power_of_two(amax);
}

}  // namespace pplx
