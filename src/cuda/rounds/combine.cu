// combine() of few tokens, in an AllToAll in pieces; and release(). One kernel does every case.
#include "../decode/combine_kernel.cuh"
#include "decode_combine.cuh"

namespace pplx::cuda {
namespace decode_rounds {
namespace {

template <typename T>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocksPerSm) combine(const __grid_constant__ CombineArguments a) {
  run_combine<T, false, kSentVectors, CombineRounds>(a);
}

}  // namespace

Choice<CombineArguments> choose(const Config& c, const CombineCall&) {
  return choose_type(c.dtype, [](auto type) -> Choice<CombineArguments> {
    return {"decode_rounds::combine", combine<decltype(type)>, kCombineThreads, 0};
  });
}

}  // namespace decode_rounds
}  // namespace pplx::cuda
