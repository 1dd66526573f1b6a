#include "cuda/common/ptx.cuh"
#include "handover_kernels.h"

namespace pplx::cuda {
namespace {

constexpr std::uint64_t kLimit = 5'000'000'000;   // ns without an answer: the host has given up

__device__ bool await_word(const void* word, std::uint64_t value) {
  const std::uint64_t begun = nanoseconds();
  for (std::uint32_t i = 1; load_acquire(word) != value; ++i)
    if (i % 4096 == 0 && nanoseconds() - begun > kLimit) return false;
  return true;
}

__global__ void ping_kernel(std::uint64_t* words, std::uint32_t rounds) {
  for (std::uint64_t i = 1; i <= rounds; ++i) {
    if (!await_word(words, i)) return;
    store_relaxed(words + 2, nanoseconds());
    store_release(words + 1, i);
  }
}

// A thread for each peer. Dispatches and combines by turns.
__global__ void device_kernel(const __grid_constant__ DeviceArguments a) {
  const std::uint32_t peer = threadIdx.x < a.c.rank ? threadIdx.x : threadIdx.x + 1;
  const bool here = peer < a.c.world;
  bool good = true;
  for (std::uint32_t i = 0; i < a.operations && __syncthreads_and(good) != 0; ++i) {
    const std::uint32_t step = a.c.first_step + i / 2, set = set_of(a.c, step);
    const Op op = i % 2 == 0 ? Op::Dispatch : Op::Combine;
    if (threadIdx.x == 0) a.stamps[2 * i] = nanoseconds();
    __syncthreads();
    if (here) {
      std::uint64_t last = 0;  // a block that is never written
      announce<Atomics>(mailbox_entry(a.heap, a.c, a.host, step, op, peer), 1, {step, 1}, last);
      good = await_word(a.host + a.heap.arrival_at(a.c, set, signal_of(op), peer), arrival_word(1, step));
    }
    __syncthreads();
    if (threadIdx.x == 0) a.stamps[2 * i + 1] = nanoseconds();
  }
  if (threadIdx.x == 0) store_release(a.stamps + 2 * a.operations, 1);
}

}  // namespace

cudaError_t launch_ping(std::uint64_t* words, std::uint32_t rounds, cudaStream_t stream) {
  void* parameters[] = {&words, &rounds};
  return cudaLaunchKernel(ping_kernel, dim3(1), dim3(1), parameters, 0, stream);
}

cudaError_t launch_device(const DeviceArguments& arguments, cudaStream_t stream) {
  void* parameters[] = {const_cast<DeviceArguments*>(&arguments)};
  return cudaLaunchKernel(device_kernel, dim3(1), dim3(kMaxPeers), parameters, 0, stream);
}

}  // namespace pplx::cuda
