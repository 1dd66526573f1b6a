#pragma once

#include "src/protocol/number.h"

struct __nv_bfloat162 {
  std::uint16_t x, y;
};
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {pplx::to_bf16(x), pplx::to_bf16(y)}; }
