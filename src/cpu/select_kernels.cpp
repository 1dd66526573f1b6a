#include <cstring>
#include <initializer_list>

#include "vector/kernels.h"

namespace pplx::cpu {

namespace baseline { extern const Kernels table; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
#endif

const Kernels* kernels_named(const char* isa) {
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx512") == 0)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c")
               ? &avx512::table
               : nullptr;
  if (std::strcmp(isa, "avx2") == 0)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")
                                                  ? &avx2::table : nullptr;
#endif
  return std::strcmp(isa, "baseline") == 0 ? &baseline::table : nullptr;
}

const Kernels& kernels() {
  static const Kernels& best = [&]() -> const Kernels& {
    for (const char* isa : {"avx512", "avx2"})
      if (const Kernels* table = kernels_named(isa)) return *table;
    return baseline::table;
  }();
  return best;
}

}  // namespace pplx::cpu
