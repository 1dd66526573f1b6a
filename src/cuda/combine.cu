// combine(): one launch, or one per half; release() is a combine without rows.
#include "closed.cuh"
#include "combine_recv.cuh"
#include "kernels.h"

namespace pplx::cuda {
namespace {

template <typename T, bool kTail>
__global__ void __launch_bounds__(kThreads, kCombineBlocksPerSm) combine_kernel(const __grid_constant__ CombineArguments a) {
  const std::uint64_t begun = a.common.stamps != nullptr ? nanoseconds() : 0;
  note(a.common, Stage::CombineBegins);
  const std::uint64_t closed = load_closed(a.common);
  const bool failed = load_relaxed(&a.common.control->failure) != 0;
  const std::uint32_t step = *a.received.step;
  // Some rows may have no place. All threads or none: what fails meanwhile must not part those that meet at barriers.
  const bool refused = is_not_open(a.common, step, closed);
  if (__syncthreads_or(failed || refused)) {
    if (refused) refuse(a.common, step, closed, a.send ? Phase::CombineSend : Phase::CombineRecv);
    return;
  }
  if (a.recv) begin_to_close(a.common, step);
  const std::uint32_t entry = a.recv ? load_token_row(a, first_receive_unit()) : kNone;
  if (a.send) send_combine<T, kTail>(a, step);
  if (a.recv) {
    receive_combine<T, kTail>(a, step, entry);
    close_set(a.common, step);
  }
  note(a.common, Stage::CombineEnds);
  stamp(a.common, Op::Combine, step, begun);
}

using Kernel = void (*)(CombineArguments);

template <bool kTail>
Kernel kernel_of(const Config& c) {
  switch (c.dtype) {
    case Dtype::BFloat16:
      return combine_kernel<BFloat16, kTail>;
    case Dtype::Float16:
      return combine_kernel<Float16, kTail>;
    case Dtype::Float32:
      return combine_kernel<Float32, kTail>;
  }
  return nullptr;
}

}  // namespace

cudaError_t load_dispatch(const Config& c);

cudaError_t load_kernels(const Config& c) {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel_of<false>(c));
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel_of<true>(c));
  return error == cudaSuccess ? load_dispatch(c) : error;
}

cudaError_t launch_combine(const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<CombineArguments*>(&arguments)};
  const Kernel kernel = arguments.has_tail ? kernel_of<true>(arguments.common.c) : kernel_of<false>(arguments.common.c);
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(kThreads), parameters, 0, stream);
}

}  // namespace pplx::cuda
