// The additions of the general kernel of a dispatch: blocks for peers of other nodes, what replicas compare, and sources of several rounds.
#pragma once

#include "../../protocol/replicas.h"
#include "../decode/dispatch_send.cuh"
#include "../large/receive.cuh"
#include "relay_dispatch.cuh"

namespace pplx::cuda {

// Shared memory for the rounds that this launch receives.
inline std::uint32_t bytes_of_rounds(const Config& c) { return in_pieces(c) ? kDispatchWarps * static_cast<std::uint32_t>(sizeof(RoundRows)) : 0; }

template <>
struct DispatchExtras<false> {
  __device__ static bool may_write_blocks(const Common& k, std::uint32_t step) { return may_write_all(k, step, Op::Dispatch); }
  // Writes the masks of a node block, by the senders of a thread block.
  __device__ static __noinline__ void write_masks(const DispatchArguments& a, std::uint32_t peer, std::uint32_t* masks) {
    for (std::uint32_t own = threadIdx.x; own < a.own; own += kSenders)
      masks[own] = mask_for(a, peer, [&](std::uint32_t i) {
        const std::uint32_t choice = own * a.common.c.top_k + i;
        return a.ids == nullptr ? a.plan.ids[choice] : valid_id<false>(a, load_raw_id(a, choice_at<false>(a.common, choice)));
      });
  }
  // Writes a remote peer's header, with its counts. A warp that stores a row of its block counts that row.
  __device__ static void write_header(const DispatchArguments& a, std::uint32_t step, std::uint32_t peer, const SendShared& s,
                                      const std::uint32_t* experts) {
    const Common& k = a.common;
    const bool planned = a.ids == nullptr;
    const std::uint32_t rows = planned ? a.plan.rows[peer] : s.plan.rows_before[peer];
    char* block = block_for(k, set_of(k.c, step), Op::Dispatch, peer);
    cuda::write_header(k, block, step, rows, 0, threadIdx.x, 0, has_relays(k) ? a.own : 0);
    auto* counts = reinterpret_cast<std::uint32_t*>(block + sizeof(BlockHeader));
    for (std::uint32_t e = threadIdx.x; e < k.c.num_experts; e += kSenders) {
      const std::uint32_t rank = k.per_rank.divide(e);
      if (a.relays.rep[rank] != peer) continue;
      const std::uint32_t n = planned ? a.plan.counts[e] : experts[e];
      counts[(has_relays(k) ? a.relays.number[rank] * k.experts_per_rank : 0) + e - first_expert_of(k, rank)] = n;
      if (!planned) a.plan.counts[e] = n;
    }
    if (threadIdx.x == 0 && !planned) a.plan.rows[peer] = rows;
    if (has_relays(k)) write_masks(a, peer, reinterpret_cast<std::uint32_t*>(block + masks_at(k.c)));
    sync_senders();
    if (threadIdx.x == 0) count_header(k, step, Op::Dispatch, peer, rows, 1);
  }
  // Writes a row's route: a warp. Each choice names its rank. goes: if the lane's choice goes there, as expert `id`.
  __device__ static __noinline__ void write_node_route(const DispatchArguments& a, std::uint32_t own, bool goes, std::uint32_t id,
                                                       std::uint32_t index, float weight, char* to) {
    const Common& k = a.common;
    const std::uint32_t lane = threadIdx.x % 32, rank = goes ? k.per_rank.divide(id) : 0;
    if (lane >= k.c.top_k) return;
    const std::uint32_t place = goes ? route_place(id - first_expert_of(k, rank), index) : kNowhere;
    store_vec16(to + k.dispatch.route_at + 16 * lane, make_uint4(place, __float_as_uint(weight), k.slice.token(own), rank));
  }
  // Counts remote rows, by a warp, once the senders have stored a unit.
  __device__ static void count_remote_rows(const DispatchArguments& a, std::uint32_t step, const StoredUnit& unit) {
    const Common& k = a.common;
    for (std::uint32_t peer = threadIdx.x % 32; peer < k.c.world; peer += 32) {
      std::uint32_t rows = 0;
      for (std::uint32_t i = 0; i < kMostTokensOfUnit; ++i) rows += (unit.ranks[i] & k.remote) >> peer & 1;
      if (rows != 0) count_rows(k, step, Op::Dispatch, peer, unit.first_row[peer], rows, RowsOfBlock(a.plan.rows + peer));
    }
  }
  __device__ static void pass_on(const DispatchArguments& a, std::uint32_t step) {
    has_relays(a.common) ? pass_on_nodes(a, step) : pass_on_dispatches(a, step);
  }
  // As await_far_row(), by a warp.
  __device__ static const char* find_far_row(const DispatchArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t nth) {
    const char* row = nullptr;
    if (threadIdx.x % 32 == 0) row = await_far_row(a, step, source, nth);
    __syncwarp();  // every lane sees what the first one has waited for
    return of_lane(row, 0);
  }
  // Tells a replica, or this rank's comparing block, what replicas must have in common: tokens, and a digest of all their ids.
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
        const RawId id = load_raw_id(a, i);
        if (own && is_bad(a, id)) k.report->notices.bad_ids = 1;
        digest += id_digest(i, valid_id<false>(a, id));
        if (own && a.weights != nullptr) a.plan.weights[i] = a.weights[i];
      }
#pragma unroll
      for (int i = 1; i < 32; i *= 2) digest += __shfl_xor_sync(~0u, static_cast<unsigned long long>(digest), i);
      if (threadIdx.x % 32 == 0) atomicAdd(&s.digest, static_cast<unsigned long long>(digest));
      sync_senders();
      digest = s.digest;
      if (own && threadIdx.x == 0) *a.plan.ids_digest = digest;
    }
    if (threadIdx.x != 0) return;
    const auto part = [&](int i) { return static_cast<std::uint32_t>(digest >> 21 * i) & 0x1fffffu; };
    const PackedNumbers p = pack_numbers({a.tokens, part(0), part(1), part(2)});
    fuzz_delay(k, digest);
    store_tagged(k, k.peers[peer] + k.heap.compared_at(k.c, set_of(k.c, step), k.c.rank), step, p.words[0], p.words[1], p.words[2]);
  }
  // Fails of replicas that do not hold the same tokens.
  __device__ static __noinline__ void check_replicas(const Common& k, std::uint32_t step) {
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
      if (!same) blame(k, Phase::DispatchRecv, step, source, kTokens | own[0], theirs[0]);
    }
  }
  // Receives a step in pieces in which some source has many tokens, by any warp. Behind the places of experts there is room for rounds.
  template <bool kHooks>
  __device__ static __noinline__ void receive_rounds(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, const Experts e) {
    auto* const rows = reinterpret_cast<RoundRows*>(&e.at(a.common.c.world + 1, 0));
    const std::uint32_t warp = threadIdx.x / 32;
    RowCarrier<kHooks, true>(a, step, s, nullptr, e).receive_rounds(rows[warp], warp == 0 && reports_counts());
  }
};

}  // namespace pplx::cuda
