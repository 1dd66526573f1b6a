// dispatch_send: units are the counts per peer, then runs of tokens. A thread block counts what comes before its tokens, quantises
// each once, and stores its row into every peer that wants it. Its last warp raises the rows' arrival words, all of a unit
// together, while the others are at the next unit, or receive.
#pragma once

#include "barriers.cuh"
#include "closed.cuh"
#include "number.cuh"
#include "remote.cuh"
#include "rows.cuh"

namespace pplx::cuda {

// How a token becomes a row's payload: as it is (also when the caller quantised, and gives the scales), or quantised from T.
template <Wire wire>
struct AsIs {
  static constexpr Wire kWire = wire;
};
template <typename T, Wire wire>
struct Quantised {
  static constexpr Wire kWire = wire;
};

struct SendShared {
  std::uint32_t unit, step;
  std::uint32_t rows_before[kMaxPeers];
  std::uint32_t counted[kWorkers][2];  // which ranks want a token that is being counted
  std::uint32_t wanted[kMostTokensOfUnit][2];  // which ranks want the token, a bit each
  char* rows_at[kMaxPeers];  // where this rank's rows begin at each peer
  std::int32_t ids[kMostTokensOfUnit * kMaxTopK];
  float weights[kMostTokensOfUnit * kMaxTopK];
  std::uint32_t index[kMostTokensOfUnit * kMaxTopK];
  char* to[2][kMostTokensOfUnit][kMaxTopK];  // by unit in turn: the token's rows, in the order of `order`
  std::uint32_t rows[2][kMostTokensOfUnit];  // how many
  unsigned long long remote[2][kMostTokensOfUnit];  // those that go to other nodes, the first ones: a bit by rank
  bool ended[2];
  unsigned long long digest;  // of all tokens' ids
  bool may_send;  // the blocks of remote peers may be written
  ClosedWords closed;  // when this thread block began
  bool taken;  // the set's memory is this step's, asked again

  __device__ unsigned long long ranks(std::uint32_t token) const {
    return wanted[token][0] | std::uint64_t{wanted[token][1]} << 32;
  }
};

// A token's registers: loaded early, while the plan is made.
template <typename Mode>
struct Round;

template <Wire wire>
struct Round<AsIs<wire>> {
  static constexpr std::uint32_t kBytes = 2 * kWorkers * 16;  // of payload, by all threads
  uint4 raw[2];
  __device__ void load(const char* x, std::uint32_t bytes, std::uint32_t at) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t from = at + (i * kWorkers + threadIdx.x) * 16;
      if (from < bytes) raw[i] = load_input(x + from);
    }
  }
  __device__ void store(char* const* to, std::uint32_t n, const Common& k, std::uint32_t step, std::uint32_t bytes,
                        std::uint32_t at) const {
    for (std::uint32_t d = 0; d < n; ++d) {
      linger(k, std::uint64_t{step} << 32 | d << 24 | at);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::uint32_t from = at + (i * kWorkers + threadIdx.x) * 16;
        if (from < bytes) store16(to[d] + from, raw[i]);
      }
    }
  }
};

