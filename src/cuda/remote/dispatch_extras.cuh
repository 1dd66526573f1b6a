// The additions of the general kernel of a dispatch: blocks for peers of other nodes, and what replicas compare.
#pragma once

#include "../decode/dispatch_send.cuh"
#include "../extras/replicas_agree.cuh"
#include "pass_on_counts.cuh"

namespace pplx::cuda {

template <>
struct DispatchExtras<false> {
  // True if the blocks of all remote peers may be written. A warp's.
  __device__ static bool may_write_blocks(const Common& k, std::uint32_t step) {
    bool good = true;
    come_late(k, step);
    for (std::uint32_t peer = threadIdx.x % 32; peer < k.c.world; peer += 32)
      if (is_remote(k, peer) && (k.dead >> peer & 1) == 0) good = may_write(k, step, Op::Dispatch, peer) && good;
    return __all_sync(~0u, good);
  }
  // Writes a remote peer's header, with its counts. A warp that stores a row of its block counts that row.
  __device__ static void write_header(const DispatchArguments& a, std::uint32_t step, std::uint32_t peer, const SendShared& s, const std::uint32_t* experts) {
    const Common& k = a.common;
    const bool planned = a.ids == nullptr;
    const std::uint32_t first = first_expert_of(k, peer), rows = planned ? a.plan.rows[peer] : s.plan.rows_before[peer];
    char* block = block_for(k, set_of(k.c, step), Op::Dispatch, peer);
    cuda::write_header(k, block, step, rows, 0, threadIdx.x);
    auto* counts = reinterpret_cast<std::uint32_t*>(block + sizeof(BlockHeader));
    for (std::uint32_t e = threadIdx.x; e < local_experts_of(k, peer); e += kSenders) {
      const std::uint32_t n = planned ? a.plan.counts[first + e] : experts[first + e];
      counts[e] = n;
      if (!planned) a.plan.counts[first + e] = n;
    }
    if (threadIdx.x == 0 && !planned) a.plan.rows[peer] = rows;
    sync_senders();
    if (threadIdx.x == 0) count_header(k, step, Op::Dispatch, peer, rows, 1);
  }
  // Counts remote rows, by a warp, once the senders have stored a unit.
  __device__ static void count_remote_rows(const DispatchArguments& a, std::uint32_t step, const StoredUnit& unit) {
    const Common& k = a.common;
    for (std::uint32_t peer = threadIdx.x % 32; peer < k.c.world; peer += 32) {
      std::uint32_t rows = 0;
      for (std::uint32_t i = 0; i < kMostTokensOfUnit; ++i) rows += (unit.ranks[i] & k.remote) >> peer & 1;
      if (rows != 0) count_rows(k, step, Op::Dispatch, peer, unit.next_row[peer] - rows, rows, RowsOfBlock(a.plan.rows + peer));
    }
  }
  __device__ static bool await_remote_row(const Common& k, std::uint32_t step, std::uint32_t source, std::uint32_t row) {
    return row_was_passed_on(k, step, Op::Dispatch, Phase::DispatchRecv, source, row);
  }
  __device__ static void pass_on(const DispatchArguments& a, std::uint32_t step) { pass_on_dispatches(a, step); }
  // Tells a replica what both must have in common: a digest of all tokens' ids.
  __device__ static __noinline__ void tell_replica(const DispatchArguments& a, std::uint32_t step, std::uint32_t peer, SendShared& s) {
    const Common& k = a.common;
    const bool own = peer == k.c.rank;
    std::uint64_t digest = 0;
    if (a.ids == nullptr) {
      digest = *a.plan.ids_digest;
    } else {
      if (threadIdx.x == 0) s.digest = 0;
      sync_senders();
      for (std::uint32_t i = threadIdx.x; i < a.tokens * k.c.top_k; i += kSenders) {
        digest += id_digest(i, load_id(a, i, own));
        if (own && a.weights != nullptr) a.plan.weights[i] = a.weights[i];
      }
#pragma unroll
      for (int i = 1; i < 32; i *= 2) digest += __shfl_xor_sync(~0u, static_cast<unsigned long long>(digest), i);
      if (threadIdx.x % 32 == 0) atomicAdd(&s.digest, static_cast<unsigned long long>(digest));
      sync_senders();
      digest = s.digest;
      if (own && threadIdx.x == 0) *a.plan.ids_digest = digest;
    }
    if (threadIdx.x == 0) tell_of_tokens(a, step, peer, digest);
  }
  __device__ static void check_replicas(const Common& k, std::uint32_t step) { cuda::check_replicas(k, step); }
};

}  // namespace pplx::cuda
