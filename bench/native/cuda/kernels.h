// The launches. Errors of the runtime come back as they are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/arguments.h"

namespace pplx::cuda {

// Bare stores of bytes[peer] bytes to the area that each peer has for this rank, and nothing else.
struct PushArguments {
  std::uint32_t rank = 0, world = 0;
  std::uint64_t area_bytes = 0;   // room for one rank at a peer
  char* memory[kMaxPeers] = {};   // by rank, as this GPU knows it: an area for each rank that pushes
  std::uint64_t bytes[kMaxPeers] = {};   // multiples of 16
};
cudaError_t launch_push(const PushArguments& arguments, std::uint32_t blocks, cudaStream_t stream);

// Holds that many multiprocessors until words[0] is not zero, or for that long. The words after it say which are held. In pinned memory.
cudaError_t launch_hold(std::uint64_t* words, std::uint32_t blocks, std::uint64_t limit_ns, cudaStream_t stream);

}  // namespace pplx::cuda
