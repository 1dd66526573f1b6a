// combine() of few tokens in every case: peers of other nodes, replicas, tails, weights of its own, few tokens in pieces.
#include "../decode/combine_kernel.cuh"
#include "combine_extras.cuh"

namespace pplx::cuda::decode {

Choice<CombineArguments> choose_general(const Config& c) {
  return choose_type(c.dtype, [](auto type) -> Choice<CombineArguments> {
    return {"decode::combine, general", combine<decltype(type), false, kSentVectors>, kCombineThreads, 0};
  });
}

}  // namespace pplx::cuda::decode
