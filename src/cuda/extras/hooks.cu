// Small launches of hooks: the words of a step before it begins, and a wait for the rows of some experts.
#include "../../protocol/hooks.h"
#include "../common/wait.cuh"
#include "../host/launch_table.h"

namespace pplx::cuda {
namespace {

inline constexpr std::uint32_t kClearThreads = 256;

__global__ void __launch_bounds__(kClearThreads) clear_hooks_kernel(std::uint32_t* words, std::uint32_t count) {
  const std::uint32_t at = blockIdx.x * kClearThreads + threadIdx.x;
  if (at < count) words[at] = 0;
}

// Until the word is raised. False: something failed.
__device__ inline bool await_raised(const AwaitedExperts& a, const std::uint32_t* word) {
  const auto came = [&] { return is_raised(load_acquire_here(word)); };
  return keep_looking(a.common, word, Phase::DispatchRecv, *a.step, a.common.c.rank, [] { return 0; }, came);
}

// One warp: whatever is launched behind it has these experts' rows. Its registers are few, so it finds room beside any other kernel.
__global__ void __launch_bounds__(32) await_experts_kernel(const __grid_constant__ AwaitedExperts a) {
  const Config& c = a.common.c;
  const bool planned = await_raised(a, a.hooks.planned);
  if (!all_of_warp(planned)) return;
  std::uint32_t begin = a.first, end = a.first + a.count;
  if (c.layout != LayoutKind::Padded) {
    begin = static_cast<std::uint32_t>(__ldcg(a.offsets + a.first)) / kHookRows;
    const std::uint32_t last = a.first + a.count - 1;
    end = ceil_div(min(static_cast<std::uint32_t>(__ldcg(a.offsets + last) + __ldcg(a.counts + last)), c.max_rows), kHookRows);
  }
  end = min(end, a.hooks.words);  // a failed dispatch leaves anything there
  for (std::uint32_t word = begin + threadIdx.x; word < end; word += 32)
    if (!await_raised(a, a.hooks.arrived + word)) return;
}

}  // namespace

cudaError_t load_hooks() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(clear_hooks_kernel));
  return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(await_experts_kernel));
}

cudaError_t launch_clear_hooks(std::uint32_t* words, std::uint32_t count, cudaStream_t stream) {
  void* parameters[] = {&words, &count};
  return cudaLaunchKernel(clear_hooks_kernel, dim3(ceil_div(count, kClearThreads)), dim3(kClearThreads), parameters, 0, stream);
}

cudaError_t launch_await_experts(const AwaitedExperts& awaited, cudaStream_t stream) {
  void* parameters[] = {const_cast<AwaitedExperts*>(&awaited)};
  return cudaLaunchKernel(await_experts_kernel, dim3(1), dim3(32), parameters, 0, stream);
}

}  // namespace pplx::cuda
