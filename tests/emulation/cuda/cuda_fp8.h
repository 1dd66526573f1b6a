#pragma once

#include "src/protocol/number.h"

enum { __NV_SATFINITE, __NV_E4M3 };
inline std::uint32_t __nv_cvt_float2_to_fp8x2(float2 v, int, int) {
  return pplx::to_e4m3_sat(v.x) | std::uint32_t{pplx::to_e4m3_sat(v.y)} << 8;
}
