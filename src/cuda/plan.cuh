// The plan of a step: which ranks want a token, and which of each peer's rows and of each expert's it is. Every thread block makes it
// for its own tokens, from the ids: what comes before them is a count over all earlier tokens, in any order, so no thread block waits
// for another's. Rows are counted first, since payload waits for nothing else; experts while it is on its way.
#pragma once

#include "barriers.cuh"
#include "words.cuh"

namespace pplx::cuda {

inline constexpr std::uint32_t kMostChoicesOfUnit = kMostTokensOfUnit * kMaxTopK;

struct PlanShared {
  std::uint32_t rows_before[kMaxPeers];  // of the tokens before the unit, by rank
  std::int32_t ids[kMostChoicesOfUnit];  // of the unit
  std::uint32_t index[kMostChoicesOfUnit];
  float weights[kMostChoicesOfUnit];
};

// As the caller has it, or -1: loads of it may be under way together.
__device__ inline std::int64_t load_raw_id(const DispatchArguments& a, std::uint64_t at) {
  return a.wide_ids ? static_cast<const std::int64_t*>(a.ids)[at] : static_cast<const std::int32_t*>(a.ids)[at];
}
__device__ inline std::int32_t valid_id(const Common& k, std::int64_t id) {
  if (id < 0 || id >= k.c.num_experts) return -1;
  const bool nobody = k.dead != 0 && (k.dead >> k.per_rank.divide(static_cast<std::uint32_t>(id)) & 1) != 0;
  return nobody ? -1 : static_cast<std::int32_t>(id);
}
__device__ inline std::int32_t load_id(const DispatchArguments& a, std::uint64_t at, bool report) {
  const std::int64_t id = load_raw_id(a, at);
  if (report && (id < -1 || id >= a.common.c.num_experts)) a.common.report->notices.bad_ids = 1;
  return valid_id(a.common, id);
}

// The index, among the choices of all tokens, of the nth choice of this rank's own tokens.
__device__ inline std::uint32_t choice_at(const Common& k, std::uint32_t n) {
  if (k.slice.of == 1) return n;
  const std::uint32_t own = k.top_k.divide(n);
  return n + (k.slice.token(own) - own) * k.c.top_k;
}

// A thread's token of those that are counted: its ids as they are, loaded before anything is known.
struct CountedToken {
  static constexpr std::uint32_t kAtOnce = 8;
  std::int64_t ids[kAtOnce];
  std::uint32_t own = kNone, first = 0;  // the first of these choices

  __device__ void load(const DispatchArguments& a, std::uint32_t token, std::uint32_t end, std::uint32_t k0) {
    own = token < end ? token : kNone;
    first = k0;
    const std::uint64_t at = own == kNone ? 0 : choice_at(a.common, own * a.common.c.top_k);
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) ids[i] = own != kNone && k0 + i < a.common.c.top_k ? load_raw_id(a, at + k0 + i) : -1;
  }
  __device__ unsigned long long ranks(const Common& k) const {
    unsigned long long all = 0;
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const std::int32_t id = valid_id(k, ids[i]);
      if (id >= 0) all |= 1ull << k.per_rank.divide(static_cast<std::uint32_t>(id));
    }
    return all;
  }
};

// Adds this rank's tokens [from, to) to the counts of rows by rank. The first of them may have been loaded: `early`.
__device__ inline void count_rows(const DispatchArguments& a, std::uint32_t from, std::uint32_t to, const CountedToken& early,
                                  PlanShared& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  std::uint32_t low = 0, high = 0;  // of ranks lane and lane + 32
  for (std::uint32_t base = from + threadIdx.x - lane; base < to; base += kSenders) {
    const std::uint32_t token = base + lane;
    unsigned long long ranks = 0;
    const bool loaded = early.own == token;
    if (loaded) ranks = early.ranks(k);
    for (std::uint32_t k0 = loaded ? CountedToken::kAtOnce : 0; k0 < k.c.top_k; k0 += CountedToken::kAtOnce) {
      CountedToken more;
      more.load(a, token, to, k0);
      ranks |= more.ranks(k);
    }
    for (std::uint32_t r = 0; r < k.c.world; ++r) {
      const std::uint32_t n = __popc(__ballot_sync(~0u, ranks >> r & 1));
      if (lane == r) low += n;
      if (lane + 32 == r) high += n;
    }
  }
  if (low != 0) atomicAdd(&s.rows_before[lane], low);
  if (high != 0) atomicAdd(&s.rows_before[lane + 32], high);
}

// Adds them to the counts of choices by expert.
__device__ inline void count_choices_of_experts(const DispatchArguments& a, std::uint32_t from, std::uint32_t to, std::uint32_t* experts) {
  const Common& k = a.common;
  for (std::uint32_t choice = from * k.c.top_k + threadIdx.x; choice < to * k.c.top_k; choice += kSenders) {
    const std::int32_t id = load_id(a, choice_at(k, choice), false);
    if (id >= 0) atomicAdd(experts + id, 1);
  }
}

