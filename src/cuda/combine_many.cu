// combine() of many tokens inside a node: one launch, or one per half.
#include "kernels.h"
#include "many_combine_kernel.cuh"

namespace pplx::cuda {
namespace {

// kReady: rows are read when the caller's kernel says that they are written.
template <typename T, bool kPlain, bool kReady>
__device__ __forceinline__ void run_combine_many(const CombineArguments& a) {
  PPLX_LAUNCHED_SHARED(words);
  PPLX_SHARED(CombineManyShared, s);
  const Common& k = a.common;
  const std::uint64_t begun = k.stamps != nullptr ? nanoseconds() : 0;
  note(k, Stage::CombineBegins);
  Spends::begin();
  const std::uint32_t warp = threadIdx.x / 32;
  const bool combines = warp < kCombiners;
  if (combines && threadIdx.x % 32 == 0)
    for (std::uint64_t& turns : s.loaded[warp]) turns_init(&turns, 1);
  std::uint32_t step = 0;
  if (!begin_combine(a, step, 0, s.combine)) return;
  if (a.recv) begin_to_close(k, step);
  if (combines) {
    ManyCombiner<T, kPlain, kReady> combiner(a, step, s.combine, reinterpret_cast<char*>(words) + warp * kCombinerBytes, s.loaded[warp]);
    const std::uint32_t senders = a.recv ? senders_of(gridDim.x, kSumTilesOut * kSumTileBytes, kSendingCombiners) : kCombiners;
    if (a.send && warp < senders) combiner.send(senders);
    if (a.recv) combiner.receive();
  } else {
    if (a.send) begin_to_send(a, step, s.combine);
    if (a.recv) receive_all_headers(a, step);
  }
  if (a.recv) close_set(k, step);
  note(k, Stage::CombineEnds);
  Spends::end(k);
  stamp(k, Op::Combine, step, begun);
}

template <typename T, bool kPlain>
__global__ void __launch_bounds__(kCombineManyThreads, 1) combine_many_kernel(const __grid_constant__ CombineArguments a) {
  run_combine_many<T, kPlain, false>(a);
}
template <typename T>
__global__ void __launch_bounds__(kCombineManyThreads, 1) combine_many_ready_kernel(const __grid_constant__ CombineArguments a) {
  run_combine_many<T, false, true>(a);
}

using Kernel = void (*)(CombineArguments);

template <typename T>
Kernel kernel_of(bool plain, bool ready) {
  if (ready) return combine_many_ready_kernel<T>;
  return plain ? combine_many_kernel<T, true> : combine_many_kernel<T, false>;
}
Kernel kernel_of(Dtype dtype, bool plain, bool ready) {
  switch (dtype) {
    case Dtype::BFloat16:
      return kernel_of<BFloat16>(plain, ready);
    case Dtype::Float16:
      return kernel_of<Float16>(plain, ready);
    case Dtype::Float32:
      return kernel_of<Float32>(plain, ready);
  }
  return nullptr;
}

}  // namespace

bool can_combine_many(const Config& c, std::uint32_t shared_bytes) {
  return (in_pieces(c) || (c.replicas == 1 && c.remote_peers == 0)) && kCombineManyBytes + sizeof(CombineManyShared) <= shared_bytes;
}

cudaError_t load_combine_many(const Config& c, bool ready) {
  for (const Kernel kernel : {kernel_of(c.dtype, false, ready), kernel_of(c.dtype, true, ready)}) {
    const void* const function = reinterpret_cast<const void*>(kernel);
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, function);
    if (error == cudaSuccess) error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kCombineManyBytes));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_combine_many(const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<CombineArguments*>(&arguments)};
  const Kernel kernel = kernel_of(arguments.common.c.dtype, is_plain(arguments), arguments.ready.words != nullptr);
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(kCombineManyThreads), parameters, kCombineManyBytes, stream);
}

}  // namespace pplx::cuda
