// How a warp quantises a tile of a token: sixteen elements a lane in each pass. The passes of a tile share what a scale costs: each of the eight
// lanes that have a block's elements works out another pass's. Bits as of Payload.
#pragma once

#include "../decode/payload.cuh"
#include "tuning.h"

namespace pplx::cuda {

template <std::uint32_t kElementBytes, std::uint32_t kMostBytes>
class TileQuantiser {
 public:
  static constexpr std::uint32_t kPassElements = 512, kPasses = kMostBytes / kElementBytes / kPassElements;

  // Quantises elements [0, elements) at `from`, a multiple of sixteen: a code for each, and a scale for each block of them, sixteen bytes of scales at
  // once; scales of MXFP8 are bytes. All in shared memory.
  // read(): the elements are not looked at any more.
  template <typename Read>
  __device__ static void quantise(const Common& k, const char* from, std::uint32_t elements, char* codes, char* scales, const Read& read) {
    if (k.c.wire == Wire::MXFP8) {
      quantise_passes(k, from, elements, codes, scales);
      read();
      return;
    }
    with_type<kElementBytes>(k.c.dtype, [&](auto type) {
      if (elements == kPasses * kPassElements)
        quantise_tile<decltype(type), true>(k, from, elements, codes, scales, read);
      else
        quantise_tile<decltype(type), false>(k, from, elements, codes, scales, read);
    });
  }

 private:
  static constexpr std::uint32_t kVectors = kElementBytes;  // sixteen bytes each, of a lane in a pass
  static constexpr std::uint32_t kBlockLanes = 8;
  using Raw = uint4[kVectors];

  // Loads a lane's part of a pass. Past the end are zeros: they count for no scale. kFull: nothing is.
  template <bool kFull>
  __device__ static void load(const char* from, std::uint32_t pass, std::uint32_t elements, Raw& raw) {
#pragma unroll
    for (std::uint32_t i = 0; i < kVectors; ++i) {
      const std::uint32_t element = pass * kPassElements + threadIdx.x % 32 * 16 + i * 16 / kElementBytes;
      raw[i] = kFull || element < elements ? *reinterpret_cast<const uint4*>(from + element * kElementBytes) : make_uint4(0, 0, 0, 0);
    }
  }
  template <typename T>
  __device__ static std::uint32_t largest_of(const Raw& raw) {
    std::uint32_t most = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < kVectors; ++i) most = T::largest(most, raw[i]);
    return most;
  }

  // The largest magnitude of this lane's block in the pass that it works out a scale for, as a float's bits.
  template <typename T>
  __device__ static std::uint32_t largest_of_mine(const Raw (&loaded)[kPasses], std::uint32_t mine) {
    std::uint32_t of_mine = 0;
    if constexpr (kElementBytes == 4) {
#pragma unroll
      for (std::uint32_t p = 0; p < kPasses; ++p) {
        std::uint32_t most = largest_of<T>(loaded[p]);
#pragma unroll
        for (std::uint32_t i = 1; i < kBlockLanes; i *= 2) most = max(most, __shfl_xor_sync(~0u, most, i));
        if (p == mine) of_mine = most;
      }
      return of_mine;
    } else {
      // Two passes share a word.
#pragma unroll
      for (std::uint32_t p = 0; p < kPasses; p += 2) {
        const std::uint32_t even = largest_of<T>(loaded[p]), odd = p + 1 < kPasses ? largest_of<T>(loaded[p + 1 < kPasses ? p + 1 : p]) : 0;
        std::uint32_t most = __vmaxu2((even & 0xffffu) | odd << 16, even >> 16 | (odd & 0xffff0000u));
#pragma unroll
        for (std::uint32_t i = 1; i < kBlockLanes; i *= 2) most = __vmaxu2(most, __shfl_xor_sync(~0u, most, i));
        if (p == (mine & ~1u)) of_mine = most;
      }
      float f[T::kPerVector];
      T::unpack(make_uint4((mine & 1) != 0 ? of_mine >> 16 : of_mine & 0xffffu, 0, 0, 0), f);
      return bits_of(f[0]);
    }
  }

  template <typename T, bool kFull, typename Read>
  __device__ static void quantise_tile(const Common& k, const char* from, std::uint32_t elements, char* codes, char* scales, const Read& read) {
    const std::uint32_t lane = threadIdx.x % 32, mine = lane % kBlockLanes;
    Raw loaded[kPasses];
#pragma unroll
    for (std::uint32_t p = 0; p < kPasses; ++p) load<kFull>(from, p, elements, loaded[p]);
    const std::uint32_t largest = largest_of_mine<T>(loaded, mine);
    read();
    const BlockScale s = block_scale(k.c.wire, float_of(largest));
    if (mine < kPasses && mine * kPassElements < elements)
      *reinterpret_cast<std::uint32_t*>(scales + 16 * mine + 4 * (lane / kBlockLanes)) = bits_of(s.scale);
#pragma unroll
    for (std::uint32_t p = 0; p < kPasses; ++p) {
      const float multiplier = __shfl_sync(~0u, s.multiplier, static_cast<int>(lane - mine + p));
      float f[16];
#pragma unroll
      for (std::uint32_t i = 0; i < kVectors; ++i) T::unpack(loaded[p][i], f + i * T::kPerVector);
      uint4 v = make_uint4(four_e4m3(f, multiplier), four_e4m3(f + 4, multiplier), four_e4m3(f + 8, multiplier), four_e4m3(f + 12, multiplier));
      if (multiplier != multiplier) v = make_uint4(0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu);  // NaN, whatever its sign was
      if (kFull || p * kPassElements + lane * 16 < elements) store16(codes + p * kPassElements + lane * 16, v);
    }
  }

  __device__ static void quantise_passes(const Common& k, const char* from, std::uint32_t elements, char* codes, char* scales) {
    const std::uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
    for (std::uint32_t pass = 0; pass * kPassElements < elements; ++pass) {
      Payload<Quantised<kElementBytes>> payload;
      load<false>(from, pass, elements, payload.raw);
      payload.prepare(k);
      if (pass * kPassElements + lane * 16 < elements) store16(codes + pass * kPassElements + lane * 16, payload.row.codes);
      if (lane == 0) store16(scales + 16 * pass, payload.row.scales);
    }
  }
};

// Bytes of an element of the caller's tokens, where they are quantised.
template <typename Mode>
inline constexpr std::uint32_t kElementBytes = 0;
template <std::uint32_t kBytes>
inline constexpr std::uint32_t kElementBytes<Quantised<kBytes>> = kBytes;
template <typename Mode>
inline constexpr bool kQuantises = kElementBytes<Mode> != 0;

}  // namespace pplx::cuda
