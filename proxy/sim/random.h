// Random numbers that are the same on every platform and compiler, so that a seed determines a run.
#pragma once

#include <cstdint>

namespace pplx::sim {

constexpr std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(mix(seed)) {}

  std::uint64_t bits() { return mix(state_++); }
  std::uint64_t below(std::uint64_t n) { return bits() % n; }
  // From [low, high].
  template <typename T>
  T between(T low, T high) {
    return static_cast<T>(low + static_cast<T>(below(static_cast<std::uint64_t>(high - low) + 1)));
  }
  bool chance(double probability) { return static_cast<double>(bits() >> 11) * 0x1p-53 < probability; }
  float real(float low, float high) { return low + (high - low) * (static_cast<float>(bits() >> 40) * 0x1p-24f); }

 private:
  std::uint64_t state_;
};

}  // namespace pplx::sim
