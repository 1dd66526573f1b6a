// Number formats, bit by bit, the same on host and device: bf16, fp16 and e4m3 to and from fp32, round to nearest even.
// Branch-free where it matters, so that a compiler can vectorise the loops around them. Static, not inline: files built for
// different instruction sets must not share one copy.
#pragma once

#include <cstdint>
#include <cstring>

namespace pplx {

static inline std::uint32_t bits_of(float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
static inline float float_of(std::uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

static inline float from_bf16(std::uint16_t h) { return float_of(std::uint32_t{h} << 16); }
static inline std::uint16_t to_bf16(float x) {
  const std::uint32_t u = bits_of(x);
  const std::uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
  const std::uint32_t nan = u >> 16 | 0x40u;
  return static_cast<std::uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

static inline float from_fp16(std::uint16_t h) {
  const std::uint32_t sign = std::uint32_t{h & 0x8000u} << 16;
  const std::uint32_t magnitude = h & 0x7fffu;
  // Exact scaling by 2^112 maps half exponents onto float ones, subnormals included.
  const std::uint32_t finite = bits_of(float_of(magnitude << 13) * float_of(0x77800000u));
  const std::uint32_t special = 0x7f800000u | (magnitude & 0x3ffu) << 13 | ((magnitude & 0x3ffu) != 0 ? 0x400000u : 0u);
  return float_of(sign | (magnitude >= 0x7c00u ? special : finite));
}
static inline std::uint16_t to_fp16(float x) {
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sign = u >> 16 & 0x8000u;
  const std::uint32_t a = u & 0x7fffffffu;
  const std::uint32_t normal = (a - 0x38000000u + 0xfffu + (a >> 13 & 1u)) >> 13;
  // Below 2^-14: adding 0.5 leaves the half's subnormal mantissa, rounded to nearest even, in the low bits.
  const std::uint32_t subnormal = bits_of(float_of(a) + 0.5f) - 0x3f000000u;
  const std::uint32_t special = a > 0x7f800000u ? (0x7e00u | (a >> 13 & 0x3ffu)) : 0x7c00u;
  const std::uint32_t magnitude = a >= 0x477ff000u ? special : (a < 0x38800000u ? subnormal : normal);
  return static_cast<std::uint16_t>(sign | magnitude);
}

// e4m3 (no infinities, 0x7f is NaN), saturating at 448.
inline constexpr float kE4m3Max = 448.0f;
inline constexpr std::uint8_t kE4m3NaN = 0x7f;

static inline std::uint8_t to_e4m3_sat(float x) {
  const std::uint32_t u = bits_of(x);
  const std::uint32_t sign = u >> 24 & 0x80u;
  const std::uint32_t a = u & 0x7fffffffu;
  const std::uint32_t clamped = a > 0x43e00000u ? 0x43e00000u : a;             // 448
  const std::uint32_t normal = (clamped - 0x3c000000u + 0x7ffffu + (clamped >> 20 & 1u)) >> 20;
  // Below 2^-6: adding 2^14 leaves multiples of 2^-9, rounded to nearest even, in the low bits.
  const std::uint32_t subnormal = bits_of(float_of(clamped) + 16384.0f) - 0x46800000u;
  const std::uint32_t magnitude = clamped < 0x3c800000u ? subnormal : normal;
  return static_cast<std::uint8_t>(a > 0x7f800000u ? sign | kE4m3NaN : sign | magnitude);
}
static inline float from_e4m3(std::uint8_t code) {
  const std::uint32_t sign = std::uint32_t{code & 0x80u} << 24;
  const std::uint32_t magnitude = code & 0x7fu;
  const std::uint32_t finite = bits_of(float_of(magnitude << 20) * float_of(0x7b800000u));   // times 2^120
  return float_of(sign | (magnitude == 0x7fu ? 0x7fc00000u : finite));
}

// The scale of one block, from its largest magnitude, and what values are multiplied with before rounding.
// A block of zeros gets 1. Below 2^-118 the reciprocal would overflow: such a block uses the smallest normal scale.
struct BlockScale {
  float scale = 1.0f;
  float multiplier = 1.0f;
};
static inline BlockScale e4m3_scale(float amax) {
  if (!(amax <= 3.402823466e38f)) return {float_of(0x7fc00000u), float_of(0x7fc00000u)};   // NaN or infinity: all decode to NaN
  if (amax == 0.0f) return {1.0f, 1.0f};
  if (amax < float_of(0x04800000u)) return {float_of(0x00800000u), float_of(0x7e800000u)};   // 2^-118: 2^-126, 2^126
  return {amax / kE4m3Max, kE4m3Max / amax};
}

}  // namespace pplx
