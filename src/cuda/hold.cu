// For tests: thread blocks that hold multiprocessors, so that what else runs has to do with the rest.
#include "kernels.h"

namespace pplx::cuda {
namespace {

__global__ void hold_kernel(volatile std::uint64_t* words) {
  if (threadIdx.x != 0) return;
  words[1 + blockIdx.x] = 1;
  while (words[0] == 0) __nanosleep(1000);
}

}  // namespace

// All the shared memory that a thread block can have: no other finds room beside it.
cudaError_t launch_hold(std::uint64_t* words, std::uint32_t blocks, cudaStream_t stream) {
  int device = 0, bytes = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const void* kernel = reinterpret_cast<const void*>(hold_kernel);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  void* parameters[] = {&words};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(32), parameters, static_cast<std::size_t>(bytes), stream);
}

}  // namespace pplx::cuda