// Sixteen elements a thread, eight threads a word of scales: one scale, or four of two threads each.
template <typename T, Wire wire>
struct Round<Quantised<T, wire>> {
  static constexpr int kThreadsPerScale = scale_block(wire) / 16;
  static constexpr std::uint32_t kVectors = 16 / T::kPerVector;
  static constexpr std::uint32_t kBytes = kWorkers * 16;  // of codes
  uint4 raw[kVectors];
  __device__ void load(const char* x, std::uint32_t bytes, std::uint32_t at) {
    constexpr std::uint32_t kSize = 16 / T::kPerVector;  // of an element
    const std::uint32_t first = at + threadIdx.x * 16;
#pragma unroll
    for (int i = 0; i < static_cast<int>(kVectors); ++i) {
      raw[i] = make_uint4(0, 0, 0, 0);  // past the end: counts for no scale
      const std::uint32_t element = first + i * T::kPerVector;
      if (element < bytes) raw[i] = load_input(x + std::uint64_t{element} * kSize);
    }
  }
  __device__ void store(char* const* to, std::uint32_t n, const Common& k, std::uint32_t step, std::uint32_t bytes,
                        std::uint32_t at) const {
    float f[16];
#pragma unroll
    for (int i = 0; i < static_cast<int>(kVectors); ++i) T::unpack(raw[i], f + i * T::kPerVector);
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = max(largest, __float_as_uint(f[i]) & 0x7fffffffu);
#pragma unroll
    for (int i = 1; i < kThreadsPerScale; i *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, i));
    const BlockScale s = block_scale(wire, float_of(largest));
    uint4 codes = make_uint4(0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu, 0x7f7f7f7fu);  // NaN, whatever its sign was
    if (largest < 0x7f800000u)
      codes = make_uint4(four_e4m3(f, s.multiplier), four_e4m3(f + 4, s.multiplier), four_e4m3(f + 8, s.multiplier),
                         four_e4m3(f + 12, s.multiplier));
    const std::uint32_t word = scale_word(s.scale);
    const uint4 scales =
        make_uint4(__shfl_sync(~0u, word, 0), __shfl_sync(~0u, word, 8), __shfl_sync(~0u, word, 16), __shfl_sync(~0u, word, 24));
    const std::uint32_t from = at + threadIdx.x * 16;
    // A row's payload and scales are padded to 16 bytes each, so whole vectors fit.
    for (std::uint32_t d = 0; d < n; ++d) {
      linger(k, std::uint64_t{step} << 32 | d << 24 | at);
      if (from < bytes) store16(to[d] + from, codes);
      if (from < bytes && threadIdx.x % 32 == 0)
        store16(to[d] + k.dispatch.scales_at + from / 512 * 16, scales);
    }
  }

 private:
  // Eight threads share a word. If a scale is a byte, each of them has one of the word's four.
  __device__ static std::uint32_t scale_word(float scale) {
    if (wire != Wire::MXFP8) return bits_of(scale);
    std::uint32_t word = std::uint32_t{to_e8m0(scale)} << threadIdx.x % 8 / 2 * 8;
    word |= __shfl_xor_sync(~0u, word, 2);
    return word | __shfl_xor_sync(~0u, word, 4);
  }
};

__device__ inline std::int32_t load_id(const DispatchArguments& a, std::uint64_t at, bool report) {
  const std::int64_t id = a.wide_ids ? static_cast<const std::int64_t*>(a.ids)[at] : static_cast<const std::int32_t*>(a.ids)[at];
  if (id >= 0 && id < a.common.c.num_experts) {
    const bool nobody = a.common.dead != 0 && (a.common.dead >> a.common.per_rank.divide(static_cast<std::uint32_t>(id)) & 1) != 0;
    return nobody ? -1 : static_cast<std::int32_t>(id);
  }
  if (report && id != -1) a.common.report->notices.bad_ids = 1;
  return -1;
}

// The index, among the choices of all tokens, of the nth choice of this rank's own tokens.
__device__ inline std::uint32_t choice_at(const Common& k, std::uint32_t n) {
  if (k.slice.of == 1) return n;
  const std::uint32_t own = k.top_k.divide(n);
  return n + (k.slice.token(own) - own) * k.c.top_k;
}

// The first ids of all, loaded before anything is known.
struct EarlyIds {
  static constexpr std::uint32_t kMany = 3;
  std::int32_t ids[kMany];
  __device__ void load(const DispatchArguments& a) {
#pragma unroll
    for (std::uint32_t i = 0; i < kMany; ++i) {
      const std::uint32_t choice = i * kWorkers + threadIdx.x;
      ids[i] = choice < a.own * a.common.c.top_k ? load_id(a, choice_at(a.common, choice), false) : -1;
    }
  }
};

