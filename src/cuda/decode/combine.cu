// combine() of few tokens.
#include "../host/launch_table.h"
#include "combine_kernel.cuh"

namespace pplx::cuda::decode {

Choice<CombineArguments> choose_with_extras(const Config& config, const CombineCall& call);  // remote/combine.cu

Choice<CombineArguments> choose(const Config& c, const CombineCall& call) {
  if (!call.mapped_only || in_pieces(c)) return choose_with_extras(c, call);
  return choose_type(c.dtype, [&](auto type) -> Choice<CombineArguments> {
    using T = decltype(type);
    const bool few = call.few && c.layout != LayoutKind::Compact;
    return {"decode::combine", few ? combine<T, true, kSentVectorsOfFew> : combine<T, true, kSentVectors>, kCombineThreads, 0};
  });
}

}  // namespace pplx::cuda::decode
