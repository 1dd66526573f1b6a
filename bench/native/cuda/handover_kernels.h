#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/arguments.h"
#include "protocol/mailbox.h"

namespace pplx::cuda {

// words, in pinned host memory: the host's turn | the kernel's answer, the same number | the GPU's clock at that answer.
cudaError_t launch_ping(std::uint64_t* words, std::uint32_t rounds, cudaStream_t stream);

struct DeviceArguments {
  Config c;
  Heap heap;
  char* host = nullptr;
  std::uint32_t operations = 0;
  std::uint64_t* stamps = nullptr;   // [operations][2]: before the first store, after the last arrival; then one word: done
};
cudaError_t launch_device(const DeviceArguments& arguments, cudaStream_t stream);

}  // namespace pplx::cuda