// Adds this rank's tokens [from, to) to the counts of rows by rank and of choices by expert.
__device__ inline void count_tokens(const DispatchArguments& a, std::uint32_t from, std::uint32_t to, const EarlyIds& early,
                                    SendShared& s, std::uint32_t* experts) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, top_k = k.c.top_k;
  std::uint32_t rows[2] = {0, 0};
  for (std::uint32_t base = from; base < to; base += kWorkers) {
    s.counted[threadIdx.x][0] = s.counted[threadIdx.x][1] = 0;
    sync_workers();
    const std::uint32_t choices = min(to - base, kWorkers) * top_k;
    std::uint32_t round = 0;
    for (std::uint32_t choice = threadIdx.x; choice < choices; choice += kWorkers, ++round) {
      const std::int32_t id = base == 0 && round == 0   ? early.ids[0]
                              : base == 0 && round == 1 ? early.ids[1]
                              : base == 0 && round == 2 ? early.ids[2]
                                                        : load_id(a, choice_at(k, base * top_k + choice), false);
      if (id < 0) continue;
      const std::uint32_t rank = k.per_rank.divide(id);
      atomicAdd(experts + id, 1);
      atomicOr(&s.counted[k.top_k.divide(choice)][rank / 32], 1u << rank % 32);
    }
    sync_workers();
    const std::uint32_t low = s.counted[threadIdx.x][0], high = s.counted[threadIdx.x][1];
    for (std::uint32_t r = 0; r < k.c.world; ++r) {
      const std::uint32_t n = __popc(__ballot_sync(~0u, (r < 32 ? low : high) >> r % 32 & 1));
      if (lane == r % 32) rows[r / 32] += n;
    }
    sync_workers();
  }
  if (rows[0] != 0) atomicAdd(&s.rows_before[lane], rows[0]);
  if (rows[1] != 0) atomicAdd(&s.rows_before[lane + 32], rows[1]);
}

// A remote peer gets its counts in a header. Whoever stores a row of its block counts it, too.
__device__ inline void write_dispatch_header(const DispatchArguments& a, std::uint32_t step, std::uint32_t peer,
                                             const SendShared& s, const std::uint32_t* experts) {
  const Common& k = a.common;
  const bool planned = a.ids == nullptr;
  const std::uint32_t first = first_expert(k.c, peer), rows = planned ? a.plan.rows[peer] : s.rows_before[peer];
  char* block = block_for(k, set_of(k.c, step), Op::Dispatch, peer);
  write_header(k, block, step, rows, 0, threadIdx.x);
  auto* counts = reinterpret_cast<std::uint32_t*>(block + sizeof(BlockHeader));
  for (std::uint32_t e = threadIdx.x; e < local_experts(k.c, peer); e += kWorkers) {
    const std::uint32_t n = planned ? a.plan.counts[first + e] : experts[first + e];
    counts[e] = n;
    if (!planned) a.plan.counts[first + e] = n;
  }
  if (threadIdx.x == 0 && !planned) a.plan.rows[peer] = rows;
  sync_workers();
  if (threadIdx.x == 0) count_stored(k, step, Op::Dispatch, peer, kComplete - rows, [&] { return rows; });
}

// A word each, like counts: what replicas must have in common. Also to itself, for the thread block that compares.
static __device__ __noinline__ void tell_replica(const DispatchArguments& a, std::uint32_t step, std::uint32_t peer,
                                                 SendShared& s) {
  const Common& k = a.common;
  const bool own = peer == k.c.rank;
  std::uint64_t digest = 0;
  if (a.ids == nullptr) {
    digest = *a.plan.ids_digest;
  } else {
    if (threadIdx.x == 0) s.digest = 0;
    sync_workers();
    for (std::uint32_t i = threadIdx.x; i < a.tokens * k.c.top_k; i += kWorkers) {
      digest += id_digest(i, load_id(a, i, own));
      if (own && a.weights != nullptr) a.plan.weights[i] = a.weights[i];
    }
#pragma unroll
    for (int i = 1; i < 32; i *= 2) digest += __shfl_xor_sync(~0u, static_cast<unsigned long long>(digest), i);
    if (threadIdx.x % 32 == 0) atomicAdd(&s.digest, static_cast<unsigned long long>(digest));
    sync_workers();
    digest = s.digest;
    if (own && threadIdx.x == 0) *a.plan.ids_digest = digest;
  }
  if (threadIdx.x >= kReplicaWords) return;
  auto* words = reinterpret_cast<std::uint64_t*>(k.peers[peer] + k.heap.counts_at(k.c, set_of(k.c, step), k.c.rank));
  const std::uint32_t part = threadIdx.x == 0 ? a.tokens : static_cast<std::uint32_t>(digest >> 21 * (threadIdx.x - 1)) & 0x1fffffu;
  linger(k, count_word(k.generation, step, part));
  store_relaxed(words + replica_words_at(k.c) + threadIdx.x, count_word(k.generation, step, part));
}

