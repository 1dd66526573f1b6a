// dispatch() that tells the caller's kernels what has come: hooks.cuh.
#include "dispatch_kernel.cuh"

namespace pplx::cuda {
namespace {

template <typename Mode, bool kPlain>
__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch_hooks_kernel(const __grid_constant__ DispatchArguments a) {
  run_dispatch<Mode, kPlain, true>(a);
}

template <bool kPlain>
Kernel kernel_of(const Config& c, bool given_scales) {
  if (given_scales || c.wire == Wire::Native) return dispatch_hooks_kernel<AsIs, kPlain>;
  return c.dtype == Dtype::Float32 ? dispatch_hooks_kernel<Quantised<4>, kPlain> : dispatch_hooks_kernel<Quantised<2>, kPlain>;
}

Kernel kernel_of(const DispatchArguments& a) {
  return is_plain(a) ? kernel_of<true>(a.common.c, a.scales != nullptr) : kernel_of<false>(a.common.c, a.scales != nullptr);
}

}  // namespace

cudaError_t load_dispatch_hooks(const Config& c) {
  for (const bool given : {false, true})
    for (const Kernel kernel : {kernel_of<false>(c, given), kernel_of<true>(c, given)}) {
      const cudaError_t error = load(kernel, shared_bytes(c));
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

cudaError_t launch_dispatch_hooks(const DispatchArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<DispatchArguments*>(&arguments)};
  return cudaLaunchKernel(kernel_of(arguments), dim3(blocks), dim3(kDispatchThreads), parameters, shared_bytes(arguments.common.c), stream);
}

}  // namespace pplx::cuda
