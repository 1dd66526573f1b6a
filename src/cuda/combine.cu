// combine(): one launch, or one per half; release() is a combine without rows.
#include "closed.cuh"
#include "combine_recv.cuh"
#include "kernels.h"

namespace pplx::cuda {
namespace {

// By the whole block: whether this launch may work on its step. What later decisions need is in shared memory then.
__device__ inline bool begin_combine(const CombineArguments& a, std::uint32_t& step, CombineShared& s) {
  const Common& k = a.common;
  const std::uint64_t closed = load_closed(k);
  const bool failed = threadIdx.x == 0 && load_relaxed(&k.control->failure) != 0;
  step = *a.received.step;
  if (threadIdx.x <= k.c.world) s.rows_begin[threadIdx.x] = a.received.rows_begin[threadIdx.x];
  if (threadIdx.x == 0) {
    s.claimed.close();
    s.sent = 0;
    s.received = kCombineWarps;  // each warp has one
  }
  // Some rows may have no place. All threads or none: what fails meanwhile must not part those that meet at barriers.
  const bool refused = is_not_open(k, step, closed);
  if (!__syncthreads_or(failed || refused)) return true;
  if (refused) refuse(k, step, closed, a.send ? Phase::CombineSend : Phase::CombineRecv);
  return false;
}

// By the last warp: whose this block's share is. The others ask when their first sums are ready.
__device__ inline void claim_own(const CombineArguments& a, std::uint32_t step, CombineShared& s) {
  if (threadIdx.x / 32 != kCombineWarps - 1) return;
  if (threadIdx.x % 32 == 0) s.mine = take_share(a.common, Op::Combine, blockIdx.x, step);
  s.claimed.open();
}

// By the whole block: whether remote peers' blocks may be written.
__device__ inline void find_what_may_be_sent(const Common& k, std::uint32_t step, CombineShared& s) {
  const std::uint32_t peer = threadIdx.x;
  const bool wanted = peer < k.c.world && is_remote(k, peer) && (k.dead >> peer & 1) == 0;
  const bool good = __syncthreads_and(!wanted || may_write(k, step, Op::Combine, peer)) != 0;
  if (threadIdx.x == 0) s.may_send = good;
  __syncthreads();
}

// kPlain: all peers are on this node, there are no replicas, no tails and no weights of combine's own. The other kernel can do all.
// kVectors: of a lane, in a strip that is sent.
template <typename T, bool kPlain, int kVectors>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocksPerSm) combine_kernel(const __grid_constant__ CombineArguments a) {
  PPLX_SHARED(CombineShared, s);
  const Common& k = a.common;
  const std::uint64_t begun = k.stamps != nullptr ? nanoseconds() : 0;
  note(k, Stage::CombineBegins);
  Places places;
  if (a.send) load_first_places<kPlain>(a, places);
  const std::uint32_t entry = a.recv ? load_token_row(a, receive_unit(first_of_warp())) : kNone;
  std::uint32_t step = 0;
  if (!begin_combine(a, step, s)) return;
  s.entries[threadIdx.x] = entry;  // registers are for the sums meanwhile
  if (a.recv) begin_to_close(k, step);
  if (a.send) {
    const CombineUnits units(a, s);
    const std::uint32_t senders = kCombineWarps - (kPlain && a.recv ? receivers_of_combine(units.all, gridDim.x) : 0);
    claim_own(a, step, s);
    if (!kPlain && k.remote != 0) find_what_may_be_sent(k, step, s);
    if (threadIdx.x / 32 < senders) send_combine<T, kPlain, kVectors>(a, step, units, senders, places, s);
  }
  if (a.recv) {
    receive_combine<T, kPlain>(a, step, s);
    close_set(k, step);
  }
  note(k, Stage::CombineEnds);
  stamp(k, Op::Combine, step, begun);
}

using Kernel = void (*)(CombineArguments);


template <bool kPlain, int kVectors>
Kernel kernel_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::BFloat16:
      return combine_kernel<BFloat16, kPlain, kVectors>;
    case Dtype::Float16:
      return combine_kernel<Float16, kPlain, kVectors>;
    case Dtype::Float32:
      return combine_kernel<Float32, kPlain, kVectors>;
  }
  return nullptr;
}

Kernel kernel_of(const CombineArguments& a) {
  const Dtype dtype = a.common.c.dtype;
  if (!is_plain(a)) return kernel_of<false, kSentVectors>(dtype);
  return a.sent.vectors == kSentVectors ? kernel_of<true, kSentVectors>(dtype) : kernel_of<true, kSentVectorsOfFew>(dtype);
}

}  // namespace

cudaError_t load_dispatch(const Config& c);

cudaError_t load_kernels(const Config& c) {
  cudaFuncAttributes attributes;
  for (const Kernel kernel : {kernel_of<false, kSentVectors>(c.dtype), kernel_of<true, kSentVectors>(c.dtype),
                              kernel_of<true, kSentVectorsOfFew>(c.dtype)}) {
    const cudaError_t error = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
    if (error != cudaSuccess) return error;
  }
  return load_dispatch(c);
}

cudaError_t launch_combine(const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<CombineArguments*>(&arguments)};
  return cudaLaunchKernel(kernel_of(arguments), dim3(blocks), dim3(kCombineThreads), parameters, 0, stream);
}

}  // namespace pplx::cuda
