#pragma once

#include "ptx.cuh"

namespace pplx::cuda {

// Shared memory that one warp writes, once in a launch, for any warps to read.
struct Gate {
  std::uint64_t barrier;
  // By one thread, before the block meets for the first time.
  __device__ void close() { gate_close(&barrier); }
  // By all lanes of the warp that has written.
  __device__ void open() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) gate_open(&barrier);
  }
  __device__ void wait() { gate_wait(&barrier); }
  __device__ bool is_open() { return gate_is_open(&barrier); }
};

}  // namespace pplx::cuda
