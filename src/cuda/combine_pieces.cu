// combine() of few tokens, in an AllToAll in pieces; and release().
#include "combine_kernel.cuh"

namespace pplx::cuda {
namespace {

template <typename T, bool kPlain, int kSent>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocksPerSm) combine_pieces_kernel(const __grid_constant__ CombineArguments a) {
  run_combine<T, kPlain, kSent, true>(a);
}

template <bool kPlain, int kSent>
Kernel kernel_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::BFloat16:
      return combine_pieces_kernel<BFloat16, kPlain, kSent>;
    case Dtype::Float16:
      return combine_pieces_kernel<Float16, kPlain, kSent>;
    case Dtype::Float32:
      return combine_pieces_kernel<Float32, kPlain, kSent>;
  }
  return nullptr;
}

Kernel kernel_of(const CombineArguments& a) {
  const Dtype dtype = a.common.c.dtype;
  if (!is_plain(a)) return kernel_of<false, kSentVectors>(dtype);
  return a.sent.vectors == kSentVectors ? kernel_of<true, kSentVectors>(dtype) : kernel_of<true, kSentVectorsOfFew>(dtype);
}

}  // namespace

cudaError_t load_combine_pieces(const Config& c) {
  cudaFuncAttributes attributes;
  for (const Kernel kernel :
       {kernel_of<false, kSentVectors>(c.dtype), kernel_of<true, kSentVectors>(c.dtype), kernel_of<true, kSentVectorsOfFew>(c.dtype)}) {
    const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_combine_pieces(const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<CombineArguments*>(&arguments)};
  return cudaLaunchKernel(kernel_of(arguments), dim3(blocks), dim3(kCombineThreads), parameters, 0, stream);
}

}  // namespace pplx::cuda
