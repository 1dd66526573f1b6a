// The launches. Errors of the runtime come back as they are.
#pragma once

#include <cuda_runtime_api.h>

#include "arguments.h"

namespace pplx::cuda {

// Thread blocks of each kernel that fit one multiprocessor together. Two of dispatch would leave each thread 64 registers, and it
// spills: 0.5 us more at 1 token, 3 at 512.
inline constexpr std::uint32_t kDispatchBlocksPerSm = 1, kCombineBlocksPerSm = 1;

cudaError_t load_kernels(const Config& config);   // all that this AllToAll may launch, so that no later call loads a module
cudaError_t launch_dispatch(const DispatchArguments& arguments, std::uint32_t blocks, cudaStream_t stream);
cudaError_t launch_combine(const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream);

// The floor: `bytes` of this rank's memory to every peer's, and nothing else.
struct PushArguments {
  Common common;
  std::uint64_t bytes[kMaxPeers] = {};
};
cudaError_t launch_push(const PushArguments& arguments, std::uint32_t blocks, cudaStream_t stream);

// For tests: holds as many multiprocessors until words[0] is not zero, or for so long. Those held say so in the words after it. In
// pinned memory.
cudaError_t launch_hold(std::uint64_t* words, std::uint32_t blocks, std::uint64_t limit_ns, cudaStream_t stream);

}  // namespace pplx::cuda
