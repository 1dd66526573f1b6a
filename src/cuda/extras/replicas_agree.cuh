// Replicas compare what they were given: how many tokens, and a digest of all their ids.
#pragma once

#include "../../protocol/replicas.h"
#include "../plan/token_plan.cuh"

namespace pplx::cuda {

// Tells a replica what all of them must have in common, or this rank itself, for the thread block that compares. By one thread.
__device__ inline void tell_of_tokens(const DispatchArguments& a, std::uint32_t step, std::uint32_t peer, std::uint64_t digest) {
  const Common& k = a.common;
  char* vec16 = k.peers[peer] + k.heap.compared_at(k.c, set_of(k.c, step), k.c.rank);
  const auto part = [&](int i) { return static_cast<std::uint32_t>(digest >> 21 * i) & 0x1fffffu; };
  const PackedNumbers p = pack_numbers({a.tokens, part(0), part(1), part(2)});
  fuzz_delay(k, digest);
  store_tagged(k, vec16, step, p.words[0], p.words[1], p.words[2]);
}

// Replicas that do not hold the same tokens.
[[maybe_unused]] static __device__ __noinline__ void check_replicas(const Common& k, std::uint32_t step) {
  const auto compared = [&](std::uint32_t rank, std::uint32_t (&n)[kNumbersOfVec16]) {
    const char* place = k.peers[k.c.rank] + k.heap.compared_at(k.c, set_of(k.c, step), rank);
    uint4 vec16 = make_uint4(0, 0, 0, 0);
    if (!await_tagged(k, place, Phase::DispatchRecv, step, rank, vec16)) return false;
    unpack_numbers({{vec16.x, vec16.y, vec16.z}}, n);
    return true;
  };
  for (std::uint32_t source = threadIdx.x % 32; source < k.c.world; source += 32) {
    if ((k.replicas >> source & 1) == 0) continue;
    std::uint32_t own[kNumbersOfVec16], theirs[kNumbersOfVec16];
    if (!compared(k.c.rank, own) || !compared(source, theirs)) return;
    bool same = true;
    for (std::uint32_t i = 0; i < kNumbersOfVec16; ++i) same = same && own[i] == theirs[i];
    if (!same) fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, source, step}, kTokens | own[0], theirs[0]);
  }
}

}  // namespace pplx::cuda
