// Number formats for the reference, by arithmetic on doubles. This checks the library's bit operations, so it must work otherwise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../../src/protocol/config.h"

namespace pplx::sim {

struct Format {
  int bits;            // bits of the significand, the leading one included
  int least;           // the exponent of the smallest normal number
  double most;         // the largest finite number
  bool saturates;      // larger numbers become the largest one, else infinity
};
inline constexpr Format kBFloat16{8, -126, 3.3895313892515355e38, false};
inline constexpr Format kFloat16{11, -14, 65504.0, false};
inline constexpr Format kE4m3{4, -6, 448.0, true};

inline Format format_of(Dtype dtype) { return dtype == Dtype::BFloat16 ? kBFloat16 : kFloat16; }

// The nearest number of the format, ties to even: adding 1.5 * 2^52 quanta rounds a double to a whole number of them.
inline float rounded(float x, const Format& f) {
  std::uint64_t u;
  const double wide = x;
  std::memcpy(&u, &wide, 8);
  int exponent = static_cast<int>(u >> 52 & 0x7ff) - 1023;
  if (exponent > 200) return x;   // infinity or NaN
  if (exponent < f.least) exponent = f.least;
  const std::uint64_t magic = static_cast<std::uint64_t>(exponent - (f.bits - 1) + 52 + 1023) << 52 | std::uint64_t{1} << 51;
  double shift;
  std::memcpy(&shift, &magic, 8);
  const double near = (wide + shift) - shift;
  if (std::fabs(near) > f.most) return static_cast<float>(std::copysign(f.saturates ? f.most : INFINITY, wide));
  return static_cast<float>(std::copysign(near, wide));
}

// 2^exponent, of those that a double has as normal numbers; exact products of it cost less than ldexp().
inline double power_of_two(int exponent) {
  const std::uint64_t u = static_cast<std::uint64_t>(exponent + 1023) << 52;
  double power;
  std::memcpy(&power, &u, 8);
  return power;
}

// The exponent of a normal number.
inline int exponent_of(double x) {
  std::uint64_t u;
  std::memcpy(&u, &x, 8);
  return static_cast<int>(u >> 52 & 0x7ff) - 1023;
}

inline float rounded_to(float x, Dtype dtype) { return dtype == Dtype::Float32 ? x : rounded(x, format_of(dtype)); }

// The number that a format's bits mean: sign, exponent, mantissa.
inline float value_of(std::uint32_t bits, const Format& f, int exponent_bits) {
  const int mantissa_bits = f.bits - 1;
  const bool negative = (bits >> (exponent_bits + mantissa_bits) & 1) != 0;
  const int exponent = static_cast<int>(bits >> mantissa_bits & ((1u << exponent_bits) - 1));
  const auto mantissa = static_cast<double>(bits & ((1u << mantissa_bits) - 1));
  const double whole = exponent == 0 ? mantissa * power_of_two(f.least - mantissa_bits)
                                     : (mantissa + (1 << mantissa_bits)) * power_of_two(f.least + exponent - 1 - mantissa_bits);
  return static_cast<float>(negative ? -whole : whole);
}

// The bits of a number that the format can represent.
inline std::uint32_t bits_in(float x, const Format& f, int exponent_bits) {
  const int mantissa_bits = f.bits - 1;
  const std::uint32_t sign = std::signbit(x) ? 1u << (exponent_bits + mantissa_bits) : 0u;
  const double magnitude = std::fabs(static_cast<double>(x));
  if (magnitude < power_of_two(f.least))
    return sign | static_cast<std::uint32_t>(magnitude * power_of_two(mantissa_bits - f.least));
  const int exponent = exponent_of(magnitude);
  const auto mantissa = static_cast<std::uint32_t>(magnitude * power_of_two(mantissa_bits - exponent)) - (1u << mantissa_bits);
  return sign | static_cast<std::uint32_t>(exponent - f.least + 1) << mantissa_bits | mantissa;
}

// Numbers in memory, as tensors hold them.
inline float load(const char* at, Dtype dtype) {
  if (dtype == Dtype::Float32) {
    float x;
    std::memcpy(&x, at, 4);
    return x;
  }
  std::uint16_t u;
  std::memcpy(&u, at, 2);
  if (dtype == Dtype::Float16) return value_of(u, kFloat16, 5);
  const std::uint32_t wide = std::uint32_t{u} << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}

// `x` must be a number that the type can represent.
inline void store(char* at, float x, Dtype dtype) {
  if (dtype == Dtype::Float32) {
    std::memcpy(at, &x, 4);
    return;
  }
  std::uint32_t wide;
  std::memcpy(&wide, &x, 4);
  const auto u = static_cast<std::uint16_t>(dtype == Dtype::BFloat16 ? wide >> 16 : bits_in(x, kFloat16, 5));
  std::memcpy(at, &u, 2);
}

}  // namespace pplx::sim
