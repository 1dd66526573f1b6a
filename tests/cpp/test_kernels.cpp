// The CPU's inner loops: every instruction set that this machine runs gives the bits of a plain loop, and touches nothing else.
#include <cmath>
#include <cstring>
#include <vector>

#include "../../src/cpu/vector/kernels.h"
#include "../../src/protocol/number.h"
#include "check.h"

using namespace pplx;
using namespace pplx::cpu;

namespace {

constexpr std::uint8_t kGuard = 0xa5;

void check_copies(const Kernels& k, check::Random& random) {
  for (int i = 0; i < 6000; ++i) {
    const auto bytes = static_cast<std::size_t>(random.chance(0.7) ? random.integer(0, 700) : random.integer(0, 9000));
    const auto from_at = static_cast<std::size_t>(random.integer(0, 70));
    const bool past = random.chance(0.5);
    const auto to_at = 64 + static_cast<std::size_t>(past ? random.integer(0, 4) * 16 : random.integer(0, 70));
    std::vector<std::uint8_t> from(from_at + bytes);
    for (std::uint8_t& b : from) b = static_cast<std::uint8_t>(random.bits());
    std::vector<std::uint8_t> room(to_at + bytes + 192, kGuard);
    const auto base = 64 - reinterpret_cast<std::uintptr_t>(room.data()) % 64;   // `stream` asks for 16-byte aligned rows
    std::uint8_t* to = room.data() + (base + to_at - 64);
    (past ? k.stream : k.copy)(to, from.data() + from_at, bytes);
    CHECK(bytes == 0 || std::memcmp(to, from.data() + from_at, bytes) == 0);
    for (const std::uint8_t* p = room.data(); p < room.data() + room.size(); ++p)
      if (p < to || p >= to + bytes) CHECK_EQ(*p, kGuard);
  }
}

float load(Dtype dtype, const std::uint8_t* at, std::size_t i) {
  if (dtype == Dtype::Float32) {
    float v;
    std::memcpy(&v, at + 4 * i, 4);
    return v;
  }
  std::uint16_t h;
  std::memcpy(&h, at + 2 * i, 2);
  return dtype == Dtype::BFloat16 ? from_bf16(h) : from_fp16(h);
}

void store(Dtype dtype, std::uint8_t* at, std::size_t i, float v) {
  if (dtype == Dtype::Float32) {
    std::memcpy(at + 4 * i, &v, 4);
    return;
  }
  const std::uint16_t h = dtype == Dtype::BFloat16 ? to_bf16(v) : to_fp16(v);
  std::memcpy(at + 2 * i, &h, 2);
}

// volatile, so that each product and each sum is rounded whatever the compiler prefers.
float multiply(float a, float b) {
  volatile float p = a * b;
  return p;
}
float add(float a, float b) {
  volatile float s = a + b;
  return s;
}

// Some ordinary values, some of every magnitude. No NaNs: no operation defines their bits.
std::vector<std::uint8_t> random_row(Dtype dtype, std::uint32_t hidden, check::Random& random) {
  std::vector<std::uint8_t> row(std::size_t{hidden} * dtype_bytes(dtype));
  const bool wild = random.chance(0.3);
  for (std::uint32_t i = 0; i < hidden; ++i) {
    store(dtype, row.data(), i, random.real(-8, 8));
    if (!wild) continue;
    float v = float_of(static_cast<std::uint32_t>(random.bits()));
    if (std::fabs(v) < 1e30f) store(dtype, row.data(), i, std::fabs(v) > 60000.0f && dtype == Dtype::Float16 ? 1.0f : v);
  }
  return row;
}

void check_sums(const Kernels& k, check::Random& random) {
  for (int i = 0; i < 3000; ++i) {
    const auto dtype = static_cast<Dtype>(random.integer(0, 2));
    const auto hidden = static_cast<std::uint32_t>(random.chance(0.8) ? random.integer(1, 200) : random.integer(400, 1600));
    const auto n = static_cast<std::uint32_t>(random.integer(0, 17));
    const bool by_node = random.chance(0.3), weighted = !by_node && random.chance(0.5), from = random.chance(0.3);
    std::uint32_t ends = 0;
    for (std::uint32_t r = 0; by_node && r < n; ++r) ends |= (r + 1 == n || random.chance(0.5) ? 1u : 0u) << r;
    std::vector<std::vector<std::uint8_t>> rows;
    std::vector<const void*> pointers;
    std::vector<float> weights;
    for (std::uint32_t r = 0; r < n; ++r) {
      rows.push_back(random_row(dtype, hidden, random));
      weights.push_back(random.chance(0.1) ? 0.0f : random.real(-1, 1));
    }
    for (const auto& row : rows) pointers.push_back(row.data());
    const std::vector<std::uint8_t> start = random_row(dtype, hidden, random);
    std::vector<std::uint8_t> expected(start.size()), seen(start.size() + 128, kGuard);
    std::memcpy(seen.data(), start.data(), start.size());
    for (std::uint32_t h = 0; h < hidden; ++h) {
      float sum = from ? load(dtype, start.data(), h) : 0.0f;
      for (std::uint32_t r = 0; r < n; ++r) {
        float v = load(dtype, rows[r].data(), h);
        if (by_node) {
          while ((ends >> r & 1) == 0) v = add(v, load(dtype, rows[++r].data(), h));
          store(dtype, expected.data(), h, v);
          v = load(dtype, expected.data(), h);
        }
        sum = add(sum, weighted ? multiply(weights[r], v) : v);
      }
      store(dtype, expected.data(), h, sum);
    }
    // In place, as accumulate= does it.
    k.add_rows(dtype, seen.data(), from ? seen.data() : nullptr, pointers.data(), weighted ? weights.data() : nullptr, ends, n, hidden);
    for (std::uint32_t h = 0; h < hidden; ++h) {
      if (std::isnan(load(dtype, expected.data(), h))) {   // infinity less infinity
        CHECK(std::isnan(load(dtype, seen.data(), h)));
        continue;
      }
      CHECK(std::memcmp(seen.data() + std::size_t{h} * dtype_bytes(dtype), expected.data() + std::size_t{h} * dtype_bytes(dtype),
                        dtype_bytes(dtype)) == 0);
    }
    for (std::size_t g = start.size(); g < seen.size(); ++g) CHECK_EQ(seen[g], kGuard);
  }
}

void check_quantising(const Kernels& k, check::Random& random) {
  for (int i = 0; i < 4000; ++i) {
    const auto dtype = static_cast<Dtype>(random.integer(0, 2));
    const auto wire = static_cast<Wire>(random.integer(1, 3));
    const auto hidden = static_cast<std::uint32_t>(random.integer(1, 700));
    std::vector<std::uint8_t> x = random_row(dtype, hidden, random);
    const std::uint32_t block = wire == Wire::MXFP8 ? 32 : 128, each = wire == Wire::MXFP8 ? 1 : 4;
    const std::uint32_t blocks = (hidden + block - 1) / block;
    for (std::uint32_t b = 0; b < blocks; ++b) {
      const std::uint32_t end = std::min(hidden, b * block + block);
      const int kind = random.chance(0.4) ? static_cast<int>(random.integer(1, 5)) : 0;
      for (std::uint32_t h = b * block; h < end; ++h) {
        if (kind == 1) store(dtype, x.data(), h, random.chance(0.5) ? 0.0f : -0.0f);
        if (kind == 2) store(dtype, x.data(), h, random.real(-1, 1) * (dtype == Dtype::Float16 ? 0x1p-22f : 0x1p-126f));
      }
      const auto at = static_cast<std::uint32_t>(random.integer(b * block, end - 1));
      if (kind == 3) store(dtype, x.data(), at, random.chance(0.5) ? std::nanf("") : -std::nanf(""));
      if (kind == 4) store(dtype, x.data(), at, random.chance(0.5) ? INFINITY : -INFINITY);
      // One mantissa step around where a power of two becomes the next one.
      if (kind == 5) {
        const auto edge = static_cast<std::uint32_t>(random.integer(1, 254)) << 23 | 0x600000u;
        const auto off = static_cast<std::uint32_t>(random.integer(-1, 1)) * (dtype == Dtype::BFloat16 ? 0x10000u : 1u);
        if (dtype != Dtype::Float16) store(dtype, x.data(), at, float_of(edge + off));
      }
    }
    std::vector<std::uint8_t> codes(hidden + 64, kGuard);
    std::vector<std::uint8_t> scales(std::size_t{blocks} * each + 64, kGuard);
    k.quantise(wire, dtype, x.data(), hidden, codes.data(), scales.data());
    for (std::uint32_t b = 0; b < blocks; ++b) {
      const std::uint32_t end = std::min(hidden, b * block + block);
      float amax = 0;
      bool finite = true;
      for (std::uint32_t h = b * block; h < end; ++h) {
        const float v = std::fabs(load(dtype, x.data(), h));
        finite &= std::isfinite(v);
        amax = v > amax ? v : amax;
      }
      float scale;
      if (each == 4)
        std::memcpy(&scale, scales.data() + b * 4, 4);
      else
        scale = from_e8m0(scales[b]);
      if (!finite) {
        CHECK_EQ(bits_of(scale), 0x7fc00000u);
        for (std::uint32_t h = b * block; h < end; ++h) CHECK_EQ(codes[h], std::uint8_t{0x7f});
        continue;
      }
      const BlockScale s = wire == Wire::FP8 ? e4m3_scale(amax) : e4m3_scale_power_of_two(amax);
      CHECK_EQ(bits_of(scale), bits_of(s.scale));
      for (std::uint32_t h = b * block; h < end; ++h)
        CHECK_EQ(codes[h], to_e4m3_sat(multiply(load(dtype, x.data(), h), s.multiplier)));
    }
    for (std::size_t g = hidden; g < codes.size(); ++g) CHECK_EQ(codes[g], kGuard);
    for (std::size_t g = std::size_t{blocks} * each; g < scales.size(); ++g) CHECK_EQ(scales[g], kGuard);
  }
}

}  // namespace

int main() {
  const std::uint64_t seed = check::seed();
  int run = 0;
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    const Kernels* k = kernels_named(isa);
    std::printf("%s: %s\n", isa, k != nullptr ? "checked" : "this processor does not run it");
    if (k == nullptr) continue;
    ++run;
    CHECK_EQ(std::string(k->isa), std::string(isa));
    check::Random random(seed);
    check_copies(*k, random);
    check_sums(*k, random);
    check_quantising(*k, random);
  }
  CHECK(run > 0);
  CHECK(kernels_named("pdp11") == nullptr);
}
