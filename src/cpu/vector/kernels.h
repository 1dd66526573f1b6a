// The inner loops of the CPU device. kernels.cpp is compiled once per instruction set; kernels() picks the best at run time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../../protocol/wire.h"

namespace pplx::cpu {

struct Kernels {
  const char* isa;

  // Plain copy; both sides 8-byte aligned or better run fast.
  void (*copy)(void* to, const void* from, std::size_t bytes);

  // A copy past the caches, for data larger than they are. Its stores are weakly ordered: call streamed() before telling a reader.
  void (*stream)(void* to, const void* from, std::size_t bytes);

  // One row to e4m3 codes and the scales of the wire; not for Native.
  void (*quantise)(Wire wire, Dtype dtype, const void* x, std::uint32_t hidden, std::uint8_t* codes, void* scales);

  // A row of codes, with a float scale per 128 of them, to one of the dtype.
  void (*decode)(Dtype dtype, void* to, const std::uint8_t* codes, const float* scales, std::uint32_t hidden);

  // to = round(from + sum of weight[i] * row[i]), fp32, in order; `weights` null means plain sums, `from` null means zero.
  // Rows may lie anywhere. The caller prefetches their first kAhead bytes while it adds up others.
  // `ends`: rows come node by node, and a bit each tells which are the last of theirs: round(sum of a node's rows) takes the rows'
  // place. 0: each row counts by itself. Weights are not for nodes.
  void (*add_rows)(Dtype dtype, void* to, const void* from, const void* const* rows, const float* weights, std::uint32_t ends,
                   std::uint32_t n, std::uint32_t hidden);
};

// Call it after stream(), before the store that tells others.
inline void streamed() { std::atomic_thread_fence(std::memory_order_seq_cst); }

// How far ahead a kernel prefetches. The processor's own prefetching ends with each page, and a row is a few pages.
constexpr std::size_t kAhead = 2048;

inline void ask_for(const void* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at);
}
// Prefetches the beginning of a row for add_rows, which prefetches the rest.
inline void ask_for_start(const void* row, std::size_t bytes) { ask_for(row, std::min(kAhead, bytes)); }

const Kernels& kernels();                       // the best that this processor runs
const Kernels* kernels_named(const char* isa);  // "baseline", "avx2", "avx512": null where it does not run; for tests

}  // namespace pplx::cpu
