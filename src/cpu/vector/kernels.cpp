// Compiled once per instruction set, with PPLX_ISA naming it. Plain loops: the compiler vectorises them.
// Multiply and add stay two roundings (-ffp-contract=off), so that every instruction set gives the same bits.
#include "kernels.h"

#include <algorithm>
#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#define PPLX_TEXT_(x) #x
#define PPLX_TEXT(x) PPLX_TEXT_(x)

namespace pplx::cpu::PPLX_ISA {
namespace {

// memcpy uses `rep movsb` at these sizes, which falls to a tenth of its speed where source and destination lie a little
// apart modulo 4096; rows do.
#if defined(__AVX512F__)
using Chunk = __m512i;
inline Chunk load(const char* p) { return _mm512_loadu_si512(p); }
inline void store(char* p, Chunk c) { _mm512_storeu_si512(p, c); }
inline void store_past(char* p, Chunk c) { _mm512_stream_si512(reinterpret_cast<Chunk*>(p), c); }
#elif defined(__AVX__)
using Chunk = __m256i;
inline Chunk load(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const Chunk*>(p)); }
inline void store(char* p, Chunk c) { _mm256_storeu_si256(reinterpret_cast<Chunk*>(p), c); }
inline void store_past(char* p, Chunk c) { _mm256_stream_si256(reinterpret_cast<Chunk*>(p), c); }
#elif defined(__SSE2__)
using Chunk = __m128i;
inline Chunk load(const char* p) { return _mm_loadu_si128(reinterpret_cast<const Chunk*>(p)); }
inline void store(char* p, Chunk c) { _mm_storeu_si128(reinterpret_cast<Chunk*>(p), c); }
inline void store_past(char* p, Chunk c) { _mm_stream_si128(reinterpret_cast<Chunk*>(p), c); }
#else
struct Chunk { char bytes[16]; };
inline Chunk load(const char* p) { Chunk c; std::memcpy(&c, p, sizeof c); return c; }
inline void store(char* p, Chunk c) { std::memcpy(p, &c, sizeof c); }
inline void store_past(char* p, Chunk c) { store(p, c); }
#endif

constexpr std::size_t kChunk = sizeof(Chunk);

void copy(void* to, const void* from, std::size_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  if (bytes < kChunk) {
    std::memcpy(out, in, bytes);
    return;
  }
  std::size_t at = 0;
  for (; at + 4 * kChunk <= bytes; at += 4 * kChunk) {
    const Chunk a = load(in + at), b = load(in + at + kChunk), c = load(in + at + 2 * kChunk), d = load(in + at + 3 * kChunk);
    store(out + at, a);
    store(out + at + kChunk, b);
    store(out + at + 2 * kChunk, c);
    store(out + at + 3 * kChunk, d);
  }
  for (; at + kChunk <= bytes; at += kChunk) store(out + at, load(in + at));
  if (at < bytes) store(out + bytes - kChunk, load(in + bytes - kChunk));
}

void stream(void* to, const void* from, std::size_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const std::size_t head = std::min(bytes, (kChunk - reinterpret_cast<std::uintptr_t>(out) % kChunk) % kChunk);
  std::memcpy(out, in, head);
  std::size_t at = head;
  for (; at + 4 * kChunk <= bytes; at += 4 * kChunk) {
    const Chunk a = load(in + at), b = load(in + at + kChunk), c = load(in + at + 2 * kChunk), d = load(in + at + 3 * kChunk);
    store_past(out + at, a);
    store_past(out + at + kChunk, b);
    store_past(out + at + 2 * kChunk, c);
    store_past(out + at + 3 * kChunk, d);
  }
  for (; at + kChunk <= bytes; at += kChunk) store_past(out + at, load(in + at));
  std::memcpy(out + at, in + at, bytes - at);
#ifdef __SSE2__
  _mm_sfence();   // streamed stores are weakly ordered: they must be out before any release store that follows
#endif
}

struct BFloat16 {
  using Stored = std::uint16_t;
  static float load(Stored v) { return from_bf16(v); }
  static Stored store(float v) { return to_bf16(v); }
};
struct Float16 {
  using Stored = std::uint16_t;
  static float load(Stored v) { return from_fp16(v); }
  static Stored store(float v) { return to_fp16(v); }
};
struct Float32 {
  using Stored = float;
  static float load(Stored v) { return v; }
  static Stored store(float v) { return v; }
};

template <typename T>
void quantise_as(const typename T::Stored* x, std::uint32_t hidden, std::uint8_t* codes, float* scales) {
  for (std::uint32_t begin = 0; begin < hidden; begin += 128) {
    const std::uint32_t n = std::min(128u, hidden - begin);
    float value[128];
    std::uint32_t largest = 0;   // magnitudes compare as integers, and NaN compares largest of all
    for (std::uint32_t i = 0; i < n; ++i) {
      value[i] = T::load(x[begin + i]);
      const std::uint32_t magnitude = bits_of(value[i]) & 0x7fffffffu;
      largest = magnitude > largest ? magnitude : largest;
    }
    const BlockScale s = e4m3_scale(float_of(largest));
    scales[begin / 128] = s.scale;
    for (std::uint32_t i = 0; i < n; ++i) codes[begin + i] = to_e4m3_sat(value[i] * s.multiplier);
  }
}

void quantise(Dtype dtype, const void* x, std::uint32_t hidden, std::uint8_t* codes, float* scales) {
  switch (dtype) {
    case Dtype::BFloat16: return quantise_as<BFloat16>(static_cast<const std::uint16_t*>(x), hidden, codes, scales);
    case Dtype::Float16: return quantise_as<Float16>(static_cast<const std::uint16_t*>(x), hidden, codes, scales);
    case Dtype::Float32: return quantise_as<Float32>(static_cast<const float*>(x), hidden, codes, scales);
  }
}

template <typename T, bool weighted>
inline void add_row(float* __restrict sum, const typename T::Stored* __restrict row, float weight, std::uint32_t n) {
  for (std::uint32_t i = 0; i < n; ++i) {
    const float v = T::load(row[i]);
    sum[i] = sum[i] + (weighted ? weight * v : v);
  }
}

template <typename T, bool weighted>
void add_rows_as(void* to, const void* from, const void* const* rows, const float* weights, std::uint32_t n,
                 std::uint32_t hidden) {
  using Stored = typename T::Stored;
  constexpr std::uint32_t kTile = 512;   // sums stay in the first-level cache
  alignas(64) float sum[kTile];
  for (std::uint32_t begin = 0; begin < hidden; begin += kTile) {
    const std::uint32_t width = std::min(kTile, hidden - begin);
    if (from != nullptr)
      for (std::uint32_t i = 0; i < width; ++i) sum[i] = T::load(static_cast<const Stored*>(from)[begin + i]);
    else
      for (std::uint32_t i = 0; i < width; ++i) sum[i] = 0.0f;
    for (std::uint32_t r = 0; r < n; ++r)
      add_row<T, weighted>(sum, static_cast<const Stored*>(rows[r]) + begin, weighted ? weights[r] : 1.0f, width);
    Stored* __restrict out = static_cast<Stored*>(to) + begin;
    for (std::uint32_t i = 0; i < width; ++i) out[i] = T::store(sum[i]);
  }
}

template <typename T>
void add_rows_of(void* to, const void* from, const void* const* rows, const float* weights, std::uint32_t n,
                 std::uint32_t hidden) {
  if (weights != nullptr)
    add_rows_as<T, true>(to, from, rows, weights, n, hidden);
  else
    add_rows_as<T, false>(to, from, rows, weights, n, hidden);
}

void add_rows(Dtype dtype, void* to, const void* from, const void* const* rows, const float* weights, std::uint32_t n,
              std::uint32_t hidden) {
  switch (dtype) {
    case Dtype::BFloat16: return add_rows_of<BFloat16>(to, from, rows, weights, n, hidden);
    case Dtype::Float16: return add_rows_of<Float16>(to, from, rows, weights, n, hidden);
    case Dtype::Float32: return add_rows_of<Float32>(to, from, rows, weights, n, hidden);
  }
}

}  // namespace

extern const Kernels table{PPLX_TEXT(PPLX_ISA), copy, stream, quantise, add_rows};

}  // namespace pplx::cpu::PPLX_ISA