// A token's rows, spread over a warp: lane r has that of ranks r and r + 32.
struct TokenRows {
  unsigned long long ranks = 0;  // that want it; every lane has them
  std::uint32_t row[2] = {};

  __device__ std::uint32_t row_at(std::uint32_t rank) const { return __shfl_sync(~0u, rank < 32 ? row[0] : row[1], rank % 32); }
};

// Walks through the tokens of a unit. Each warp does so for itself, so that none waits for another's result.
struct RunningRows {
  std::uint32_t rows[2];

  __device__ explicit RunningRows(const PlanShared& s) {
    rows[0] = s.rows_before[threadIdx.x % 32];
    rows[1] = s.rows_before[threadIdx.x % 32 + 32];
  }
  // The next token, whose ids these are.
  __device__ TokenRows next(const Common& k, const std::int32_t* ids) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::int32_t id = lane < k.c.top_k ? ids[lane] : -1;
    const unsigned long long mine = id < 0 ? 0 : 1ull << k.per_rank.divide(static_cast<std::uint32_t>(id));
    TokenRows t;
    t.ranks = __reduce_or_sync(~0u, static_cast<std::uint32_t>(mine));
    if (k.c.world > 32) t.ranks |= std::uint64_t{__reduce_or_sync(~0u, static_cast<std::uint32_t>(mine >> 32))} << 32;
#pragma unroll
    for (std::uint32_t i = 0; i < 2; ++i) {
      t.row[i] = rows[i];
      rows[i] += t.ranks >> (lane + 32 * i) & 1;
    }
    return t;
  }
};

// The same from a plan that was given.
__device__ inline TokenRows planned_rows(const DispatchArguments& a, std::uint32_t own) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t mine = lane < k.c.top_k ? a.plan.token_rows[std::uint64_t{own} * k.c.top_k + lane] : kNone;
  TokenRows t;
  for (std::uint32_t i = 0; i < k.c.top_k; ++i) {
    const std::uint32_t entry = __shfl_sync(~0u, mine, i);
    if (entry == kNone) break;
    const std::uint32_t rank = entry >> 20;
    t.ranks |= 1ull << rank;
    if (lane == rank) t.row[0] = entry & 0xfffffu;
    if (lane + 32 == rank) t.row[1] = entry & 0xfffffu;
  }
  return t;
}

// Calls visit(rank) for each of these ranks: remote ones first, for the proxy has the longer way; of each kind from rank + 1 on, itself
// last.
template <typename Visit>
__device__ inline void visit_in_order(const Common& k, unsigned long long ranks, unsigned long long remote, const Visit& visit) {
  const unsigned long long after = ~((2ull << k.c.rank) - 1);  // rank 63: none
  while (ranks != 0) {
    const unsigned long long kind = (ranks & remote) != 0 ? ranks & remote : ranks;
    const unsigned long long next = (kind & after) != 0 ? kind & after : kind;
    const auto rank = static_cast<std::uint32_t>(__ffsll(static_cast<long long>(next))) - 1;
    ranks &= ~(1ull << rank);
    visit(rank);
  }
}

// Which of its expert's rows each choice of the unit's tokens is: counted, or taken from the plan. The plan keeps it.
__device__ inline void number_choices(const DispatchArguments& a, std::uint32_t first, std::uint32_t n, PlanShared& s,
                                      const std::uint32_t* experts) {
  const Common& k = a.common;
  const std::uint32_t tid = threadIdx.x;
  const std::uint64_t at = std::uint64_t{first} * k.c.top_k;
  if (tid >= n * k.c.top_k) return;
  if (a.ids == nullptr) {
    s.index[tid] = a.plan.index[at + tid];
    return;
  }
  const std::int32_t id = s.ids[tid];
  std::uint32_t index = 0;
  if (id >= 0) {
    index = experts[id];
    for (std::uint32_t i = 0; i < tid; ++i) index += s.ids[i] == id;
  }
  s.index[tid] = index;
  if (a.weights != nullptr && k.slice.of == 1) a.plan.weights[at + tid] = s.weights[tid];
  a.plan.ids[at + tid] = id;
  a.plan.index[at + tid] = index;
}

// By one warp: where the token's rows are, ranks ascending.
__device__ inline void keep_rows(const DispatchArguments& a, std::uint32_t own, const TokenRows& t) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  std::uint32_t* entries = a.plan.token_rows + std::uint64_t{own} * k.c.top_k;
#pragma unroll
  for (std::uint32_t i = 0; i < 2; ++i) {
    const std::uint32_t rank = lane + 32 * i;
    if ((t.ranks >> rank & 1) != 0) entries[__popcll(t.ranks & ((1ull << rank) - 1))] = rank << 20 | t.row[i];
  }
  if (lane < k.c.top_k && lane >= static_cast<std::uint32_t>(__popcll(t.ranks))) entries[lane] = kNone;
}

}  // namespace pplx::cuda
