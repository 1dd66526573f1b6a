// What replicas compare of a dispatch of many tokens: check_replicas() in extras/replicas_agree.cuh. Each reads the ids of all tokens, though it sends
// a part of them; the warps that count chunks share that work.
#pragma once

#include "replicas_agree.cuh"

namespace pplx::cuda {

// By the warp that counts the chunk: of the tokens of all replicas that lie beside the chunk's own, in the last chunk of all that follow. The plan
// keeps their weights, too, as that of a dispatch of few tokens does.
static __device__ __noinline__ void digest_chunk(const DispatchArguments& a, std::uint32_t number) {
  const Common& k = a.common;
  const std::uint32_t each = a.tokens_per_chunk * k.slice.of * k.c.top_k;
  const std::uint32_t end = number + 1 == a.chunks ? a.tokens * k.c.top_k : (number + 1) * each;
  unsigned long long digest = 0;
#pragma unroll 4
  for (std::uint32_t i = number * each + threadIdx.x % 32; i < end; i += 32) {
    digest += id_digest(i, load_id(a, i, true));
    if (a.weights != nullptr) a.plan.weights[i] = a.weights[i];
  }
#pragma unroll
  for (int i = 1; i < 32; i *= 2) digest += __shfl_xor_sync(~0u, digest, i);
  if (threadIdx.x % 32 == 0) atomicAdd(a.pieces.digest, digest);
}

// By one warp, when all chunks are counted, or the plan is given.
static __device__ __noinline__ void tell_replicas(const DispatchArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const unsigned long long digest = a.ids == nullptr ? *a.plan.ids_digest : __ldcg(a.pieces.digest);
  for (std::uint32_t peer = threadIdx.x % 32; peer < k.c.world; peer += 32) {
    if (a.ids != nullptr && peer == k.c.rank) *a.plan.ids_digest = digest;
    if (((k.replicas | 1ull << k.c.rank) >> peer & 1) != 0) tell_of_tokens(a, step, peer, digest);
  }
}

}  // namespace pplx::cuda
