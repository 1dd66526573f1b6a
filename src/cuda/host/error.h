#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "../../host/failure.h"

namespace pplx::cuda {

// A refusal of CUDA's; Python sees pplx_comm.Error.
struct CudaError : Misuse {
  using Misuse::Misuse;
};

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw CudaError(std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

}  // namespace pplx::cuda
