// Number formats, bit by bit: bf16, fp16 and e4m3 to and from fp32, round to nearest even. Scales and e8m0 are in wire.h. Static,
// not inline: files built for different instruction sets must not share one copy. Processors with instructions for codes use those;
// test_number and tests/gpu compare them with these.
#pragma once

#include <cstdint>
#include <cstring>

#include "wire.h"

namespace pplx {

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

template <typename F, typename U>
static inline F from_e4m3_bits(U code) {
  const U sign = (code & 0x80u) << 24, magnitude = code & 0x7fu;
  const U finite = same_bits<U>(same_bits<F>(magnitude << 20) * float_of(0x7b800000u));   // times 2^120
  const U nan = finite - finite + 0x7fc00000u;
  return same_bits<F>(sign | (magnitude == 0x7fu ? nan : finite));
}

static inline float from_bf16(std::uint16_t h) { return from_bf16_bits<float>(std::uint32_t{h}); }
static inline std::uint16_t to_bf16(float x) { return static_cast<std::uint16_t>(to_bf16_bits<std::uint32_t>(x)); }
static inline float from_fp16(std::uint16_t h) { return from_fp16_bits<float>(std::uint32_t{h}); }
static inline std::uint16_t to_fp16(float x) { return static_cast<std::uint16_t>(to_fp16_bits<std::uint32_t>(x)); }
static inline std::uint8_t to_e4m3_sat(float x) { return static_cast<std::uint8_t>(to_e4m3_bits<std::uint32_t>(x)); }
static inline float from_e4m3(std::uint8_t code) { return from_e4m3_bits<float>(std::uint32_t{code}); }

}  // namespace pplx
