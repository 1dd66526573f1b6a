// The plan of a step: which ranks want a token, and which of each peer's rows and of each expert's it is. Every thread block makes
// it for its own tokens, and counts all earlier tokens, in any order, from the ids. So no thread block waits for another's.
#pragma once

#include <type_traits>

#include "../common/arrival.cuh"

namespace pplx::cuda {

inline constexpr std::uint32_t kMostChoicesOfUnit = kMostTokensOfUnit * kMaxTopK;

template <bool kMappedOnly>
struct DispatchExtras;  // remote/dispatch_extras.cuh

// Returns the rank to which rows for an expert go: its own, or its relay.
template <bool kMappedOnly>
__device__ inline std::uint32_t rank_for(const DispatchArguments& a, std::uint32_t expert) {
  const std::uint32_t rank = a.common.per_rank.divide(expert);
  return kMappedOnly ? rank : a.relays.rep[rank];
}

struct PlanShared {
  std::uint32_t rows_before[kMaxPeers];  // each rank's, in the tokens before the unit
  std::int32_t ids[kMostChoicesOfUnit];  // the unit's
  float weights[kMostChoicesOfUnit];
};

// Sends the nth vec16 of a peer's choices by expert, and keeps it in the plan, unless that was given. count(e): choices of expert e.
template <bool kMappedOnly, typename Count>
__device__ inline void send_vec16_of_counts(const DispatchArguments& a, std::uint32_t step, std::uint32_t peer, std::uint32_t nth,
                                            bool planned, const Count& count) {
  const Common& k = a.common;
  const std::uint32_t first = first_expert_of(k, peer), experts = local_experts_of(k, peer), begin = nth * kNumbersOfVec16;
  std::uint32_t numbers[kNumbersOfVec16] = {};
  // Parts of all four are asked for at once: peers wait for this.
#pragma unroll
  for (std::uint32_t j = 0; j < kNumbersOfVec16; ++j)
    if (begin + j < experts) numbers[j] = planned ? a.plan.counts[first + begin + j] : count(first + begin + j);
#pragma unroll
  for (std::uint32_t j = 0; j < kNumbersOfVec16; ++j)
    if (!planned && begin + j < experts) a.plan.counts[first + begin + j] = numbers[j];
  if (!kMappedOnly && is_remote(k, peer)) return;
  const PackedNumbers p = pack_numbers(numbers);
  fuzz_delay(k, p.words[0]);
  char* const to = k.peers[peer] + k.heap.counts_at(k.c, set_of(k.c, step), k.c.rank) + kVec16Bytes * nth;
  store_tagged(k, to, step, p.words[0], p.words[1], p.words[2]);
}

// As it was loaded, or -1. Nothing is made of it before it is used: that would wait for it, and each load for the one before.
struct RawId {
  std::uint32_t low = 0xffffffffu, high = 0xffffffffu;
  __device__ std::int64_t value(bool wide) const {
    return wide ? static_cast<std::int64_t>(std::uint64_t{high} << 32 | low) : static_cast<std::int32_t>(low);
  }
};
__device__ inline RawId raw_id(const uint2& wide) { return {wide.x, wide.y}; }
__device__ inline RawId raw_id(std::uint32_t narrow) { return {narrow, ~0u}; }
__device__ inline RawId load_raw_id(const DispatchArguments& a, std::uint64_t at) {
  return a.wide_ids ? raw_id(static_cast<const uint2*>(a.ids)[at]) : raw_id(static_cast<const std::uint32_t*>(a.ids)[at]);
}
__device__ inline bool is_bad(const DispatchArguments& a, const RawId& id) {
  const std::int64_t value = id.value(a.wide_ids);
  return value < -1 || value >= a.common.c.num_experts;
}
template <bool kMappedOnly>
__device__ inline std::int32_t valid_id(const DispatchArguments& a, const RawId& raw) {
  const Common& k = a.common;
  const std::int64_t id = raw.value(a.wide_ids);
  if (id < 0 || id >= k.c.num_experts) return -1;
  const bool nobody = !kMappedOnly && k.dead != 0 && (k.dead >> k.per_rank.divide(static_cast<std::uint32_t>(id)) & 1) != 0;
  return nobody ? -1 : static_cast<std::int32_t>(id);
}

// The index, among the choices of all tokens, of the nth choice of this rank's own tokens.
template <bool kMappedOnly>
__device__ inline std::uint32_t choice_at(const Common& k, std::uint32_t n) {
  if (kMappedOnly || k.slice.of == 1) return n;
  const std::uint32_t own = k.top_k.divide(n);
  return n + (k.slice.token(own) - own) * k.c.top_k;
}

// A pass over tokens has a group of lanes for each, a lane for each choice.
struct Pass {
  std::uint32_t token, k;  // this thread's, in the pass
  std::uint32_t tokens;  // a pass's

