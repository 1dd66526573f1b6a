// Thread blocks that hold multiprocessors, so that other kernels must do with the rest, in tests. They end by themselves, because a
// thread that waits behind them, in the driver too, cannot release them.
#include "cuda/common/ptx.cuh"
#include "kernels.h"

namespace pplx::cuda {
namespace {

__global__ void hold_kernel(volatile std::uint64_t* words, std::uint64_t limit) {
  if (threadIdx.x != 0) return;
  const std::uint64_t begun = nanoseconds();
  words[1 + blockIdx.x] = 1;
  while (words[0] == 0 && nanoseconds() - begun < limit) __nanosleep(1000);
}

}  // namespace

// All the shared memory that a thread block can have, so that no other fits beside it.
cudaError_t launch_hold(std::uint64_t* words, std::uint32_t blocks, std::uint64_t limit_ns, cudaStream_t stream) {
  int device = 0, bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  void* parameters[] = {&words, &limit_ns};
  return cudaLaunchKernel(hold_kernel, dim3(blocks), dim3(32), parameters, static_cast<std::size_t>(bytes), stream);
}

}  // namespace pplx::cuda
