// Compiled once per instruction set, with PPLX_ISA naming it.
// Multiply and add stay two roundings (-ffp-contract=off), so that every instruction set gives the same bits.
#include "kernels.h"

#include <algorithm>
#include <cstring>

#include "../../protocol/number.h"

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
    ask_for(in + at + kAhead, 4 * kChunk);
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
    ask_for(in + at + kAhead, 4 * kChunk);
    const Chunk a = load(in + at), b = load(in + at + kChunk), c = load(in + at + 2 * kChunk), d = load(in + at + 3 * kChunk);
    store_past(out + at, a);
    store_past(out + at + kChunk, b);
    store_past(out + at + 2 * kChunk, c);
    store_past(out + at + 3 * kChunk, d);
  }
  for (; at + kChunk <= bytes; at += kChunk) store_past(out + at, load(in + at));
  std::memcpy(out + at, in + at, bytes - at);
}

// Vectors as wide as the instruction set's registers, without naming any instruction.
constexpr std::uint32_t kLanes = kChunk / 4;
using Floats = float __attribute__((vector_size(kChunk)));
using Words = std::uint32_t __attribute__((vector_size(kChunk)));
using Halves = std::uint16_t __attribute__((vector_size(kChunk / 2)));
using Bytes = std::uint8_t __attribute__((vector_size(kChunk / 4)));

struct BFloat16 {
  using Stored = std::uint16_t;
  using StoredLanes = Halves;
  template <typename F, typename U>
  static F load(U v) { return from_bf16_bits<F>(v); }
  template <typename U, typename F>
  static U store(F v) { return to_bf16_bits<U>(v); }
};
struct Float16 {
  using Stored = std::uint16_t;
  using StoredLanes = Halves;
  template <typename F, typename U>
  static F load(U v) { return from_fp16_bits<F>(v); }
  template <typename U, typename F>
  static U store(F v) { return to_fp16_bits<U>(v); }
};
struct Float32 {
  using Stored = std::uint32_t;
  using StoredLanes = Words;
  template <typename F, typename U>
  static F load(U v) { return same_bits<F>(v); }
  template <typename U, typename F>
  static U store(F v) { return same_bits<U>(v); }
};

template <typename T>
inline Floats load_lanes(const typename T::Stored* from) {
  typename T::StoredLanes stored;
  std::memcpy(&stored, from, sizeof stored);
  return T::template load<Floats>(__builtin_convertvector(stored, Words));
}
template <typename T>
inline void store_lanes(typename T::Stored* to, Floats value) {
  const auto stored = __builtin_convertvector(T::template store<Words>(value), typename T::StoredLanes);
  std::memcpy(to, &stored, sizeof stored);
}
template <typename T>
inline float load_one(typename T::Stored from) { return T::template load<float>(std::uint32_t{from}); }
template <typename T>
inline typename T::Stored store_one(float value) {
  return static_cast<typename T::Stored>(T::template store<std::uint32_t>(value));
}

// The largest lane, by halves: element by element would take longer than the block's arithmetic.
template <std::size_t bytes>
struct WordVector {
  typedef std::uint32_t type __attribute__((vector_size(bytes)));   // gcc ignores the attribute in a dependent `using`
};
template <std::size_t bytes>
inline std::uint32_t largest_lane(typename WordVector<bytes>::type lanes) {
  if constexpr (bytes == 8) {
    return lanes[0] > lanes[1] ? lanes[0] : lanes[1];
  } else {
    typename WordVector<bytes / 2>::type halves[2];
    std::memcpy(halves, &lanes, bytes);
    return largest_lane<bytes / 2>(halves[0] > halves[1] ? halves[0] : halves[1]);
  }
}

// Writes the scale of a block, and returns the factor for its values.
template <Wire wire>
inline float set_scale(void* scales, std::uint32_t block, float amax) {
  if constexpr (wire == Wire::MXFP8) {
    const std::uint8_t code = e4m3_scale_e8m0(amax);
    static_cast<std::uint8_t*>(scales)[block] = code;
    return e8m0_reciprocal(code);
  } else {
    const BlockScale s = block_scale(wire, amax);
    static_cast<float*>(scales)[block] = s.scale;
    return s.multiplier;
  }
}

// The largest magnitude, as bits. Magnitudes compare as integers, and NaN compares largest of all.
template <typename T>
inline std::uint32_t largest_of(const typename T::Stored* from, std::uint32_t n) {
  const std::uint32_t whole = n / kLanes * kLanes;
  Words lanes = {};
  for (std::uint32_t i = 0; i < whole; i += kLanes) {
    const Words magnitude = same_bits<Words>(load_lanes<T>(from + i)) & 0x7fffffffu;
    lanes = magnitude > lanes ? magnitude : lanes;
  }
  std::uint32_t largest = largest_lane<kChunk>(lanes);
  for (std::uint32_t i = whole; i < n; ++i) largest = std::max(largest, bits_of(load_one<T>(from[i])) & 0x7fffffffu);
  return largest;
}