// A word each: counts say themselves which step they are of.
__device__ inline void send_counts(const DispatchArguments& a, std::uint32_t step, std::uint32_t peer, SendShared& s,
                                   const std::uint32_t* experts) {
  const Common& k = a.common;
  auto* words = reinterpret_cast<std::uint64_t*>(k.peers[peer] + k.heap.counts_at(k.c, set_of(k.c, step), k.c.rank));
  const bool planned = a.ids == nullptr;
  const std::uint32_t first = first_expert(k.c, peer);
  for (std::uint32_t i = threadIdx.x; i < 1 + local_experts(k.c, peer); i += kWorkers) {
    std::uint32_t* kept = i == 0 ? a.plan.rows + peer : a.plan.counts + first + i - 1;
    const std::uint32_t n = planned ? *kept : i == 0 ? s.rows_before[peer] : experts[first + i - 1];
    linger(k, count_word(k.generation, step, n));
    store_relaxed(words + i, count_word(k.generation, step, n));
    if (!planned) *kept = n;
  }
  // Nobody else says how many rows the dead get.
  if (peer == k.c.rank && threadIdx.x < k.c.world && (k.dead >> threadIdx.x & 1) != 0) a.plan.rows[threadIdx.x] = 0;
  if (k.slice.of > 1 && ((k.replicas | 1ull << k.c.rank) >> peer & 1) != 0) tell_replica(a, step, peer, s);
}

// The peers before r in the order in which this rank visits those in `ranks`: remote ones first, for the proxy has the longer way;
// of each kind from rank + 1 on, itself last.
__device__ inline std::uint32_t visited_before(const Common& k, unsigned long long ranks, std::uint32_t r) {
  const unsigned long long kind = is_remote(k, r) ? ranks & k.remote : ranks & ~k.remote;
  const unsigned long long below = kind & ((1ull << r) - 1);
  const unsigned long long up_to_own = kind & ((2ull << k.c.rank) - 1);  // rank 63: all ones
  const std::uint32_t before = r > k.c.rank ? __popcll(below & ~up_to_own) : __popcll(kind & ~up_to_own) + __popcll(below);
  return is_remote(k, r) ? before : before + __popcll(ranks & k.remote);
}

// This thread's choice of a unit, loaded early.
struct Choice {
  std::int32_t id = -1;
  float weight = 1.0f;
  __device__ void load(const DispatchArguments& a, std::uint32_t own) {
    const std::uint32_t at = choice_at(a.common, own);
    id = a.ids == nullptr ? a.plan.ids[own] : load_id(a, at, true);
    if (a.weights != nullptr) weight = a.weights[at];
  }
};

// Finds the places of these tokens' rows, from the ids or from the plan. Their payload waits for nothing else.
__device__ inline void place_rows(const DispatchArguments& a, std::uint32_t first, std::uint32_t n, const Choice& mine,
                                  std::uint32_t turn, SendShared& s) {
  const Common& k = a.common;
  const std::uint32_t choices = n * k.c.top_k, tid = threadIdx.x;
  const std::uint64_t at = std::uint64_t{first} * k.c.top_k;
  const bool planned = a.ids == nullptr;
  if (tid < n) s.wanted[tid][0] = s.wanted[tid][1] = 0;
  sync_workers();
  if (tid < choices) {
    s.ids[tid] = mine.id;
    s.weights[tid] = mine.weight;
    if (mine.id >= 0) {
      const std::uint32_t rank = k.per_rank.divide(mine.id);
      atomicOr(&s.wanted[k.top_k.divide(tid)][rank / 32], 1u << rank % 32);
    }
  }
  sync_workers();
  for (std::uint32_t i = tid; i < n * k.c.world; i += kWorkers) {
    const std::uint32_t token = k.world.divide(i), r = i - token * k.c.world;
    const unsigned long long ranks = s.ranks(token);
    if ((ranks >> r & 1) == 0) continue;
    const std::uint32_t place = __popcll(ranks & ((1ull << r) - 1));
    std::uint32_t* entry = a.plan.token_rows + at + token * k.c.top_k + place;
    std::uint32_t row;
    if (planned) {
      row = *entry & 0xfffffu;
    } else {
      row = s.rows_before[r];
      for (std::uint32_t j = 0; j < token; ++j) row += s.ranks(j) >> r & 1;
      *entry = r << 20 | row;
    }
    s.to[turn][token][visited_before(k, ranks, r)] = s.rows_at[r] + std::uint64_t{row} * k.dispatch.row_bytes;
  }
  if (tid < kMostTokensOfUnit) {
    s.rows[turn][tid] = tid < n ? __popcll(s.ranks(tid)) : 0;
    s.remote[turn][tid] = tid < n ? s.ranks(tid) & k.remote : 0;
  }
  sync_workers();
}

