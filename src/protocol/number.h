// Number formats, bit by bit, the same on host and device: bf16, fp16, e4m3 and e8m0 to and from fp32, round to nearest even.
// Static, not inline: files built for different instruction sets must not share one copy. Scales are made by the same functions on
// both sides; codes by instructions where a processor has them, which test_number and tests/gpu hold against these.
#pragma once

#include <cstdint>
#include <cstring>

#include "both.h"

namespace pplx {

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

// The conversions, for one number (F = float, U = uint32_t) or for a vector of them: the same operations on every lane.
// No branches, only selections. A 16 or 8 bit format travels in the low bits of U.
template <typename To, typename From>
static inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <typename F, typename U>
static inline F from_bf16_bits(U h) {
  return same_bits<F>(h << 16);
}
template <typename U, typename F>
static inline U to_bf16_bits(F x) {
  const U u = same_bits<U>(x);
  const U rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  const U nan = u >> 16 | 0x40u;
  return (u & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

template <typename F, typename U>
static inline F from_fp16_bits(U h) {
  const U sign = (h & 0x8000u) << 16;
  const U magnitude = h & 0x7fffu;
  // Exact scaling by 2^112 maps half exponents onto float ones, subnormals included.
  const U finite = same_bits<U>(same_bits<F>(magnitude << 13) * float_of(0x77800000u));
  const U infinite = 0x7f800000u | (magnitude & 0x3ffu) << 13;
  const U special = (magnitude & 0x3ffu) != 0 ? infinite | 0x400000u : infinite;
  return same_bits<F>(sign | (magnitude >= 0x7c00u ? special : finite));
}
template <typename U, typename F>
static inline U to_fp16_bits(F x) {
  const U u = same_bits<U>(x);
  const U sign = u >> 16 & 0x8000u;
  const U a = u & 0x7fffffffu;
  const U normal = (a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13;
  // Below 2^-14: adding 0.5 leaves the half's subnormal mantissa, rounded to nearest even, in the low bits.
  const U subnormal = same_bits<U>(same_bits<F>(a) + 0.5f) - 0x3f000000u;
  const U nan = 0x7e00u | (a >> 13 & 0x3ffu);
  const U infinity = nan - nan + 0x7c00u;
  const U special = a > 0x7f800000u ? nan : infinity;
  const U small = a < 0x38800000u ? subnormal : normal;
  return sign | (a >= 0x477ff000u ? special : small);
}

// e4m3 has no infinities; 0x7f is NaN, and what is above 448 saturates.
inline constexpr float kE4m3Max = 448.0f;

template <typename U, typename F>
static inline U to_e4m3_bits(F x) {
  const U u = same_bits<U>(x);
  const U sign = u >> 24 & 0x80u;
  const U a = u & 0x7fffffffu;
  const U largest = a - a + 0x43e00000u;   // 448
  const U clamped = a > largest ? largest : a;
  const U normal = (clamped - 0x3c000000u + 0x7ffffu + (clamped >> 20 & 1u)) >> 20;
  // Below 2^-6: adding 2^14 leaves multiples of 2^-9, rounded to nearest even, in the low bits.
  const U subnormal = same_bits<U>(same_bits<F>(clamped) + 16384.0f) - 0x46800000u;
  const U magnitude = clamped < 0x3c800000u ? subnormal : normal;
  return sign | (a > 0x7f800000u ? a - a + 0x7fu : magnitude);
}

static inline float from_bf16(std::uint16_t h) { return from_bf16_bits<float>(std::uint32_t{h}); }
static inline std::uint16_t to_bf16(float x) { return static_cast<std::uint16_t>(to_bf16_bits<std::uint32_t>(x)); }
static inline float from_fp16(std::uint16_t h) { return from_fp16_bits<float>(std::uint32_t{h}); }
static inline std::uint16_t to_fp16(float x) { return static_cast<std::uint16_t>(to_fp16_bits<std::uint32_t>(x)); }
static inline std::uint8_t to_e4m3_sat(float x) { return static_cast<std::uint8_t>(to_e4m3_bits<std::uint32_t>(x)); }
static inline float from_e4m3(std::uint8_t code) {
  const std::uint32_t sign = std::uint32_t{code & 0x80u} << 24;
  const std::uint32_t magnitude = code & 0x7fu;
  const std::uint32_t finite = bits_of(float_of(magnitude << 20) * float_of(0x7b800000u));   // times 2^120
  return float_of(sign | (magnitude == 0x7fu ? 0x7fc00000u : finite));
}

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

}  // namespace pplx
