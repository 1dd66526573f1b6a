#pragma once

#include "ptx.cuh"

namespace pplx::cuda {

// Shared memory that one warp writes, once in a launch, for any warps to read.
struct Once {
  std::uint64_t barrier;
  // By one thread, before the block meets for the first time.
  __device__ void init() { once_init(&barrier); }
  // By all lanes of the warp that has written.
  __device__ void set() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) once_set(&barrier);
  }
  __device__ void wait() { once_wait(&barrier); }
  __device__ bool is_set() { return once_is_set(&barrier); }
};

}  // namespace pplx::cuda
