// combine() of few tokens in every case: peers of other nodes, replicas, tails, weights of its own, few tokens in pieces.
#include "../decode/combine_kernel.cuh"
#include "combine_extras.cuh"

namespace pplx::cuda::decode {

Choice<CombineArguments> choose_with_extras(const Config& c, const CombineCall& call) {
  return choose_type(c.dtype, [&](auto type) -> Choice<CombineArguments> {
    using T = decltype(type);
    if (call.mapped_only) return {"decode::combine in pieces", combine<T, true, kSentVectors, true>, kCombineThreads, 0};
    return {"decode::combine, general", combine<T, false, kSentVectors>, kCombineThreads, 0};
  });
}

}  // namespace pplx::cuda::decode