  __device__ explicit Pass(const Common& c)
      : token(threadIdx.x >> c.group_shift), k(threadIdx.x & ((1u << c.group_shift) - 1)), tokens(kSenders >> c.group_shift) {}
  template <bool kMappedOnly>
  __device__ RawId load(const DispatchArguments& a, std::uint32_t begin, std::uint32_t end) const {
    const std::uint32_t own = begin + token;
    if (own >= end || k >= a.common.c.top_k) return {};
    return load_raw_id(a, choice_at<kMappedOnly>(a.common, own * a.common.c.top_k + k));
  }
};

// This thread's choices of the first passes, loaded before anything is known.
struct EarlyIds {
  static constexpr std::uint32_t kPasses = 3;
  RawId ids[kPasses];

  // Loads choices of the tokens before `end`.
  template <bool kMappedOnly>
  __device__ void load(const DispatchArguments& a, std::uint32_t end) {
    const Pass pass(a.common);
#pragma unroll
    for (std::uint32_t i = 0; i < kPasses; ++i)
      if (i * pass.tokens < end) ids[i] = pass.load<kMappedOnly>(a, i * pass.tokens, end);
  }
  __device__ RawId of_pass(std::uint32_t i) const { return i == 0 ? ids[0] : i == 1 ? ids[1] : ids[2]; }
};

// Adds this rank's tokens [from, to) to the counts of rows by rank, and of choices by expert. early: of the first passes.
template <bool kMappedOnly>
__device__ inline void count_tokens(const DispatchArguments& a, std::uint32_t from, std::uint32_t to, bool loaded,
                                    const EarlyIds& early, PlanShared& s, std::uint32_t* experts) {
  const Common& k = a.common;
  const Pass pass(k);
  std::uint32_t number = 0;
#pragma unroll 1
  for (std::uint32_t begin = from; begin < to; begin += pass.tokens, ++number) {
    const bool known = loaded && number < EarlyIds::kPasses;
    const std::int32_t id = valid_id<kMappedOnly>(a, known ? early.of_pass(number) : pass.load<kMappedOnly>(a, begin, to));
    const std::uint32_t rank = id < 0 ? 0 : rank_for<kMappedOnly>(a, static_cast<std::uint32_t>(id)), lane = threadIdx.x % 32;
    // The first lane of a token that wants a rank counts the row.
    const std::uint32_t same = __match_any_sync(~0u, id < 0 ? kNone : rank << 16 | pass.token);  // takes longer the more keys differ
    if (id < 0) continue;
    if ((same & ((1u << lane) - 1)) == 0) atomicAdd(&s.rows_before[rank], 1u);
    atomicAdd(experts + id, 1u);
  }
}

// A token as a warp sees it: lane i has choice i, and the rows of ranks i and, where there are more than 32, i + 32.
template <bool kMappedOnly>
struct PlannedToken {
  using Ranks = std::conditional_t<kMappedOnly, std::uint32_t, unsigned long long>;  // a bit each
  static constexpr std::uint32_t kRanksOfLane = kMappedOnly ? 1 : 2;

  std::int32_t id = -1;
  std::uint32_t rank = kNone, index = 0;  // this choice's
  float weight = 1.0f;
  Ranks ranks = 0;  // that want it; every lane has them
  std::uint32_t row[kRanksOfLane] = {};

