#pragma once

#include "src/protocol/number.h"

struct __half2 {
  std::uint16_t x, y;
};
inline float2 __half22float2(__half2 v) { return {pplx::from_fp16(v.x), pplx::from_fp16(v.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {pplx::to_fp16(x), pplx::to_fp16(y)}; }
inline __half2 __hadd2_rn(__half2 a, __half2 b) {
  return __floats2half2_rn(pplx::from_fp16(a.x) + pplx::from_fp16(b.x), pplx::from_fp16(a.y) + pplx::from_fp16(b.y));
}