// Which of its expert's rows each choice of these tokens is: counted, or taken from the plan. The plan keeps it.
__device__ inline void number_choices(const DispatchArguments& a, std::uint32_t first, std::uint32_t n, const Choice& mine,
                                      SendShared& s, const std::uint32_t* experts) {
  const Common& k = a.common;
  const std::uint32_t tid = threadIdx.x;
  const std::uint64_t at = std::uint64_t{first} * k.c.top_k;
  if (tid < n * k.c.top_k) {
    std::uint32_t index = 0;
    if (a.ids == nullptr) {
      index = a.plan.index[at + tid];
    } else {
      if (mine.id >= 0) {
        index = experts[mine.id];
        for (std::uint32_t i = 0; i < tid; ++i) index += s.ids[i] == mine.id;
      }
      if (a.weights != nullptr && k.slice.of == 1) a.plan.weights[at + tid] = mine.weight;
      a.plan.ids[at + tid] = mine.id;
      a.plan.index[at + tid] = index;
      const std::uint32_t token = k.top_k.divide(tid);
      if (tid - token * k.c.top_k >= static_cast<std::uint32_t>(__popcll(s.ranks(token)))) a.plan.token_rows[at + tid] = kNone;
    }
    s.index[tid] = index;
  }
  sync_workers();
}

// A warp per row: its head and entries leave as one store.
__device__ inline void write_routes(const DispatchArguments& a, std::uint32_t first, std::uint32_t n, std::uint32_t turn,
                                    const SendShared& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t i = threadIdx.x / 32; i < n * k.c.world; i += kWorkerWarps) {
    const std::uint32_t token = k.world.divide(i), r = i - token * k.c.world;
    const unsigned long long ranks = s.ranks(token);
    if ((ranks >> r & 1) == 0) continue;
    const std::uint32_t choice = token * k.c.top_k + lane;
    const bool here = lane < k.c.top_k && s.ids[choice] >= 0 && k.per_rank.divide(s.ids[choice]) == r;
    const std::uint32_t choices = __ballot_sync(~0u, here);
    char* route = s.to[turn][token][visited_before(k, ranks, r)] + k.dispatch.route_at;
    if (lane == 31) *reinterpret_cast<uint2*>(route) = make_uint2(k.slice.token(first + token), choices);  // a RouteHead
    if (here) {
      const std::uint32_t place = route_place(static_cast<std::uint32_t>(s.ids[choice]) - first_expert(k.c, r), s.index[choice]);
      const std::uint32_t entry = __popc(choices & ((1u << lane) - 1));
      *reinterpret_cast<uint2*>(route + sizeof(RouteHead) + entry * sizeof(RouteEntry)) =
          make_uint2(place, __float_as_uint(s.weights[choice]));
    }
  }
}

// The word of scales at `at`, as the caller has them: anywhere in memory, by row or by column.
template <Wire wire>
__device__ inline std::uint32_t given_scales(const DispatchArguments& a, std::uint32_t token, std::uint32_t at) {
  const char* from = a.scales + token * a.scale.row;
  if (wire != Wire::MXFP8) {
    const std::uint32_t scale = *reinterpret_cast<const std::uint32_t*>(from + at * a.scale.scale);
    if (wire == Wire::FP8_UE8M0 && scale != 0 && !is_e8m0(float_of(scale))) a.common.report->notices.bad_scales = 1;
    return scale;
  }
  std::uint32_t word = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i)
    if (4 * at + i < scales_per_row(a.common.c))
      word |= std::uint32_t{*reinterpret_cast<const std::uint8_t*>(from + (4 * at + i) * a.scale.scale)} << 8 * i;
  return word;
}

