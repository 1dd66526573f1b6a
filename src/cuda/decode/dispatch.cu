// dispatch().
#include "dispatch_kernel.cuh"

namespace pplx::cuda {
namespace decode {
namespace {

template <typename Mode, bool kPlain, bool kHooks>
__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch(const __grid_constant__ DispatchArguments a) {
  run_dispatch<Mode, kPlain, kHooks>(a);
}

}  // namespace
}  // namespace decode

namespace {

template <bool kPlain>
Kernel kernel_of(const Config& c, bool given_scales) {
  if (given_scales || c.wire == Wire::Native) return decode::dispatch<AsIs, kPlain, false>;
  return c.dtype == Dtype::Float32 ? decode::dispatch<Quantised<4>, kPlain, false> : decode::dispatch<Quantised<2>, kPlain, false>;
}

Kernel kernel_of(const DispatchArguments& a) {
  return is_plain(a) ? kernel_of<true>(a.common.c, a.scales != nullptr) : kernel_of<false>(a.common.c, a.scales != nullptr);
}

}  // namespace

cudaError_t load_dispatch(const Config& c) {
  for (const bool given : {false, true})
    for (const Kernel kernel : {kernel_of<false>(c, given), kernel_of<true>(c, given)}) {
      const cudaError_t error = load(kernel, shared_bytes(c));
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

cudaError_t launch_dispatch(const DispatchArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<DispatchArguments*>(&arguments)};
  return cudaLaunchKernel(kernel_of(arguments), dim3(blocks), dim3(kDispatchThreads), parameters, shared_bytes(arguments.common.c), stream);
}

}  // namespace pplx::cuda
