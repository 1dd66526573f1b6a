// The launches. Errors of the runtime come back as they are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/common/arguments.h"

namespace pplx::cuda {

// The floors: a step's reads and stores, whose addresses are known beforehand, with one block on a multiprocessor. A unit
// is a part of a row, for a warp: one address, and `n` others, of rows. A spread reads the one and stores it to the others; a
// gather adds up the others in fp32 and stores the sum to the one.
struct alignas(16) CompositeUnit {
  std::uint64_t one = 0;
  std::uint16_t part = 0;
  std::uint8_t n = 0, kind = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(CompositeUnit) == 16, "bench/gpu/composite.py writes them");
inline constexpr std::uint32_t kMostCompositePart = 8192, kMostCompositeOthers = 32;
struct CompositeRow {
  std::uint32_t bytes = 0, part_bytes = 0;  // that are stored; multiples of 16, of 128
  std::uint32_t source_bytes = 0;  // bytes of a spread's row where it is read: at most `fold` times `bytes`
};
struct CompositeArguments {
  const CompositeUnit* units = nullptr;
  std::uint64_t count = 0;
  const std::uint64_t* others = nullptr;  // [count, most]
  std::uint32_t most = 0;
  CompositeRow rows[2];  // indexed by kind
};
// fold: how many bytes of a row of kind 0 become one, 1, 2 or 4.
cudaError_t launch_spread(const CompositeArguments& arguments, std::uint32_t fold, std::uint32_t blocks, cudaStream_t stream);
cudaError_t launch_gather(const CompositeArguments& arguments, Dtype dtype, std::uint32_t blocks, cudaStream_t stream);
// A spread, with fold 1, by bulk copies through shared memory.
cudaError_t launch_bulk(const CompositeArguments& arguments, std::uint32_t blocks, cudaStream_t stream);

// Holds that many multiprocessors until words[0] is not zero, or for that long. The words after it say which are held. In pinned
// memory.
cudaError_t launch_hold(std::uint64_t* words, std::uint32_t blocks, std::uint64_t limit_ns, cudaStream_t stream);

}  // namespace pplx::cuda