template <Wire wire>
__device__ inline void write_given_scales(const DispatchArguments& a, std::uint32_t first, std::uint32_t n, std::uint32_t turn,
                                          const SendShared& s) {
  const Common& k = a.common;
  const std::uint32_t words = scale_words(k.c);
  for (std::uint32_t i = threadIdx.x; i < n * words; i += kWorkers) {
    const std::uint32_t token = i / words, at = i % words;
    const std::uint32_t word = given_scales<wire>(a, a.common.slice.token(first + token), at);
    const std::uint32_t rows = s.rows[turn][token];
    for (std::uint32_t d = 0; d < rows; ++d)
      *reinterpret_cast<std::uint32_t*>(s.to[turn][token][d] + k.dispatch.scales_at + 4 * at) = word;
  }
}

// Returns the step.
template <typename Mode>
__device__ std::uint32_t send_dispatch(const DispatchArguments& a, SendShared& s, std::uint32_t* experts) {
  const Common& k = a.common;
  const std::uint32_t tid = threadIdx.x;
  const std::uint32_t bytes = payload_bytes(k.c);
  const std::uint32_t units = k.living + ceil_div(a.own, a.tokens_per_unit);
  const auto claim = [&] {
    const unsigned long long word = atomicAdd(&k.control->dispatch, 1ull);
    if (static_cast<std::uint32_t>(word) == units + gridDim.x - 1) k.control->dispatch = ((word >> 32) + 1) << 32;
    return word;
  };

  std::uint32_t sent = 0;  // units
  std::uint32_t counted = 0;  // tokens that the counts cover
  const auto forget = [&] {
    for (std::uint32_t e = tid; e < k.c.num_experts; e += kWorkers) experts[e] = 0;
    if (tid < kMaxPeers) s.rows_before[tid] = 0;
    counted = 0;
  };
  // By the last of the workers, who have the least to do with a small step.
  const std::uint32_t from_last = kWorkers - 1 - tid;
  EarlyClosed closed;
  closed.load(k, from_last);
  EarlyIds early;
  if (a.ids != nullptr) early.load(a);
  forget();
  if (tid == 0) {
    const unsigned long long word = claim();
    s.unit = static_cast<std::uint32_t>(word);
    s.step = static_cast<std::uint32_t>(word >> 32);
    s.ended[0] = s.ended[1] = false;
    if (s.unit == 0) *a.received.step = s.step;  // the step's other phases read it there
  }
  closed.keep(k, from_last, s.closed);
  sync_workers();
  note(k, Stage::Claimed);
  const std::uint32_t step = s.step;
  if (tid < k.c.world) s.rows_at[tid] = block_for(k, set_of(k.c, step), Op::Dispatch, tid) + k.dispatch.row_at(0);
  if (k.remote != 0) signal(kStepKnown);
  bool taken = may_take_at_once(k, step, s.closed);
  if (!taken && s.unit < units) {
    if (tid == 0) s.taken = may_take_later(k, step);
    sync_workers();
    taken = s.taken;
  }
  if (tid == 0 && s.unit == 0 && taken) take_set(k, step);
  bool asked = k.remote == 0;  // whether remote peers' blocks may be written
  const auto may_send = [&] {
    if (!asked) await(kCleared);
    asked = true;
    return k.remote == 0 || s.may_send;
  };
  for (std::uint32_t unit; (unit = s.unit) < units;) {
    sync_workers();
    std::uint32_t claimed = 0;
    if (tid == 0) claimed = static_cast<std::uint32_t>(claim());  // on its way while this unit is worked on
    if (!taken) {
      if (tid == 0) s.unit = claimed;
      sync_workers();
      continue;
    }
    const bool counts = unit < k.living;
    const std::uint32_t first = counts ? a.own : (unit - k.living) * a.tokens_per_unit;
    const std::uint32_t n = min(a.own - first, a.tokens_per_unit);
    Round<Mode> next;
    Choice choice;
    if (!counts) {
      next.load(a.x + k.slice.token(first) * a.x_stride, bytes, 0);
      if (tid < n * k.c.top_k) choice.load(a, first * k.c.top_k + tid);
    }
    if (a.ids != nullptr) {
      if (first < counted) {  // this thread block had all tokens counted, for a peer
        forget();
        sync_workers();
      }
      count_tokens(a, counted, first, early, s, experts);
      counted = first;
      sync_workers();
    }
    note(k, Stage::Counted);
    if (counts) {
      const std::uint32_t peer = k.order[unit];
      if (!is_remote(k, peer))
        send_counts(a, step, peer, s, experts);
      else if (may_send())
        write_dispatch_header(a, step, peer, s, experts);
      if (tid == 0) s.unit = claimed;
      sync_workers();
      continue;
    }
    if (!may_send()) {  // all has failed, and ends; the blocks may still be read
      if (tid == 0) s.unit = claimed;
      sync_workers();
      continue;
    }
    const std::uint32_t turn = sent % 2;
    if (sent >= 2) await(kPublished + turn);  // the unit before the last: its places are used again
    place_rows(a, first, n, choice, turn, s);
    note(k, Stage::RowsPlanned);
    for (std::uint32_t i = 0; i < n; ++i) {
      const Round<Mode> current = next;
      if (i + 1 < n) next.load(a.x + k.slice.token(first + i + 1) * a.x_stride, bytes, 0);
      const std::uint32_t rows = s.rows[turn][i];
      current.store(s.to[turn][i], rows, k, step, bytes, 0);
      for (std::uint32_t at = Round<Mode>::kBytes; at < bytes; at += Round<Mode>::kBytes) {
        Round<Mode> more;
        more.load(a.x + k.slice.token(first + i) * a.x_stride, bytes, at);
        more.store(s.to[turn][i], rows, k, step, bytes, at);
      }
    }
    note(k, Stage::Stored);
    // Behind the payload, which keeps the link busy meanwhile.
    number_choices(a, first, n, choice, s, experts);
    write_routes(a, first, n, turn, s);
    if (quantised(Mode::kWire) && a.scales != nullptr) write_given_scales<Mode::kWire>(a, first, n, turn, s);
    note(k, Stage::Routed);
    signal(kStored + turn);
    ++sent;
    if (tid == 0) s.unit = claimed;
    sync_workers();
  }
  may_send();  // whoever waits at that barrier is met
  const std::uint32_t turn = sent % 2;
  if (sent >= 2) await(kPublished + turn);
  if (tid == 0) s.ended[turn] = true;
  signal(kStored + turn);
  return step;
}