template <typename T>
inline void write_codes(const typename T::Stored* from, std::uint32_t n, float multiplier, std::uint8_t* to) {
  const std::uint32_t whole = n / kLanes * kLanes;
  for (std::uint32_t i = 0; i < whole; i += kLanes) {
    const Bytes code = __builtin_convertvector(to_e4m3_bits<Words>(load_lanes<T>(from + i) * multiplier), Bytes);
    std::memcpy(to + i, &code, sizeof code);
  }
  for (std::uint32_t i = whole; i < n; ++i) to[i] = to_e4m3_sat(load_one<T>(from[i]) * multiplier);
}

// Blocks [begin, end) of a row; inlined with their number and size known except at the row's end. All scales first: the blocks'
// reductions then overlap.
template <typename T, Wire wire, std::uint32_t kBlocks>
inline void quantise_blocks(const typename T::Stored* x, std::uint32_t begin, std::uint32_t n, std::uint8_t* codes, void* scales) {
  constexpr std::uint32_t kBlock = scale_block(wire);
  std::uint32_t largest[kBlocks];
  float multiplier[kBlocks];
  for (std::uint32_t b = 0; b < kBlocks; ++b) largest[b] = largest_of<T>(x + (begin + b) * kBlock, n);
  for (std::uint32_t b = 0; b < kBlocks; ++b) multiplier[b] = set_scale<wire>(scales, begin + b, float_of(largest[b]));
  for (std::uint32_t b = 0; b < kBlocks; ++b)
    write_codes<T>(x + (begin + b) * kBlock, n, multiplier[b], codes + (begin + b) * kBlock);
  for (std::uint32_t b = 0; b < kBlocks; ++b)   // the sign of a NaN product would be the processor's choice
    if (largest[b] >= 0x7f800000u) std::memset(codes + (begin + b) * kBlock, kE4m3NaN, n);
}

template <typename T, Wire wire>
void quantise_as(const typename T::Stored* x, std::uint32_t hidden, std::uint8_t* codes, void* scales) {
  constexpr std::uint32_t kBlock = scale_block(wire), kTogether = 128 / kBlock;
  const std::uint32_t blocks = hidden / kBlock;
  std::uint32_t b = 0;
  for (; b + kTogether <= blocks; b += kTogether) quantise_blocks<T, wire, kTogether>(x, b, kBlock, codes, scales);
  for (; b < blocks; ++b) quantise_blocks<T, wire, 1>(x, b, kBlock, codes, scales);
  if (b * kBlock < hidden) quantise_blocks<T, wire, 1>(x, b, hidden - b * kBlock, codes, scales);
}

template <typename T>
void quantise_of(Wire wire, const void* x, std::uint32_t hidden, std::uint8_t* codes, void* scales) {
  const auto* from = static_cast<const typename T::Stored*>(x);
  switch (wire) {
    case Wire::Native: return;
    case Wire::FP8: return quantise_as<T, Wire::FP8>(from, hidden, codes, scales);
    case Wire::FP8_UE8M0: return quantise_as<T, Wire::FP8_UE8M0>(from, hidden, codes, scales);
    case Wire::MXFP8: return quantise_as<T, Wire::MXFP8>(from, hidden, codes, scales);
  }
}

void quantise(Wire wire, Dtype dtype, const void* x, std::uint32_t hidden, std::uint8_t* codes, void* scales) {
  switch (dtype) {
    case Dtype::BFloat16: return quantise_of<BFloat16>(wire, x, hidden, codes, scales);
    case Dtype::Float16: return quantise_of<Float16>(wire, x, hidden, codes, scales);
    case Dtype::Float32: return quantise_of<Float32>(wire, x, hidden, codes, scales);
  }
}

template <typename T>
void decode_as(void* to, const std::uint8_t* codes, const float* scales, std::uint32_t hidden) {
  constexpr std::uint32_t kBlock = scale_block(Wire::FP8);
  auto* const out = static_cast<typename T::Stored*>(to);
  const std::uint32_t whole = hidden / kLanes * kLanes;
  for (std::uint32_t i = 0; i < whole; i += kLanes) {
    Bytes code;
    std::memcpy(&code, codes + i, sizeof code);
    store_lanes<T>(out + i, from_e4m3_bits<Floats>(__builtin_convertvector(code, Words)) * scales[i / kBlock]);
  }
  for (std::uint32_t i = whole; i < hidden; ++i) out[i] = store_one<T>(from_e4m3(codes[i]) * scales[i / kBlock]);
}

