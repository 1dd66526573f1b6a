// combine(ready=), which waits for the rows that it reads: ready.cuh.
#include "combine_kernel.cuh"

namespace pplx::cuda {
namespace {

template <typename T>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocksPerSm) combine_ready_kernel(const __grid_constant__ CombineArguments a) {
  run_combine<T, false, kSentVectors, true>(a);
}

Kernel kernel_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::BFloat16:
      return combine_ready_kernel<BFloat16>;
    case Dtype::Float16:
      return combine_ready_kernel<Float16>;
    case Dtype::Float32:
      return combine_ready_kernel<Float32>;
  }
  return nullptr;
}

}  // namespace

cudaError_t load_combine_ready(const Config& c) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel_of(c.dtype)));
}

cudaError_t launch_combine_ready(const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<CombineArguments*>(&arguments)};
  return cudaLaunchKernel(kernel_of(arguments.common.c.dtype), dim3(blocks), dim3(kCombineThreads), parameters, 0, stream);
}

}  // namespace pplx::cuda
