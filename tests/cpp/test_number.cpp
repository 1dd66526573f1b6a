// Number formats against a search through every value that they have: nearest, ties to the even code.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../../src/protocol/number.h"
#include "check.h"

using namespace pplx;

namespace {

// A format: its finite magnitudes, code 0 upwards, in double, where all of them and all halfway points are exact.
struct Format {
  std::vector<double> magnitude;
  double overflow_at;     // from here on, rounding leaves the finite range
};

Format make(int exponent_bits, int mantissa_bits, int bias, std::uint32_t finite_codes) {
  Format f;
  for (std::uint32_t code = 0; code < finite_codes; ++code) {
    const auto exponent = static_cast<int>(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const double mantissa = code & ((1u << mantissa_bits) - 1);
    f.magnitude.push_back(exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                        : std::ldexp(std::ldexp(1.0, mantissa_bits) + mantissa, exponent - bias - mantissa_bits));
  }
  const std::size_t n = f.magnitude.size();
  f.overflow_at = f.magnitude[n - 1] + (f.magnitude[n - 1] - f.magnitude[n - 2]) / 2;
  return f;
}

// The code of |x|, which is finite and below overflow_at.
std::uint32_t nearest(const Format& f, double x) {
  const auto above = static_cast<std::size_t>(std::lower_bound(f.magnitude.begin(), f.magnitude.end(), x) - f.magnitude.begin());
  if (above == f.magnitude.size()) return static_cast<std::uint32_t>(above - 1);
  if (f.magnitude[above] == x || above == 0) return static_cast<std::uint32_t>(above);
  const double up = f.magnitude[above] - x, down = x - f.magnitude[above - 1];
  const std::size_t code = up < down ? above : down < up ? above - 1 : above % 2 == 0 ? above : above - 1;
  return static_cast<std::uint32_t>(code);
}

const Format kBf16 = make(8, 7, 127, 0x7f80);
const Format kFp16 = make(5, 10, 15, 0x7c00);
const Format kE4m3 = make(4, 3, 7, 0x7f);

void check_to(float x) {
  const std::uint32_t sign = bits_of(x) >> 31;
  const double a = std::fabs(static_cast<double>(x));
  const std::uint16_t b = to_bf16(x), h = to_fp16(x);
  const std::uint8_t e = to_e4m3_sat(x);
  CHECK_EQ(b >> 15, static_cast<int>(sign));
  CHECK_EQ(h >> 15, static_cast<int>(sign));
  CHECK_EQ(e >> 7, static_cast<int>(sign));
  if (std::isnan(x)) {
    CHECK((b & 0x7fff) > 0x7f80);
    CHECK((h & 0x7fff) > 0x7c00);
    CHECK_EQ(e & 0x7f, 0x7f);
    return;
  }
  CHECK_EQ(b & 0x7fffu, a >= kBf16.overflow_at ? 0x7f80u : nearest(kBf16, a));
  CHECK_EQ(h & 0x7fffu, a >= kFp16.overflow_at ? 0x7c00u : nearest(kFp16, a));
  CHECK_EQ(e & 0x7fu, a >= 448.0 ? 0x7eu : nearest(kE4m3, a));   // saturates
}

void check_from() {
  for (std::uint32_t code = 0; code < 0x10000; ++code) {
    const std::uint32_t magnitude = code & 0x7fff;
    const auto check = [&](float seen, const Format& f, std::uint32_t infinity) {
      CHECK_EQ(bits_of(seen) >> 31, code >> 15);
      if (magnitude < infinity)
        CHECK_EQ(std::fabs(static_cast<double>(seen)), f.magnitude[magnitude]);
      else if (magnitude == infinity)
        CHECK(std::isinf(seen));
      else
        CHECK(std::isnan(seen));
    };
    check(from_bf16(static_cast<std::uint16_t>(code)), kBf16, 0x7f80);
    check(from_fp16(static_cast<std::uint16_t>(code)), kFp16, 0x7c00);
  }
  for (std::uint32_t code = 0; code < 0x100; ++code) {
    const float seen = from_e4m3(static_cast<std::uint8_t>(code));
    CHECK_EQ(bits_of(seen) >> 31, code >> 7);
    if ((code & 0x7f) == 0x7f)
      CHECK(std::isnan(seen));
    else
      CHECK_EQ(std::fabs(static_cast<double>(seen)), kE4m3.magnitude[code & 0x7f]);
  }
}

// There and back is the same code, quiet NaNs included.
void check_round_trip() {
  for (std::uint32_t code = 0; code < 0x10000; ++code) {
    const auto h = static_cast<std::uint16_t>(code);
    if ((code & 0x7fff) <= 0x7f80 || (code & 0x40) != 0) CHECK_EQ(to_bf16(from_bf16(h)), h);
    if ((code & 0x7fff) <= 0x7c00 || (code & 0x200) != 0) CHECK_EQ(to_fp16(from_fp16(h)), h);
  }
  for (std::uint32_t code = 0; code < 0x100; ++code)
    CHECK_EQ(to_e4m3_sat(from_e4m3(static_cast<std::uint8_t>(code))), static_cast<std::uint8_t>(code));
}

// Every value of a format, every halfway point, and their neighbours: all places where rounding changes its mind.
void check_edges(const Format& f) {
  for (std::size_t i = 0; i < f.magnitude.size(); ++i) {
    const double next = i + 1 < f.magnitude.size() ? f.magnitude[i + 1] : f.overflow_at * 2 - f.magnitude[i];
    for (double v : {f.magnitude[i], (f.magnitude[i] + next) / 2}) {
      if (v > std::numeric_limits<float>::max()) continue;
      const auto x = static_cast<float>(v);
      for (float y : {x, std::nextafterf(x, INFINITY), std::nextafterf(x, -INFINITY)}) {
        check_to(y);
        check_to(-y);
      }
    }
  }
}

void check_scales(check::Random& random) {
  const BlockScale zero = e4m3_scale(0.0f);
  CHECK(zero.scale == 1.0f && zero.multiplier == 1.0f);
  for (float bad : {std::nanf(""), static_cast<float>(INFINITY)}) {
    const BlockScale s = e4m3_scale(bad);
    CHECK(std::isnan(s.scale));
    // Whatever the code is, NaN times it is NaN.
  }
  for (int i = 0; i < 300000; ++i) {
    float amax = float_of(static_cast<std::uint32_t>(random.integer(1, 0x7f7fffff)));
    if (i < 64) amax = float_of(0x00800000u - 32 + static_cast<std::uint32_t>(i));
    if (i >= 64 && i < 128) amax = float_of(0x04800000u - 32 + static_cast<std::uint32_t>(i - 64));
    if (i == 128) amax = std::numeric_limits<float>::max();
    if (i == 129) amax = std::numeric_limits<float>::denorm_min();
    const BlockScale s = e4m3_scale(amax);
    CHECK(std::isfinite(s.scale) && s.scale > 0.0f && std::isfinite(s.multiplier) && s.multiplier > 0.0f);
    if (amax >= 0x1p-118f) {
      CHECK_EQ(s.scale, amax / 448.0f);
      CHECK_EQ(s.multiplier, 448.0f / amax);
      // The largest value takes the largest code.
      CHECK_EQ(to_e4m3_sat(amax * s.multiplier), std::uint8_t{0x7e});
    }
    // Decoded again: within half a code of the largest, or of the last bit where nothing finer exists.
    const double back = static_cast<double>(from_e4m3(to_e4m3_sat(amax * s.multiplier))) * static_cast<double>(s.scale);
    CHECK(std::fabs(back - amax) <= std::max(amax * 0x1p-4, 0x1p-136));
  }
}

void check_e8m0() {
  for (std::uint32_t code = 0; code < 0x100; ++code) {
    const float seen = from_e8m0(static_cast<std::uint8_t>(code));
    if (code == 0xff) {
      CHECK(std::isnan(seen));
    } else {
      CHECK_EQ(static_cast<double>(seen), std::ldexp(1.0, static_cast<int>(code) - 127));
      // No amax is large enough to need 2^-127 as a multiplier.
      CHECK_EQ(seen * e8m0_reciprocal(static_cast<std::uint8_t>(code)), code == 254 ? 0.0f : 1.0f);
    }
    CHECK_EQ(to_e8m0(seen), static_cast<std::uint8_t>(code));
    CHECK(is_e8m0(seen));
    if (code == 0xff) continue;
    CHECK(!is_e8m0(-seen));
    CHECK(!is_e8m0(std::nextafterf(seen, INFINITY)));
    CHECK(!is_e8m0(std::nextafterf(seen, 0.0f)));
  }
  CHECK(!is_e8m0(0.0f) && !is_e8m0(INFINITY) && !is_e8m0(-INFINITY));
}

// Computes in exact arithmetic, in double, the least power of two, 2^-127 or more, that is no less than amax / 448.
void check_power(float amax) {
  double power = 0x1p-127;
  while (power * 448.0 < static_cast<double>(amax)) power *= 2;
  const BlockScale s = e4m3_scale_power_of_two(amax);
  CHECK_EQ(static_cast<double>(s.scale), power);
  CHECK_EQ(static_cast<double>(s.multiplier), 1.0 / power);
  CHECK_EQ(static_cast<double>(from_e8m0(e4m3_scale_e8m0(amax))), power);
}

void check_powers(check::Random& random) {
  CHECK(e4m3_scale_power_of_two(0.0f).scale == 1.0f && e4m3_scale_power_of_two(0.0f).multiplier == 1.0f);
  CHECK_EQ(e4m3_scale_e8m0(0.0f), std::uint8_t{127});
  for (float bad : {std::nanf(""), static_cast<float>(INFINITY)}) {
    CHECK(std::isnan(e4m3_scale_power_of_two(bad).scale) && std::isnan(e4m3_scale_power_of_two(bad).multiplier));
    CHECK_EQ(e4m3_scale_e8m0(bad), std::uint8_t{0xff});
  }
  // Every exponent, around both places where the answer could change.
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent)
    for (std::uint32_t mantissa : {0u, 1u, 2u, 0x5ffffeu, 0x5fffffu, 0x600000u, 0x600001u, 0x600002u, 0x7ffffeu, 0x7fffffu})
      if ((exponent | mantissa) != 0) check_power(float_of(exponent << 23 | mantissa));
  for (int i = 0; i < 200000; ++i) check_power(float_of(static_cast<std::uint32_t>(random.integer(1, 0x7f7fffff))));
}

}  // namespace

int main() {
  check::Random random(check::seed());
  CHECK_EQ(kFp16.magnitude.back(), 65504.0);
  CHECK_EQ(kE4m3.magnitude.back(), 448.0);
  CHECK_EQ(kBf16.magnitude.back(), 0x1.fep127);
  check_from();
  check_round_trip();
  for (const Format* f : {&kBf16, &kFp16, &kE4m3}) check_edges(*f);
  for (std::uint32_t bits : {0x7f800000u, 0xff800000u, 0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu, 0x7fbfffffu,
                             0x7f7fffffu, 0x00000001u, 0x80000001u, 0x007fffffu, 0x80000000u, 0u})
    check_to(float_of(bits));
  for (int i = 0; i < 1000000; ++i) check_to(float_of(static_cast<std::uint32_t>(random.bits())));
  for (int i = 0; i < 300000; ++i) check_to(random.real(-600.0f, 600.0f));   // where e4m3 lives
  for (int i = 0; i < 300000; ++i) check_to(random.real(-0x1p-5f, 0x1p-5f));
  check_scales(random);
  check_e8m0();
  check_powers(random);
}
