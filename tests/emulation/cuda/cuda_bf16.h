#pragma once

#include "src/protocol/number.h"

struct __nv_bfloat162 {
  std::uint16_t x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {pplx::to_bf16(x), pplx::to_bf16(y)}; }
inline __nv_bfloat162 __hadd2_rn(__nv_bfloat162 a, __nv_bfloat162 b) {
  return __floats2bfloat162_rn(pplx::from_bf16(a.x) + pplx::from_bf16(b.x), pplx::from_bf16(a.y) + pplx::from_bf16(b.y));
}
