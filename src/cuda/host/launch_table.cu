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
  for (const bool given_scales : {false, true})
    for (const bool mapped_only : {false, true}) {
      const cudaError_t error = load(choose(c, DispatchCall{large, mapped_only, general, given_scales}));
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

cudaError_t load_combines(const Config& c, bool large) {
  for (const bool few : {false, true})
    for (const bool mapped_only : {false, true}) {
      const cudaError_t error = load(choose(c, CombineCall{large, mapped_only, few}));
      if (error != cudaSuccess) return error;
    }
  return cudaSuccess;
}

template <typename Arguments>
cudaError_t launch(const Choice<Arguments>& choice, const Arguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<Arguments*>(&arguments)};
  return cudaLaunchKernel(choice.kernel, dim3(blocks), dim3(choice.block), parameters, choice.smem, stream);
}
template cudaError_t launch(const Choice<DispatchArguments>&, const DispatchArguments&, std::uint32_t, cudaStream_t);
template cudaError_t launch(const Choice<CombineArguments>&, const CombineArguments&, std::uint32_t, cudaStream_t);

}  // namespace pplx::cuda