  // Finds out what its ids say: the ranks that want it, and how many of its lower choices name the same expert.
  __device__ void choose(const DispatchArguments& a, std::int32_t its_id, float its_weight) {
    const Common& k = a.common;
    const std::uint32_t lane = threadIdx.x % 32;
    id = its_id;
    weight = its_weight;
    rank = id < 0 ? kNone : rank_for<kMappedOnly>(a, static_cast<std::uint32_t>(id));
    const Ranks mine = id < 0 ? 0 : Ranks{1} << rank;
    ranks = __reduce_or_sync(~0u, static_cast<std::uint32_t>(mine));
    if constexpr (!kMappedOnly)
      if (k.c.world > 32) ranks |= std::uint64_t{__reduce_or_sync(~0u, static_cast<std::uint32_t>(mine >> 32))} << 32;
    const std::uint32_t same = __match_any_sync(~0u, static_cast<std::uint32_t>(id));  // takes longer the more keys differ
    index = id < 0 ? 0 : __popc(same & ((1u << lane) - 1));
  }
  __device__ bool wanted_by(std::uint32_t rank) const { return (ranks >> rank & 1) != 0; }
  // Returns the rank's index among those that want it.
  __device__ std::uint32_t nth(std::uint32_t rank) const { return count_ranks_below(ranks, rank); }
  __device__ std::uint32_t count() const { return count_ranks(ranks); }
};

// Takes what an earlier dispatch of the same choices has planned: rows of ranks, and which of its experts' each choice is.
template <bool kMappedOnly>
__device__ inline void take_from_plan(const DispatchArguments& a, std::uint32_t own, PlannedToken<kMappedOnly>& t) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint64_t at = std::uint64_t{own} * k.c.top_k + lane;
  std::uint32_t mine = kNone;
  if (lane < k.c.top_k) {
    mine = a.plan.token_rows[at];
    t.index = a.plan.index[at];
  }
#pragma unroll 1
  for (std::uint32_t i = 0; i < k.c.top_k; ++i) {
    const std::uint32_t entry = __shfl_sync(~0u, mine, i);
    if (entry == kNone) break;
    const std::uint32_t rank = entry >> 20;
    t.ranks |= typename PlannedToken<kMappedOnly>::Ranks{1} << rank;
    if (lane == rank % 32) t.row[rank / 32 % t.kRanksOfLane] = entry & 0xfffffu;
  }
}

// Finds out which of its experts' each choice of a unit's nth token is, behind those of earlier tokens.
template <bool kMappedOnly>
__device__ inline void count_earlier(const DispatchArguments& a, std::uint32_t nth, const PlanShared& s, const std::uint32_t* experts,
                                     PlannedToken<kMappedOnly>& t) {
  if (t.id < 0) return;
  t.index += experts[t.id];
#pragma unroll 4
  for (std::uint32_t i = 0; i < nth * a.common.c.top_k; ++i) t.index += s.ids[i] == t.id;
}

// Returns how many of a token's ranks it goes to before one of them: remote ones first, whose way is longer; of each kind from rank + 1
// on, itself last.
template <bool kMappedOnly, typename Ranks>
__device__ inline std::uint32_t ranks_before(const Common& k, Ranks ranks, std::uint32_t rank) {
  const Ranks below = (Ranks{1} << rank) - 1, after = ~((Ranks{2} << k.c.rank) - 1);  // the last one's: none
  const Ranks before = rank > k.c.rank ? below & after : below | after;
  if constexpr (!kMappedOnly) {
    const Ranks remote = ranks & k.remote;
    return (k.remote >> rank & 1) != 0 ? count_ranks(remote & before) : count_ranks(remote | (ranks & before));
  }
  return count_ranks(ranks & before);
}

// Keeps what further dispatches, and this one's combine, need to know of a token: one warp.
template <bool kMappedOnly>
__device__ inline void keep_in_plan(const DispatchArguments& a, std::uint32_t own, const PlannedToken<kMappedOnly>& t) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint64_t at = std::uint64_t{own} * k.c.top_k;
#pragma unroll
  for (std::uint32_t i = 0; i < t.kRanksOfLane; ++i) {
    const std::uint32_t rank = lane + 32 * i;
    if (t.wanted_by(rank)) a.plan.token_rows[at + t.nth(rank)] = rank << 20 | t.row[i];
  }
  if (lane >= k.c.top_k) return;
  if (lane >= t.count()) a.plan.token_rows[at + lane] = kNone;
  a.plan.ids[at + lane] = t.id;
  a.plan.index[at + lane] = t.index;
  if (a.weights != nullptr && (kMappedOnly || k.slice.of == 1)) a.plan.weights[at + lane] = t.weight;
}

}  // namespace pplx::cuda
