// How a token becomes a row's payload: as it is (also when the caller quantised, and gives the scales), or quantised. A thread has
// its vec16s of a token in registers, loaded while the token's rows are planned.
#pragma once

#include "../common/arrival.cuh"
#include "../common/number.cuh"

namespace pplx::cuda {

struct AsIs {};
template <std::uint32_t kElementBytes>  // bytes of a number of the caller's tokens
struct Quantised {};

template <typename Mode>
struct Payload;

template <>
struct Payload<AsIs> {
  static constexpr std::uint32_t kVec16s = 2;
  static constexpr std::uint32_t kBytes = kVec16s * kSenders * 16;  // all threads' share of a row
  uint4 raw[kVec16s];

  // Calls visit(place, vec16) for those that the row has.
  template <typename Self, typename Visit>
  __device__ static void each(Self& self, std::uint32_t bytes, std::uint32_t at, const Visit& visit) {
#pragma unroll
    for (std::uint32_t i = 0; i < kVec16s; ++i) {
      const std::uint32_t from = at + (i * kSenders + threadIdx.x) * 16;
      if (from < bytes) visit(from, self.raw[i]);
    }
  }
  __device__ void load(const Common&, const char* x, std::uint32_t bytes, std::uint32_t at) {
    each(*this, bytes, at, [&](std::uint32_t from, uint4& vec16) { vec16 = load_input(x + from); });
  }
  __device__ void prepare(const Common&) {}
  // False: some vec16 looks blank.
  __device__ bool shows(std::uint32_t bytes, std::uint32_t at) const {
    bool all = true;
    each(*this, bytes, at, [&](std::uint32_t, const uint4& vec16) { all = all && !is_blank(vec16); });
    return all;
  }
  __device__ void store(const Common&, char* row, std::uint32_t bytes, std::uint32_t at) const {
    each(*this, bytes, at, [&](std::uint32_t from, const uint4& vec16) { store_vec16(row + from, vec16); });
  }
};

// Sixteen elements a thread, eight threads a word of scales: one scale, or four of two threads each.
template <std::uint32_t kElementBytes>
struct Payload<Quantised<kElementBytes>> {
  static constexpr std::uint32_t kBytes = kSenders * 16;  // all threads' codes
  static constexpr std::uint32_t kLoads = kElementBytes;  // sixteen bytes each
  union {
    uint4 raw[kLoads];
    struct {
      uint4 codes, scales;
    } row;
  };

  __device__ Payload() {}
  __device__ void load(const Common&, const char* x, std::uint32_t bytes, std::uint32_t at) {
    const std::uint32_t first = at + threadIdx.x * 16;
    const char* const from = x + std::uint64_t{first} * kElementBytes;
#pragma unroll
    for (std::uint32_t i = 0; i < kLoads; ++i) {
      raw[i] = make_uint4(0, 0, 0, 0);  // past the end: counts for no scale
      if (first + i * 16 / kElementBytes < bytes) raw[i] = load_input(from + i * 16);
    }
  }

  // Makes codes and scales of what was loaded.
  __device__ void prepare(const Common& k) {
    float f[16];
    std::uint32_t largest = 0;
    with_type<kElementBytes>(k.c.dtype, [&](auto type) {
#pragma unroll
      for (std::uint32_t i = 0; i < kLoads; ++i) {
        largest = type.largest(largest, raw[i]);
        type.unpack(raw[i], f + i * 16 / kElementBytes);
      }
      largest = type.bits_of_largest(largest);
    });
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    if (k.c.wire != Wire::MXFP8) {
      largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
      largest = max(largest, __shfl_xor_sync(~0u, largest, 4));
    }
    const BlockScale s = block_scale(k.c.wire, float_of(largest));
    uint4 codes = make_uint4(0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu);  // NaN, whatever its sign was
    if (largest < 0x7f800000u)
      codes = make_uint4(four_e4m3(f, s.multiplier), four_e4m3(f + 4, s.multiplier), four_e4m3(f + 8, s.multiplier),
                         four_e4m3(f + 12, s.multiplier));
    // Eight threads share a word. If a scale is a byte, each of them has one of the word's four.
    std::uint32_t word = bits_of(s.scale);
    if (k.c.wire == Wire::MXFP8) {
      word = std::uint32_t{to_e8m0(s.scale)} << threadIdx.x % 8 / 2 * 8;
      word |= __shfl_xor_sync(~0u, word, 2);
      word |= __shfl_xor_sync(~0u, word, 4);
    }
    row.codes = codes;
    row.scales =
        make_uint4(__shfl_sync(~0u, word, 0), __shfl_sync(~0u, word, 8), __shfl_sync(~0u, word, 16), __shfl_sync(~0u, word, 24));
  }
  // Codes never look blank; four NaNs among a block's byte scales do.
  __device__ bool shows(std::uint32_t bytes, std::uint32_t at) const {
    return at + threadIdx.x * 16 >= bytes || !is_blank(row.scales);
  }
  // A row's payload and scales are padded to 16 bytes each, so whole vec16s fit.
  __device__ void store(const Common& k, char* to, std::uint32_t bytes, std::uint32_t at) const {
    const std::uint32_t from = at + threadIdx.x * 16;
    if (from >= bytes) return;
    store_vec16(to + from, row.codes);
    if (threadIdx.x % 32 == 0) store_vec16(to + k.dispatch.scales_at + from / 512 * 16, row.scales);
  }
};

// Returns what of(Mode) returns for the mode of a call. `call`: has given_scales.
template <typename Call, typename Of>
auto choose_mode(const Config& c, const Call& call, const Of& of) {
  if (call.given_scales || c.wire == Wire::Native) return of(AsIs());
  return c.dtype == Dtype::Float32 ? of(Quantised<4>()) : of(Quantised<2>());
}

}  // namespace pplx::cuda