void decode(Dtype dtype, void* to, const std::uint8_t* codes, const float* scales, std::uint32_t hidden) {
  switch (dtype) {
    case Dtype::BFloat16: return decode_as<BFloat16>(to, codes, scales, hidden);
    case Dtype::Float16: return decode_as<Float16>(to, codes, scales, hidden);
    case Dtype::Float32: return decode_as<Float32>(to, codes, scales, hidden);
  }
}

// Sums stay in registers over all rows: a strip of columns at a time.
// A node's sum begins with -0, which changes no number that is added to it.
enum class Adds { Rows, Weighted, Nodes };
template <typename T, Adds adds>
void add_rows_as(void* to, const void* from, const void* const* rows, const float* weights, std::uint32_t ends, std::uint32_t n,
                 std::uint32_t hidden) {
  using Stored = typename T::Stored;
  constexpr std::uint32_t kStrip = 4;
  Stored* out = static_cast<Stored*>(to);
  const Stored* initial = static_cast<const Stored*>(from);
  std::uint32_t at = 0;
  for (; at + kStrip * kLanes <= hidden; at += kStrip * kLanes) {
    Floats sum[kStrip] = {}, of_node[kStrip];
    for (Floats& lanes : of_node) lanes = -Floats{};
    if (initial != nullptr)
      for (std::uint32_t i = 0; i < kStrip; ++i) sum[i] = load_lanes<T>(initial + at + i * kLanes);
    for (std::uint32_t r = 0; r < n; ++r) {
      const Stored* row = static_cast<const Stored*>(rows[r]) + at;
      if (at + kAhead / sizeof(Stored) < hidden) ask_for(row + kAhead / sizeof(Stored), kStrip * kLanes * sizeof(Stored));
      for (std::uint32_t i = 0; i < kStrip; ++i) {
        const Floats value = load_lanes<T>(row + i * kLanes);
        if constexpr (adds == Adds::Nodes) {
          of_node[i] = of_node[i] + value;
          if ((ends >> r & 1) == 0) continue;
          sum[i] = sum[i] + T::template load<Floats>(T::template store<Words>(of_node[i]));
          of_node[i] = -Floats{};
        } else {
          sum[i] = sum[i] + (adds == Adds::Weighted ? weights[r] * value : value);
        }
      }
    }
    for (std::uint32_t i = 0; i < kStrip; ++i) store_lanes<T>(out + at + i * kLanes, sum[i]);
  }
  for (; at < hidden; ++at) {
    float sum = initial != nullptr ? load_one<T>(initial[at]) : 0.0f, of_node = -0.0f;
    for (std::uint32_t r = 0; r < n; ++r) {
      const float value = load_one<T>(static_cast<const Stored*>(rows[r])[at]);
      if constexpr (adds == Adds::Nodes) {
        of_node = of_node + value;
        if ((ends >> r & 1) == 0) continue;
        sum = sum + load_one<T>(store_one<T>(of_node));
        of_node = -0.0f;
      } else {
        sum = sum + (adds == Adds::Weighted ? weights[r] * value : value);
      }
    }
    out[at] = store_one<T>(sum);
  }
}

template <typename T>
void add_rows_of(void* to, const void* from, const void* const* rows, const float* weights, std::uint32_t ends, std::uint32_t n,
                 std::uint32_t hidden) {
  const auto add = ends != 0            ? add_rows_as<T, Adds::Nodes>
                   : weights != nullptr ? add_rows_as<T, Adds::Weighted>
                                        : add_rows_as<T, Adds::Rows>;
  add(to, from, rows, weights, ends, n, hidden);
}

void add_rows(Dtype dtype, void* to, const void* from, const void* const* rows, const float* weights, std::uint32_t ends,
              std::uint32_t n, std::uint32_t hidden) {
  switch (dtype) {
    case Dtype::BFloat16: return add_rows_of<BFloat16>(to, from, rows, weights, ends, n, hidden);
    case Dtype::Float16: return add_rows_of<Float16>(to, from, rows, weights, ends, n, hidden);
    case Dtype::Float32: return add_rows_of<Float32>(to, from, rows, weights, ends, n, hidden);
  }
}

}  // namespace

extern const Kernels table{PPLX_TEXT(PPLX_ISA), copy, stream, quantise, decode, add_rows};

}  // namespace pplx::cpu::PPLX_ISA
