// Access to words in memory that other processes or the proxy read and write.
#pragma once

#include <cstdint>

namespace pplx {

inline std::uint64_t load_acquire(const std::uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void store_release(std::uint64_t* word, std::uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

// True if the word was zero and is now `value`.
inline bool store_if_zero(std::uint64_t* word, std::uint64_t value) {
  std::uint64_t zero = 0;
  return __atomic_compare_exchange_n(word, &zero, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

// Host counterpart of a GPU's atomics on the protocol's words.
struct HostAtomics {
  static std::uint64_t load_acquire(const void* word) { return pplx::load_acquire(static_cast<const std::uint64_t*>(word)); }
  static void store_release(void* word, std::uint64_t value) { pplx::store_release(static_cast<std::uint64_t*>(word), value); }
};

}  // namespace pplx
