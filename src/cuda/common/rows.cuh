// Moving rows, sixteen bytes a lane. Payload rows of outputs may start at multiples of 4 only (hidden 100 on a quantised wire).
#pragma once

#include "ptx.cuh"

namespace pplx::cuda {

// ---- sets of ranks: a bit each, of 32 bits where there are at most 32 ranks ----

template <typename Ranks>
__device__ inline std::uint32_t count_ranks(Ranks ranks) {
  return sizeof(Ranks) == sizeof(std::uint32_t) ? __popc(static_cast<std::uint32_t>(ranks)) : __popcll(ranks);
}

// There is one.
template <typename Ranks>
__device__ inline std::uint32_t lowest_rank(Ranks ranks) {
  return (sizeof(Ranks) == sizeof(std::uint32_t) ? __ffs(static_cast<int>(ranks)) : __ffsll(static_cast<long long>(ranks))) - 1;
}

template <typename Ranks>
__device__ inline std::uint32_t count_ranks_below(Ranks ranks, std::uint32_t rank) {
  return count_ranks(static_cast<Ranks>(ranks & ((Ranks{1} << rank) - 1)));
}

// Memory that a peer may have written is never read through L1, which the peer does not invalidate.
__device__ inline uint4 load_arrived(const char* from) { return __ldcg(reinterpret_cast<const uint4*>(from)); }

__device__ inline void store16(char* to, const uint4& v) { *reinterpret_cast<uint4*>(to) = v; }

// This thread's lane, as the compiler does not know it: what follows from it is found out anew where it is wanted, and not kept
// from before a loop, in registers or on the stack.
__device__ inline std::uint32_t lane_anew() {
#ifdef __CUDA_ARCH__
  std::uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
#else
  return threadIdx.x % 32;
#endif
}

// Returns what get() returns in the first lane, to all of a warp.
template <typename Get>
__device__ inline std::uint32_t of_first_lane(const Get& get) {
  std::uint32_t got = 0;
  if (threadIdx.x % 32 == 0) got = get();
  return __shfl_sync(~0u, got, 0);
}
// The address that a lane has, for all of a warp.
template <typename T>
__device__ inline T* of_lane(T* at, int lane) {
  return reinterpret_cast<T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(at), lane));
}

// `bytes` of v, a multiple of 4 up to 16, to a place that is aligned to 4.
[[maybe_unused]] static __device__ __noinline__ void store_words(char* to, uint4 v, std::uint32_t bytes) {
  auto* words = reinterpret_cast<std::uint32_t*>(to);
  words[0] = v.x;
  if (bytes > 4) words[1] = v.y;
  if (bytes > 8) words[2] = v.z;
  if (bytes > 12) words[3] = v.w;
}

}  // namespace pplx::cuda
