#include "launch_table.h"

namespace pplx::cuda {
namespace {

template <typename Arguments>
cudaError_t load(const Choice<Arguments>& choice) {
  const void* const function = reinterpret_cast<const void*>(choice.kernel);
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, function);
  if (error != cudaSuccess || choice.smem == 0) return error;
  return cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(choice.smem));
}

}  // namespace

cudaError_t load_dispatches(const Config& c, bool large, bool general) {
  cudaError_t error = cudaSuccess;
  for (std::uint32_t bits = 0; bits < 4 && error == cudaSuccess; ++bits) {
    DispatchCall call;
    call.large = large;
    call.general = general;
    call.mapped_only = (bits & 1) != 0;
    call.given_scales = (bits & 2) != 0;
    error = load(choose(c, call));
  }
  return error;
}

cudaError_t load_combines(const Config& c, bool large) {
  cudaError_t error = cudaSuccess;
  for (std::uint32_t bits = 0; bits < 4 && error == cudaSuccess; ++bits) {
    CombineCall call;
    call.large = large;
    call.mapped_only = (bits & 1) != 0;
    call.few = (bits & 2) != 0;
    error = load(choose(c, call));
  }
  return error;
}

template <typename Arguments>
cudaError_t launch(const Choice<Arguments>& choice, const Arguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<Arguments*>(&arguments)};
  return cudaLaunchKernel(choice.kernel, dim3(blocks), dim3(choice.block), parameters, choice.smem, stream);
}
template cudaError_t launch(const Choice<DispatchArguments>&, const DispatchArguments&, std::uint32_t, cudaStream_t);
template cudaError_t launch(const Choice<CombineArguments>&, const CombineArguments&, std::uint32_t, cudaStream_t);

}  // namespace pplx::cuda
