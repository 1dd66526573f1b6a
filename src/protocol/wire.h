// Wire formats: how many bytes a token's payload and scales take in a row, and how scales are made.
//
//   Native      the tokens' own dtype
//   FP8         e4m3, a float scale per 128 elements: amax / 448
//   FP8_UE8M0   e4m3, a float scale per 128 elements, a power of two
//   MXFP8       e4m3, an e8m0 scale (one byte) per 32 elements
#pragma once

#include <cstring>

#include "config.h"

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

// How the scales of rows lie in a caller's tensor, in bytes: from row to row, scale to scale, expert to expert (Padded).
struct ScaleStrides {
  std::uint64_t row = 0, scale = 0, group = 0;
};

// ---- scales: the same functions on host and device ----

// Static, not inline: files built for different instruction sets must not share one copy.
PPLX_BOTH static inline std::uint32_t bits_of(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
PPLX_BOTH static inline float float_of(std::uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline constexpr float kE4m3Max = 448.0f;

// e8m0: a power of two as its exponent, biased by 127; 0xff is NaN. The least, 2^-127, is a subnormal float.
PPLX_BOTH static inline std::uint8_t to_e8m0(float power_of_two) { return static_cast<std::uint8_t>(bits_of(power_of_two) >> 23); }
PPLX_BOTH static inline float from_e8m0(std::uint8_t code) {
  if (code == 0) return float_of(0x00400000u);
  return float_of(code == 0xff ? 0x7fc00000u : std::uint32_t{code} << 23);
}
PPLX_BOTH static inline bool is_e8m0(float scale) {
  const std::uint32_t u = bits_of(scale);
  return (u & 0x7fffffffu) > 0x7f800000u || u == 0x00400000u || ((u & 0x807fffffu) == 0 && u != 0 && u != 0x7f800000u);
}

// The scale of one block, from its largest magnitude, and what values are multiplied with before rounding.
// A block of zeros gets 1. A block with NaN or infinity has a NaN scale, and its codes are kE4m3NaN throughout.
inline constexpr std::uint8_t kE4m3NaN = 0x7f;

// Below 2^-118 the reciprocal would overflow: such a block uses the smallest normal scale.
struct BlockScale {
  float scale = 1.0f;
  float multiplier = 1.0f;
};
PPLX_BOTH static inline BlockScale e4m3_scale(float amax) {
#ifdef __CUDA_ARCH__
  // From 2^-100 to 2^100 the divisions' own steps, without their look for extreme exponents: no bit differs, for any amax.
  if (bits_of(amax) - 0x0d800000u <= 0x71800000u - 0x0d800000u) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(amax));
    r = __fmaf_rn(r, __fmaf_rn(-amax, r, 1.0f), r);
    const float inverse = 1.0f / kE4m3Max, multiplier = kE4m3Max * r, scale = amax * inverse;
    return {__fmaf_rn(__fmaf_rn(-kE4m3Max, scale, amax), inverse, scale), __fmaf_rn(__fmaf_rn(-amax, multiplier, kE4m3Max), r, multiplier)};
  }
#endif
  if (!(amax <= 3.402823466e38f)) return {float_of(0x7fc00000u), float_of(0x7fc00000u)};   // NaN or infinity: all decode to NaN
  if (amax == 0.0f) return {1.0f, 1.0f};
  if (amax < float_of(0x04800000u)) return {float_of(0x00800000u), float_of(0x7e800000u)};   // 2^-118: 2^-126, 2^126
  return {amax / kE4m3Max, kE4m3Max / amax};
}

// The scale that is a power of two: the least that is at least amax / 448, and at least 2^-127. Multiplying by its reciprocal is
// exact wherever the code is not 0, so a code is x / scale, rounded once.
PPLX_BOTH static inline std::uint8_t e4m3_scale_e8m0(float amax) {
  const std::uint32_t u = bits_of(amax);
  // 448 is 1.75 * 2^8, so the exponent falls by 8, or by 7 if the mantissa is above 1.75.
  const std::uint32_t up = (u + 0x1fffffu) >> 23;
  const std::uint32_t code = up > 8 ? up - 8 : 0;
  const std::uint32_t finite = u == 0 ? 127u : code;
  return static_cast<std::uint8_t>(u >= 0x7f800000u ? 0xffu : finite);
}
// Takes what e4m3_scale_e8m0 gives for a finite amax.
PPLX_BOTH static inline float e8m0_reciprocal(std::uint8_t code) { return float_of((254u - code) << 23); }
PPLX_BOTH static inline BlockScale e4m3_scale_power_of_two(float amax) {
  const std::uint8_t code = e4m3_scale_e8m0(amax);
  return {from_e8m0(code), code == 0xff ? from_e8m0(code) : e8m0_reciprocal(code)};
}

// The scale of a block whose largest magnitude is `amax`.
PPLX_BOTH static inline BlockScale block_scale(Wire wire, float amax) {
  return wire == Wire::FP8 ? e4m3_scale(amax) : e4m3_scale_power_of_two(amax);
}

}  // namespace pplx
