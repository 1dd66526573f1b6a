// While it lives: no flush to zero, round to nearest. A caller may have set both otherwise, and results must not depend on it.
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
