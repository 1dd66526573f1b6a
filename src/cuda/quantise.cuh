// How a warp quantises a tile of a token: sixteen elements a lane in each pass. The passes of a tile share what a scale costs: each of the eight
// lanes that have a block's elements works out another pass's. Bits as of Payload.
#pragma once

#include "payload.cuh"

namespace pplx::cuda {

template <std::uint32_t kElementBytes, std::uint32_t kMostBytes = kTileBytes>
class TileQuantiser {
 public:
  static constexpr std::uint32_t kPassElements = 512, kPasses = kMostBytes / kElementBytes / kPassElements;

  // Elements [0, elements) at `from`, a multiple of sixteen, become as many codes, and a scale for each block of them, sixteen bytes of scales at
  // once; scales of MXFP8 are bytes. All in shared memory.
  __device__ static void quantise(const Common& k, const char* from, std::uint32_t elements, char* codes, char* scales) {
    if (k.c.wire == Wire::MXFP8)
      quantise_passes(k, from, elements, codes, scales);
    else
      quantise_tile(k, from, elements, codes, scales);
  }

 private:
  static constexpr std::uint32_t kVectors = kElementBytes;  // sixteen bytes each, of a lane in a pass
  static constexpr std::uint32_t kBlockLanes = 8;

  struct Loaded {
    uint4 raw[kVectors];

    // Past the end are zeros: they count for no scale.
    __device__ void load(const char* from, std::uint32_t pass, std::uint32_t elements) {
#pragma unroll
      for (std::uint32_t i = 0; i < kVectors; ++i) {
        const std::uint32_t element = pass * kPassElements + threadIdx.x % 32 * 16 + i * 16 / kElementBytes;
        raw[i] = element < elements ? *reinterpret_cast<const uint4*>(from + element * kElementBytes) : make_uint4(0, 0, 0, 0);
      }
    }
    // The largest magnitude of a block, as a float's bits.
    __device__ std::uint32_t largest(Dtype dtype) const {
      if constexpr (kElementBytes == 4) {
        std::uint32_t most = 0;
#pragma unroll
        for (std::uint32_t i = 0; i < kVectors; ++i)
          most = max(most, max(max(raw[i].x & kFloat, raw[i].y & kFloat), max(raw[i].z & kFloat, raw[i].w & kFloat)));
        return of_block(most);
      } else {
        std::uint32_t most = 0;  // of two halves
#pragma unroll
        for (std::uint32_t i = 0; i < kVectors; ++i)
          most = __vmaxu2(__vmaxu2(most, __vmaxu2(raw[i].x & kHalves, raw[i].y & kHalves)), __vmaxu2(raw[i].z & kHalves, raw[i].w & kHalves));
        most = of_block(max(most & 0xffffu, most >> 16));
        if (dtype == Dtype::BFloat16) return most << 16;
        float f[8];
        Float16::unpack(make_uint4(most, 0, 0, 0), f);
        return bits_of(f[0]);
      }
    }
    __device__ void unpack(Dtype dtype, float* f) const {
#pragma unroll
      for (std::uint32_t i = 0; i < kVectors; ++i) {
        if (kElementBytes == 4)
          Float32::unpack(raw[i], f + i * 4);
        else if (dtype == Dtype::BFloat16)
          BFloat16::unpack(raw[i], f + i * 8);
        else
          Float16::unpack(raw[i], f + i * 8);
      }
    }

   private:
    static constexpr std::uint32_t kFloat = 0x7fffffffu, kHalves = 0x7fff7fffu;
    __device__ static std::uint32_t of_block(std::uint32_t most) {
#pragma unroll
      for (std::uint32_t i = 1; i < kBlockLanes; i *= 2) most = max(most, __shfl_xor_sync(~0u, most, i));
      return most;
    }
  };

  __device__ static void quantise_tile(const Common& k, const char* from, std::uint32_t elements, char* codes, char* scales) {
    const std::uint32_t lane = threadIdx.x % 32, mine = lane % kBlockLanes;
    Loaded loaded[kPasses];
    std::uint32_t largest[kPasses], of_mine = 0;
#pragma unroll
    for (std::uint32_t p = 0; p < kPasses; ++p) loaded[p].load(from, p, elements);
#pragma unroll
    for (std::uint32_t p = 0; p < kPasses; ++p) {
      largest[p] = loaded[p].largest(k.c.dtype);
      if (p == mine) of_mine = largest[p];
    }
    const BlockScale s = block_scale(k.c.wire, float_of(of_mine));
    if (mine < kPasses && mine * kPassElements < elements)
      *reinterpret_cast<std::uint32_t*>(scales + 16 * mine + 4 * (lane / kBlockLanes)) = bits_of(s.scale);
#pragma unroll
    for (std::uint32_t p = 0; p < kPasses; ++p) {
      const float multiplier = __shfl_sync(~0u, s.multiplier, static_cast<int>(lane - mine + p));
      float f[16];
      loaded[p].unpack(k.c.dtype, f);
      uint4 v = make_uint4(four_e4m3(f, multiplier), four_e4m3(f + 4, multiplier), four_e4m3(f + 8, multiplier), four_e4m3(f + 12, multiplier));
      if (largest[p] >= 0x7f800000u) v = make_uint4(0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu);  // NaN, whatever its sign was
      if (p * kPassElements + lane * 16 < elements) store16(codes + p * kPassElements + lane * 16, v);
    }
  }

  __device__ static void quantise_passes(const Common& k, const char* from, std::uint32_t elements, char* codes, char* scales) {
    const std::uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
    for (std::uint32_t pass = 0; pass * kPassElements < elements; ++pass) {
      Loaded loaded;
      loaded.load(from, pass, elements);
      Payload<Quantised<kElementBytes>> payload;
#pragma unroll
      for (std::uint32_t i = 0; i < kVectors; ++i) payload.raw[i] = loaded.raw[i];
      payload.prepare(k);
      if (pass * kPassElements + lane * 16 < elements) store16(codes + pass * kPassElements + lane * 16, payload.row.codes);
      if (lane == 0) store16(scales + 16 * pass, payload.row.scales);
    }
  }
};

}  // namespace pplx::cuda