// Whether the blocks of all remote peers may be written.
__device__ inline bool may_write_remote(const Common& k, std::uint32_t step) {
  bool good = true;
  for (std::uint32_t peer = threadIdx.x % 32; peer < k.c.world; peer += 32)
    if (is_remote(k, peer) && (k.dead >> peer & 1) == 0) good = may_write(k, step, Op::Dispatch, peer) && good;
  return __all_sync(~0u, good);
}

// The last warp's part. The workers have stored, and arrived at a barrier: one release covers what all of them wrote.
__device__ inline std::uint32_t publish_dispatch(const DispatchArguments& a, SendShared& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  if (k.remote != 0) {
    await(kStepKnown);
    const bool good = may_write_remote(k, s.step);
    if (lane == 0) s.may_send = good;
    __syncwarp();
    signal(kCleared);
  }
  for (std::uint32_t unit = 0;; ++unit) {
    const std::uint32_t turn = unit % 2;
    await(kStored + turn);
    if (s.ended[turn]) return s.step;
    for (std::uint32_t peer = lane; k.remote != 0 && peer < k.c.world; peer += 32) {
      std::uint32_t rows = 0;
      for (std::uint32_t i = 0; i < kMostTokensOfUnit; ++i) rows += s.remote[turn][i] >> peer & 1;
      if (rows != 0) count_stored(k, s.step, Op::Dispatch, peer, rows, [&] { return a.plan.rows[peer]; });
    }
    for (std::uint32_t i = lane; i < kMostTokensOfUnit * kMaxTopK; i += 32)
      if (i % kMaxTopK < s.rows[turn][i / kMaxTopK] && i % kMaxTopK >= __popcll(s.remote[turn][i / kMaxTopK]))
        publish(k, s.to[turn][i / kMaxTopK][i % kMaxTopK] + k.dispatch.arrival_at, arrival_word(k.generation, s.step));
    note(k, Stage::Published);
    signal(kPublished + turn);
  }
}

}  // namespace pplx::cuda
