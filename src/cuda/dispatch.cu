// dispatch(): one launch, or one per half.
#include "dispatch_recv.cuh"
#include "dispatch_send.cuh"
#include "kernels.h"

namespace pplx::cuda {
namespace {

template <typename Mode>
__global__ void __launch_bounds__(kThreads, kDispatchBlocksPerSm) dispatch_kernel(const __grid_constant__ DispatchArguments a) {
  PPLX_LAUNCHED_SHARED(words);   // the send half's counts by expert, then the receive half's places
  PPLX_SHARED(SendShared, s);
  const std::uint64_t begun = a.common.stamps != nullptr ? nanoseconds() : 0;
  note(a.common, Stage::DispatchBegins);
  std::uint32_t step = 0;
  if (!a.send) {
    const std::uint64_t closed = load_closed(a.common);
    step = *a.received.step;
    const bool refused = is_not_open(a.common, step, closed);
    if (__syncthreads_or(refused)) {
      if (refused) refuse(a.common, step, closed, Phase::DispatchRecv);
      nothing_received(a);
      return;
    }
  } else {
    step = is_publisher() ? publish_dispatch(a, s) : send_dispatch<Mode>(a, s, words);
  }
  if (a.recv) receive_dispatch<Mode::kWire>(a, step, words);
  note(a.common, Stage::DispatchEnds);
  stamp(a.common, Op::Dispatch, step, begun);
}

std::uint32_t shared_bytes(const Config& c) {
  const std::uint32_t received = (c.world + 1) * local_experts(c, c.rank);
  return 4 * (c.num_experts > received ? c.num_experts : received);
}

using Kernel = void (*)(DispatchArguments);

template <Wire wire>
Kernel quantising(Dtype dtype) {
  switch (dtype) {
    case Dtype::BFloat16:
      return dispatch_kernel<Quantised<BFloat16, wire>>;
    case Dtype::Float16:
      return dispatch_kernel<Quantised<Float16, wire>>;
    case Dtype::Float32:
      return dispatch_kernel<Quantised<Float32, wire>>;
  }
  return nullptr;
}

Kernel kernel_of(const Config& c, bool given_scales) {
  switch (c.wire) {
    case Wire::Native:
      return dispatch_kernel<AsIs<Wire::Native>>;
    case Wire::FP8:
      return given_scales ? dispatch_kernel<AsIs<Wire::FP8>> : quantising<Wire::FP8>(c.dtype);
    case Wire::FP8_UE8M0:
      return given_scales ? dispatch_kernel<AsIs<Wire::FP8_UE8M0>> : quantising<Wire::FP8_UE8M0>(c.dtype);
    case Wire::MXFP8:
      return given_scales ? dispatch_kernel<AsIs<Wire::MXFP8>> : quantising<Wire::MXFP8>(c.dtype);
  }
  return nullptr;
}

}  // namespace

cudaError_t load_dispatch(const Config& c) {
  for (const bool given : {false, true}) {
    const void* kernel = reinterpret_cast<const void*>(kernel_of(c, given));
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaSuccess)
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes(c)));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_dispatch(const DispatchArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  const Config& c = arguments.common.c;
  void* parameters[] = {const_cast<DispatchArguments*>(&arguments)};
  return cudaLaunchKernel(kernel_of(c, arguments.scales != nullptr), dim3(blocks), dim3(kThreads), parameters, shared_bytes(c), stream);
}

}  // namespace pplx::cuda
