// The floor inside a node: bare stores of a step's bytes into the peers' memory, peers from rank + 1 on.
#include "cuda/common/rows.cuh"
#include "kernels.h"

namespace pplx::cuda {
namespace {

__global__ void __launch_bounds__(1024) push_kernel(const __grid_constant__ PushArguments a) {
  const std::uint64_t area = a.rank * a.area_bytes;
  const char* from = a.memory[a.rank] + area;
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x * 16;
  const std::uint64_t first = (std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 16;
  // All peers in one loop: stores to each are under way at once.
  std::uint64_t most = 0;
  for (std::uint32_t i = 0; i < a.world; ++i) most = a.bytes[i] > most ? a.bytes[i] : most;
  for (std::uint64_t at = first; at < most; at += stride) {
    const uint4 v = load_arrived(from + at);
    for (std::uint32_t i = 1; i < a.world; ++i) {
      const std::uint32_t peer = (a.rank + i) % a.world;
      if (at < a.bytes[peer]) store16(a.memory[peer] + area + at, v);
    }
  }
}

}  // namespace

cudaError_t launch_push(const PushArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<PushArguments*>(&arguments)};
  return cudaLaunchKernel(push_kernel, dim3(blocks), dim3(1024), parameters, 0, stream);
}

}  // namespace pplx::cuda
