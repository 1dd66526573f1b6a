// The launches. Errors of the runtime come back as they are.
#pragma once

#include <cuda_runtime_api.h>

#include "arguments.h"

namespace pplx::cuda {

cudaError_t load_kernels(const Config& config);   // all that this AllToAll may launch, so that no later call loads a module
cudaError_t launch_dispatch(const DispatchArguments& arguments, std::uint32_t blocks, cudaStream_t stream);
cudaError_t launch_combine(const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream);

}  // namespace pplx::cuda
