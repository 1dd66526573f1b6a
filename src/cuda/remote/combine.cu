// combine() of few tokens in every case: peers of other nodes, replicas, tails, weights of its own.
#include "../decode/combine_kernel.cuh"
#include "combine_extras.cuh"

namespace pplx::cuda {
namespace decode {
namespace {

template <typename T, bool kMappedOnly, int kSent>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocksPerSm) combine(const __grid_constant__ CombineArguments a) {
  run_combine<T, kMappedOnly, kSent>(a);
}

}  // namespace

Choice<CombineArguments> choose_general(const Config& c) {
  return choose_type(c.dtype, [](auto type) -> Choice<CombineArguments> {
    return {"decode::combine, general", combine<decltype(type), false, kSentVectors>, kCombineThreads, 0};
  });
}

}  // namespace decode
}  // namespace pplx::cuda
