// Numbers on the device, sixteen bytes at a time, with the bits of protocol/number.h: every operation rounds once, no contraction,
// no flush to zero. (What a NaN carries besides being one is the processor's choice.) Scales are protocol/number.h's own.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../../protocol/wire.h"

namespace pplx::cuda {

template <typename Sum>
__device__ inline uint4 by_words(const uint4& a, const uint4& b, const Sum& sum) {
  return make_uint4(sum(a.x, b.x), sum(a.y, b.y), sum(a.z, b.z), sum(a.w, b.w));
}

// 0 + a + b in fp32, rounded once more, of two numbers in a word. fp32 has twice the bits of the narrow types, and two more, so
// adding in those rounds to the same. The sum of two -0 is +0, since it began with 0: the zeros that are added.
template <typename Pair>
__device__ inline std::uint32_t sum_of_pairs(std::uint32_t a, std::uint32_t b, const Pair& zeros) {
  Pair x, y;
  memcpy(&x, &a, 4);
  memcpy(&y, &b, 4);
  const Pair sum = __hadd2_rn(__hadd2_rn(x, y), zeros);
  memcpy(&a, &sum, 4);
  return a;
}

// Numbers of which a word has two: what BFloat16 and Float16 have in common.
template <typename T>
struct Narrow {
  static constexpr int kPerVector = 8;
  __device__ static void unpack(const uint4& v, float* f) {
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 both = T::floats(words[i]);
      f[2 * i] = both.x;
      f[2 * i + 1] = both.y;
    }
  }
  __device__ static uint4 pack(const float* f) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto pair = T::pair(f[2 * i], f[2 * i + 1]);
      memcpy(&words[i], &pair, 4);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  __device__ static uint4 sum_of_two(const uint4& a, const uint4& b) {
    return by_words(a, b, [](std::uint32_t x, std::uint32_t y) { return sum_of_pairs(x, y, T::pair(0.0f, 0.0f)); });
  }
  // The largest magnitudes of both, one in each half: an order of bits.
  __device__ static std::uint32_t largest(std::uint32_t most, const uint4& v) {
    constexpr std::uint32_t kMagnitudes = 0x7fff7fffu;
    return __vmaxu2(__vmaxu2(most, __vmaxu2(v.x & kMagnitudes, v.y & kMagnitudes)), __vmaxu2(v.z & kMagnitudes, v.w & kMagnitudes));
  }
  // The larger of the halves, as a float's bits.
  __device__ static std::uint32_t bits_of_largest(std::uint32_t most) {
    const float2 both = T::floats(most);
    return max(__float_as_uint(both.x), __float_as_uint(both.y));
  }
};

struct BFloat16 : Narrow<BFloat16> {
  __device__ static float2 floats(std::uint32_t word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  }
  __device__ static __nv_bfloat162 pair(float a, float b) { return __floats2bfloat162_rn(a, b); }
};

struct Float16 : Narrow<Float16> {
  __device__ static float2 floats(std::uint32_t word) {
    __half2 pair;
    memcpy(&pair, &word, 4);
    return __half22float2(pair);
  }
  __device__ static __half2 pair(float a, float b) { return __floats2half2_rn(a, b); }
};

struct Float32 {
  static constexpr int kPerVector = 4;
  __device__ static void unpack(const uint4& v, float* f) {
    f[0] = __uint_as_float(v.x);
    f[1] = __uint_as_float(v.y);
    f[2] = __uint_as_float(v.z);
    f[3] = __uint_as_float(v.w);
  }
  __device__ static std::uint32_t largest(std::uint32_t most, const uint4& v) {
    constexpr std::uint32_t kMagnitude = 0x7fffffffu;
    return max(max(most, max(v.x & kMagnitude, v.y & kMagnitude)), max(v.z & kMagnitude, v.w & kMagnitude));
  }
  __device__ static std::uint32_t bits_of_largest(std::uint32_t most) { return most; }
  __device__ static uint4 pack(const float* f) {
    return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]), __float_as_uint(f[3]));
  }
  __device__ static uint4 sum_of_two(const uint4& a, const uint4& b) {
    return by_words(a, b, [](std::uint32_t x, std::uint32_t y) {
      return __float_as_uint(__fadd_rn(__fadd_rn(0.0f, __uint_as_float(x)), __uint_as_float(y)));
    });
  }
};

__device__ inline std::uint32_t four_e4m3(const float* f, float multiplier) {
  const std::uint32_t low =
      __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(f[0], multiplier), __fmul_rn(f[1], multiplier)), __NV_SATFINITE, __NV_E4M3);
  const std::uint32_t high =
      __nv_cvt_float2_to_fp8x2(make_float2(__fmul_rn(f[2], multiplier), __fmul_rn(f[3], multiplier)), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// A vector of numbers from e4m3 codes, of which word(i) has four.
template <typename T, typename Word>
__device__ inline uint4 numbers_of(const Word& word, float scale) {
  float f[T::kPerVector];
#pragma unroll
  for (std::uint32_t i = 0; i < T::kPerVector; ++i) {
    const std::uint32_t code = word(i / 4) >> i % 4 * 8, bits = (code & 0x80u) << 24 | (code & 0x7fu) << 20;
    f[i] = __fmul_rn(__fmul_rn(float_of(bits), float_of(0x7b800000u)), scale);  // 2^120. Where a code is NaN the scale is
  }
  return T::pack(f);
}

// Returns what of(T) returns for the type of a dtype's numbers.
template <typename Of>
auto choose_type(Dtype dtype, const Of& of) {
  return dtype == Dtype::BFloat16 ? of(BFloat16()) : dtype == Dtype::Float16 ? of(Float16()) : of(Float32());
}

// Calls of(T) for the type of a dtype's numbers of kBytes bytes.
template <std::uint32_t kBytes, typename Of>
__device__ inline void with_type(Dtype dtype, const Of& of) {
  if constexpr (kBytes == 4)
    of(Float32());
  else if (dtype == Dtype::BFloat16)
    of(BFloat16());
  else
    of(Float16());
}

}  // namespace pplx::cuda
