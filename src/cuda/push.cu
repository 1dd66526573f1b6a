// The floor: bare stores of a step's bytes into the peers' memory, peers from rank + 1 on. It overwrites blocks, so an AllToAll
// that has pushed can do nothing else.
#include "kernels.h"
#include "rows.cuh"

namespace pplx::cuda {
namespace {

__global__ void __launch_bounds__(1024) push_kernel(const __grid_constant__ PushArguments a) {
  const Common& k = a.common;
  // Combine's blocks are large enough for either.
  const std::uint64_t slot =
      k.heap.slots[static_cast<int>(Op::Combine)] + k.c.rank * k.heap.slot_bytes[static_cast<int>(Op::Combine)];
  const char* from = k.peers[k.c.rank] + slot;
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x * 16;
  const std::uint64_t first = (std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 16;
  // All peers in one loop: stores to each are under way at once.
  std::uint64_t most = 0;
  for (std::uint32_t i = 0; i < k.c.world; ++i) most = a.bytes[i] > most ? a.bytes[i] : most;
  for (std::uint64_t at = first; at < most; at += stride) {
    const uint4 v = load_arrived(from + at);
    for (std::uint32_t i = 1; i < k.c.world; ++i) {
      const std::uint32_t peer = (k.c.rank + i) % k.c.world;
      if (at < a.bytes[peer]) store16(k.peers[peer] + slot + at, v);
    }
  }
}

}  // namespace

cudaError_t launch_push(const PushArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<PushArguments*>(&arguments)};
  return cudaLaunchKernel(push_kernel, dim3(blocks), dim3(1024), parameters, 0, stream);
}

}  // namespace pplx::cuda
