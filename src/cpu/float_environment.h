// Sets the floating-point mode while it lives: no flush to zero, round to nearest. Results must not depend on the caller's mode.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace pplx::cpu {

class FloatEnvironment {
 public:
#if defined(__SSE2__)
  FloatEnvironment() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~FloatEnvironment() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

}  // namespace pplx::cpu
