// dispatch() of few tokens, in an AllToAll in pieces; the second kernel tells the caller's what has come: hooks.cuh.
#include "dispatch_kernel.cuh"

namespace pplx::cuda {
namespace {

template <typename Mode, bool kPlain>
__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch_pieces_kernel(const __grid_constant__ DispatchArguments a) {
  run_dispatch<Mode, kPlain, false, true>(a);
}

template <typename Mode, bool kPlain>
__global__ void __launch_bounds__(kDispatchThreads, 1) dispatch_pieces_hooks_kernel(const __grid_constant__ DispatchArguments a) {
  run_dispatch<Mode, kPlain, true, true>(a);
}

template <typename Mode>
Kernel kernel_of(bool plain, bool hooks) {
  if (hooks) return plain ? dispatch_pieces_hooks_kernel<Mode, true> : dispatch_pieces_hooks_kernel<Mode, false>;
  return plain ? dispatch_pieces_kernel<Mode, true> : dispatch_pieces_kernel<Mode, false>;
}
Kernel kernel_of(const Config& c, bool given_scales, bool plain, bool hooks) {
  if (given_scales || c.wire == Wire::Native) return kernel_of<AsIs>(plain, hooks);
  return c.dtype == Dtype::Float32 ? kernel_of<Quantised<4>>(plain, hooks) : kernel_of<Quantised<2>>(plain, hooks);
}

}  // namespace

cudaError_t load_dispatch_pieces(const Config& c, bool hooks) {
  for (const bool given : {false, true})
    for (const bool plain : {false, true}) {
      const cudaError_t error = load(kernel_of(c, given, plain, hooks), shared_bytes(c));
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

cudaError_t launch_dispatch_pieces(const DispatchArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<DispatchArguments*>(&arguments)};
  const Config& c = arguments.common.c;
  const Kernel kernel = kernel_of(c, arguments.scales != nullptr, is_plain(arguments), tells_of_rows(arguments));
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(kDispatchThreads), parameters, shared_bytes(c), stream);
}

}  // namespace pplx::cuda
