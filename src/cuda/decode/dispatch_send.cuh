// dispatch_send: units are the counts per peer, then runs of tokens. A thread block counts what comes before its tokens, quantises
// each once, and stores its row into every peer that wants it. Rows that do not show by themselves that they have come get an
// arrival word, by the publisher: all of a unit together, while the senders are at the next unit, or receive.
#pragma once

#include <type_traits>

#include "../common/relays.cuh"
#include "../common/step.cuh"
#include "../plan/token_plan.cuh"
#include "payload.cuh"

namespace pplx::cuda {

// ---- where senders and publisher meet ----

// The senders go on while the publisher waits for their stores: a release at system scope takes as long as the link is behind.
inline constexpr std::uint32_t kAmongSenders = 1;
inline constexpr std::uint32_t kStored = 2;     // and 3, for units in turn: senders to publisher
inline constexpr std::uint32_t kPublished = 4;  // and 5: publisher to senders
inline constexpr std::uint32_t kClaimed = 6;    // publisher to senders, once: whose the block's share is
inline constexpr std::uint32_t kSendersAndPublisher = kSenders + 32;

__device__ inline void sync_senders() { barrier_sync<kSenders>(kAmongSenders); }
// One side signals, the other waits.
__device__ inline void signal(std::uint32_t barrier) {
  __threadfence_block();
  barrier_arrive<kSendersAndPublisher>(barrier);
}
__device__ inline void await(std::uint32_t barrier) { barrier_sync<kSendersAndPublisher>(barrier); }

// ---- what a thread block sends ----

// A unit whose payload is on its way, as the publisher finds it.
struct StoredUnit {
  char* row[kMostTokensOfUnit][kMaxTopK];  // each token's, in the order of ranks_before()
  std::uint32_t rank[kMostTokensOfUnit][kMaxTopK];
  unsigned long long ranks[kMostTokensOfUnit];  // that want the token, a bit each
  std::uint32_t first_row[kMaxPeers];  // the unit's, for a peer, if it has any; of remote ones
  bool by_word[kMostTokensOfUnit][kMaxTopK];  // true: the row lies beyond those that show
  bool looks_blank[kMostTokensOfUnit];
  bool ended;

  __device__ std::uint32_t rows(std::uint32_t token) const { return count_ranks(ranks[token]); }
};

struct SendShared {
  PlanShared plan;
  char* rows_at[kMaxPeers];  // where this rank's rows begin at each peer
  StoredUnit units[2];  // in turn
  ClosedWords closed;  // when this thread block began
  std::uint32_t step;
  std::uint32_t share;  // that is sent next, or kNone
  bool taken;  // the set's memory is this step's
  bool may_send;  // the blocks of remote peers may be written
  unsigned long long digest;  // sum over all tokens' ids
};

// Returns the tokens that a thread block must have counted for a unit: all of them, for a peer's counts.
__device__ inline std::uint32_t tokens_before(const DispatchArguments& a, std::uint32_t unit) {
  return unit < a.common.living ? a.own : (unit - a.common.living) * a.tokens_per_unit;
}

// Returns the caller's token that is this rank's nth.
template <bool kMappedOnly>
__device__ inline std::uint32_t token_of(const Common& k, std::uint32_t own) {
  return kMappedOnly ? own : k.slice.token(own);
}

// Returns which of a unit's tokens this warp plans: the first is the last warp's, which may have no part of the payload.
__device__ inline std::uint32_t planned_by_warp() { return kSenderWarps - 1 - threadIdx.x / 32; }

// A sender's loads before the step is known. They are of its block's own share.
template <typename Mode, bool kMappedOnly>
struct EarlyLoads {
  Payload<Mode> payload;  // the first token's
  EarlyIds counted;
  RawId id;  // this thread's choice in the unit
  float weight = 1.0f;
  PlannedToken<kMappedOnly> token;  // that this warp plans; of a single one, as far as its ids say

  __device__ void load_unit(const DispatchArguments& a, std::uint32_t unit) {
    const Common& k = a.common;
    if (unit < k.living || unit >= a.units) return;
    const std::uint32_t first = tokens_before(a, unit), n = min(a.own - first, a.tokens_per_unit);
    const std::uint32_t choices = n * k.c.top_k, lane = threadIdx.x % 32;
    // A warp has its own copy of the first token's.
    const std::uint32_t mine = n > 1 && threadIdx.x < choices ? threadIdx.x : lane;
    const std::uint32_t own = first * k.c.top_k + mine;
    id = {};
    if (mine < choices) {
      if (!kMappedOnly && a.ids == nullptr)
        id.low = static_cast<std::uint32_t>(a.plan.ids[own]);
      else
        id = load_raw_id(a, choice_at<kMappedOnly>(k, own));
    }
    payload.load(k, a.x + std::uint64_t{token_of<kMappedOnly>(k, first)} * a.x_stride, k.payload_bytes, 0);
    weight = 1.0f;
    if (mine < choices && a.weights != nullptr) weight = a.weights[choice_at<kMappedOnly>(k, own)];
  }
  // Everything that must not wait for the step, nor for what was counted.
  __device__ void prepare(const DispatchArguments& a, std::uint32_t choices, SendShared& s) {
    const Common& k = a.common;
    const bool planned = !kMappedOnly && a.ids == nullptr;
    if (!planned && is_bad(a, id)) k.report->notices.bad_ids = 1;
    const std::int32_t valid = planned ? static_cast<std::int32_t>(id.low) : valid_id<kMappedOnly>(a, id);
    if (threadIdx.x < choices) {
      s.plan.ids[threadIdx.x] = valid;
      s.plan.weights[threadIdx.x] = weight;
    }
    payload.prepare(k);
    if (choices <= k.c.top_k && planned_by_warp() == 0) token.choose(a, threadIdx.x % 32 < k.c.top_k ? valid : -1, weight);
  }
  __device__ void load(const DispatchArguments& a, std::uint32_t unit) {
    if ((kMappedOnly || a.ids != nullptr) && unit < a.units) counted.template load<kMappedOnly>(a, tokens_before(a, unit));
    load_unit(a, unit);
  }
};

// Reads the step, and whether this launch may write: the publisher's first part.
__device__ inline void read_step(const DispatchArguments& a, SendShared& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  EarlyClosed closed;
  const unsigned long long word = load_relaxed(&k.control->step);
  closed.load(k, lane);
  closed.keep(k, lane, s.closed);
  if (lane != 0) return;
  s.step = step_of(word);
  s.units[0].ended = s.units[1].ended = false;
  pass_step(k);
}

// Claims this block's own share, and finds out if it may be sent: the publisher, while the senders count.
template <bool kMappedOnly>
__device__ inline void claim_own(const DispatchArguments& a, SendShared& s) {
  const Common& k = a.common;
  const std::uint32_t step = s.step, lane = threadIdx.x % 32;
  bool mine = false;
  if (lane == 0 && blockIdx.x < a.units) mine = take_share(k, Op::Dispatch, blockIdx.x, step);
  const bool taken = may_take_set(k, step, s.closed);
  if constexpr (!kMappedOnly)
    if (k.remote != 0) {
      const bool good = DispatchExtras<kMappedOnly>::may_write_blocks(k, step);
      if (lane == 0) s.may_send = good;
    }
  if (lane == 0) {
    s.share = mine ? blockIdx.x : kNone;
    s.taken = taken;
  }
}

// ---- counts ----

template <bool kMappedOnly>
__device__ inline void send_counts(const DispatchArguments& a, std::uint32_t step, std::uint32_t peer, SendShared& s,
                                   const std::uint32_t* experts) {
  const Common& k = a.common;
  const bool planned = !kMappedOnly && a.ids == nullptr;
  const std::uint32_t set = set_of(k.c, step);
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < k.expert_vec16s; i += kSenders)
    send_vec16_of_counts<kMappedOnly>(a, step, peer, i, planned, [&](std::uint32_t e) { return experts[e]; });
  if (threadIdx.x == kSenders - 1) {
    const std::uint32_t rows = planned ? a.plan.rows[peer] : s.plan.rows_before[peer];
    if (!planned) a.plan.rows[peer] = rows;
    fuzz_delay(k, rows);
    store_tagged(k, k.peers[peer] + k.heap.rows_at(k.c, set, k.c.rank), step, rows, k.showing_rows, a.own >= k.word_rows ? 1 : 0);
  }
  // Zeroes the row counts of ranks to which no row goes.
  if (!kMappedOnly && peer == k.c.rank && threadIdx.x < k.c.world && ((k.dead | a.relays.skipped) >> threadIdx.x & 1) != 0)
    a.plan.rows[threadIdx.x] = 0;
  if constexpr (!kMappedOnly)
    if (k.slice.of > 1 && ((k.replicas | 1ull << k.c.rank) >> peer & 1) != 0)
      DispatchExtras<kMappedOnly>::tell_replica(a, step, peer, s);
}

// ---- rows ----

// Returns a token's word of scales number `at`. The caller has them anywhere in memory, by row or by column.
__device__ inline std::uint32_t given_scales(const DispatchArguments& a, std::uint32_t token, std::uint32_t at) {
  const Common& k = a.common;
  const char* from = a.scales + token * a.scale.row;
  if (k.c.wire != Wire::MXFP8) {
    const std::uint32_t scale = *reinterpret_cast<const std::uint32_t*>(from + at * a.scale.scale);
    if (k.c.wire == Wire::FP8_UE8M0 && scale != 0 && !is_e8m0(float_of(scale))) k.report->notices.bad_scales = 1;
    return scale;
  }
  std::uint32_t word = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i)
    if (4 * at + i < scales_per_row(k.c))
      word |= std::uint32_t{*reinterpret_cast<const std::uint8_t*>(from + (4 * at + i) * a.scale.scale)} << 8 * i;
  return word;
}
// Returns a token's vec16 of scales number `at`: four words.
__device__ inline uint4 given_vec16_of_scales(const DispatchArguments& a, std::uint32_t token, std::uint32_t at) {
  const std::uint32_t words = scale_words(a.common.c);
  std::uint32_t word[4] = {};
#pragma unroll
  for (std::uint32_t j = 0; j < 4; ++j)
    if (4 * at + j < words) word[j] = given_scales(a, token, 4 * at + j);
  return make_uint4(word[0], word[1], word[2], word[3]);
}

__device__ inline void write_given_scales(const DispatchArguments& a, std::uint32_t first, std::uint32_t n, StoredUnit& unit) {
  const Common& k = a.common;
  const std::uint32_t vec16s = ceil_div(scale_words(k.c), 4);
#pragma unroll 1
  for (std::uint32_t i = threadIdx.x; i < n * vec16s; i += kSenders) {
    const std::uint32_t token = i / vec16s, at = i % vec16s;
    const uint4 vec16 = given_vec16_of_scales(a, k.slice.token(first + token), at);
    if (is_blank(vec16)) unit.looks_blank[token] = true;
    for (std::uint32_t d = 0; d < unit.rows(token); ++d) store_vec16(unit.row[token][d] + k.dispatch.scales_at + 16 * at, vec16);
  }
}

// Writes the route of one row: a warp, a lane for each of its token's choices.
template <bool kMappedOnly>
__device__ inline void write_route(const DispatchArguments& a, std::uint32_t step, std::uint32_t own, std::uint32_t rank,
                                   const PlannedToken<kMappedOnly>& t, char* row) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  if constexpr (!kMappedOnly)
    if (is_relayed(k, rank))
      return DispatchExtras<kMappedOnly>::write_node_route(a, own, t.rank == rank, static_cast<std::uint32_t>(t.id), t.index, t.weight,
                                                           row);
  if (lane >= k.c.top_k) return;
  const std::uint32_t expert = static_cast<std::uint32_t>(t.id) - first_expert_of(k, rank);
  store_tagged(k, row + k.dispatch.route_at + 16 * lane, step, t.rank == rank ? route_place(expert, t.index) : kNowhere,
               __float_as_uint(t.weight), token_of<kMappedOnly>(k, own));
}

// Finds the rows of a unit's nth token, behind those of its earlier tokens, and tells all of them: one warp.
template <bool kMappedOnly>
__device__ inline void find_rows(const DispatchArguments& a, std::uint32_t nth, const SendShared& s, StoredUnit& unit,
                                 PlannedToken<kMappedOnly>& t) {
  const Common& k = a.common;
#pragma unroll
  for (std::uint32_t i = 0; i < t.kRanksOfLane; ++i) {
    const std::uint32_t rank = threadIdx.x % 32 + 32 * i;
    if (!t.wanted_by(rank)) continue;
    std::uint32_t earlier = 0;
    for (std::uint32_t j = 0; j < nth; ++j) earlier += unit.ranks[j] >> rank & 1;
    if (kMappedOnly || a.ids != nullptr) t.row[i] = s.plan.rows_before[rank] + earlier;
    const std::uint32_t place = ranks_before<kMappedOnly>(k, t.ranks, rank);
    unit.row[nth][place] = s.rows_at[rank] + std::uint64_t{t.row[i]} * k.dispatch.row_bytes;
    unit.rank[nth][place] = rank;
    unit.by_word[nth][place] = t.row[i] >= k.showing_rows;
    if (!kMappedOnly && earlier == 0) unit.first_row[rank] = t.row[i];
  }
}

// Sends the tokens [first, first + n) of a unit: a warp plans each, all store its payload. early: has prepared the first one.
template <typename Mode, bool kMappedOnly>
__device__ inline void send_tokens(const DispatchArguments& a, std::uint32_t step, std::uint32_t first, std::uint32_t n,
                                   EarlyLoads<Mode, kMappedOnly>& early, SendShared& s, const std::uint32_t* experts,
                                   StoredUnit& unit) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, planned = planned_by_warp();
  const bool counts = kMappedOnly || a.ids != nullptr;
  // Parts of tokens that are on their way in while one is stored.
  constexpr int kAhead = kMappedOnly && sizeof(Payload<Mode>) <= kBytesOfPart ? kPartsAhead : 1;
  constexpr int kRowsTogether = kMappedOnly ? 2 : 1;  // the general kernel has no registers for more
  Payload<Mode> ahead[kAhead];
  std::uint32_t asked = 0, asked_at = 0;  // token and byte of the last of them
  const auto ask = [&](Payload<Mode>& part) {
    asked_at += Payload<Mode>::kBytes;
    if (asked_at >= k.payload_bytes) ++asked, asked_at = 0;
    if (asked < n) part.load(k, a.x + std::uint64_t{token_of<kMappedOnly>(k, first + asked)} * a.x_stride, k.payload_bytes, asked_at);
  };
#pragma unroll
  for (int i = 0; i + 1 < kAhead; ++i) ask(ahead[i]);
  PlannedToken<kMappedOnly>& t = early.token;
  if (planned < n) {
    const std::uint32_t at = planned * k.c.top_k + lane;
    if (n > 1) t.choose(a, lane < k.c.top_k ? s.plan.ids[at] : -1, lane < k.c.top_k ? s.plan.weights[at] : 0.0f);
    if (!counts) take_from_plan(a, first + planned, t);
    if (lane == 0) unit.ranks[planned] = t.ranks;
  }
  if (n > 1) sync_senders();
  if (planned < n) find_rows(a, planned, s, unit, t);
  sync_senders();
  if (planned < n) {
    if (counts) count_earlier(a, planned, s.plan, experts, t);
#pragma unroll 1
    for (std::uint32_t d = 0; d < t.count(); ++d) write_route(a, step, first + planned, unit.rank[planned][d], t, unit.row[planned][d]);
    if (counts) keep_in_plan(a, first + planned, t);
  }
#pragma unroll 1
  for (std::uint32_t i = 0, at = 0;;) {
    const std::uint32_t rows = count_ranks(static_cast<typename PlannedToken<kMappedOnly>::Ranks>(unit.ranks[i]));
    ask(ahead[kAhead - 1]);
    Payload<Mode>& payload = early.payload;
    if (!payload.shows(k.payload_bytes, at)) unit.looks_blank[i] = true;
#pragma unroll kRowsTogether
    for (std::uint32_t d = 0; d < rows; ++d) {
      fuzz_delay(k, std::uint64_t{step} << 32 | unit.rank[i][d] << 24 | at);
      payload.store(k, unit.row[i][d], k.payload_bytes, at);
    }
    at += Payload<Mode>::kBytes;
    if (at >= k.payload_bytes) ++i, at = 0;
    if (i == n) break;
    ahead[0].prepare(k);
    payload = ahead[0];
#pragma unroll
    for (int j = 1; j < kAhead; ++j) ahead[j - 1] = ahead[j];
  }
  mark_stage(k, step, Stage::Stored);
}

// A thread block's progress.
struct Sending {
  std::uint32_t counted = 0;  // tokens
  std::uint32_t sent = 0;  // units of tokens
  bool early = true;  // the early ids are of the tokens that are counted next
  bool claimed = false;  // the publisher has said whose the first share is
};

__device__ inline void forget_counts(const Common& k, SendShared& s, std::uint32_t* experts) {
#pragma unroll 1
  for (std::uint32_t e = threadIdx.x; e < k.c.num_experts; e += kSenders) experts[e] = 0;
  if (threadIdx.x < kMaxPeers) s.plan.rows_before[threadIdx.x] = 0;
}

// Counts up to a unit, and prepares what was loaded: before the senders meet.
template <typename Mode, bool kMappedOnly>
__device__ inline void prepare_unit(const DispatchArguments& a, std::uint32_t unit, Sending& sending,
                                    EarlyLoads<Mode, kMappedOnly>& early, SendShared& s, std::uint32_t* experts) {
  const Common& k = a.common;
  const std::uint32_t tid = threadIdx.x, end = tokens_before(a, unit);
  if (end < sending.counted) {  // all tokens were counted, for a peer, or for a later share
    sync_senders();
    forget_counts(k, s, experts);
    sending.counted = 0;
    sync_senders();
  }
  if (kMappedOnly || a.ids != nullptr)
    count_tokens<kMappedOnly>(a, sending.counted, end, sending.early, early.counted, s.plan, experts);
  sending.counted = end;
  sending.early = false;
  if (unit < k.living) return;
  if (sending.sent >= 2) await(kPublished + sending.sent % 2);  // the unit before the last: its place is used again
  if (tid < kMostTokensOfUnit) {
    s.units[sending.sent % 2].looks_blank[tid] = false;
    s.units[sending.sent % 2].ranks[tid] = 0;
  }
  early.prepare(a, min(a.own - end, a.tokens_per_unit) * k.c.top_k, s);
}

// Sends a unit, once the senders have met.
template <typename Mode, bool kMappedOnly>
__device__ inline void send_unit(const DispatchArguments& a, std::uint32_t step, std::uint32_t unit, Sending& sending,
                                 EarlyLoads<Mode, kMappedOnly>& early, SendShared& s, std::uint32_t* experts) {
  const Common& k = a.common;
  if (unit < k.living) {
    const std::uint32_t peer = k.order[unit];
    if (kMappedOnly || !is_remote(k, peer))
      send_counts<kMappedOnly>(a, step, peer, s, experts);
    else if constexpr (!kMappedOnly)
      if (s.may_send && (a.relays.skipped >> peer & 1) == 0) DispatchExtras<kMappedOnly>::write_header(a, step, peer, s, experts);
    mark_stage(k, step, Stage::Counted);
    return;
  }
  if (!kMappedOnly && k.remote != 0 && !s.may_send) return;  // all has failed, and ends; the blocks may still be read
  const std::uint32_t turn = sending.sent++ % 2, first = tokens_before(a, unit), n = min(a.own - first, a.tokens_per_unit);
  send_tokens<Mode, kMappedOnly>(a, step, first, n, early, s, experts, s.units[turn]);
  if (std::is_same_v<Mode, AsIs> && a.scales != nullptr) write_given_scales(a, first, n, s.units[turn]);
  mark_stage(k, step, Stage::Routed);
  signal(kStored + turn);
}

// Sends the units of a share: all senders of the thread block together.
template <typename Mode, bool kMappedOnly>
__device__ inline void send_share(const DispatchArguments& a, std::uint32_t step, std::uint32_t share, Sending& sending,
                                  EarlyLoads<Mode, kMappedOnly>& early, SendShared& s, std::uint32_t* experts) {
  const Common& k = a.common;
  for (std::uint32_t unit = share; unit < a.units; unit += gridDim.x) {
    prepare_unit(a, unit, sending, early, s, experts);
    if (sending.claimed)
      sync_senders();
    else
      await(kClaimed);
    sending.claimed = true;
    if (s.share != share || !s.taken) return;
    if (unit == 0 && threadIdx.x == 0) {
      *a.received.step = step;  // the step's other phases read it there
      take_set(k, step);
    }
    mark_stage(k, step, Stage::RowsPlanned);
    send_unit<Mode, kMappedOnly>(a, step, unit, sending, early, s, experts);
    if (unit + gridDim.x >= a.units) return;
    early.load_unit(a, unit + gridDim.x);
    sync_senders();
  }
}

// Sends this block's share, then untaken ones: the senders' part of a launch.
template <typename Mode, bool kMappedOnly>
__device__ inline void send_dispatch(const DispatchArguments& a, EarlyLoads<Mode, kMappedOnly>& early, SendShared& s,
                                     std::uint32_t* experts) {
  const Common& k = a.common;
  const std::uint32_t step = s.step, shares = min(gridDim.x, a.units);
  if (threadIdx.x < k.c.world)
    s.rows_at[threadIdx.x] = block_for<kMappedOnly>(k, set_of(k.c, step), Op::Dispatch, threadIdx.x) + k.dispatch.row_at(0);
  Sending sending;
  std::uint32_t share = blockIdx.x;
  while (share != kNone) {
    send_share<Mode, kMappedOnly>(a, step, share, sending, early, s, experts);
    if (!sending.claimed) await(kClaimed);
    sending.claimed = true;
    if (!s.taken) break;
    sending.early = false;  // early loads are for the own share alone
    sync_senders();
    if (threadIdx.x / 32 == 0) {
      const std::uint32_t next = take_another_share(k, Op::Dispatch, step, shares);
      if (threadIdx.x == 0) s.share = next;
    }
    sync_senders();
    share = s.share;
    if (share != kNone) early.load_unit(a, share);
  }
  const std::uint32_t turn = sending.sent % 2;
  if (sending.sent >= 2) await(kPublished + turn);
  if (threadIdx.x == 0) s.units[turn].ended = true;
  signal(kStored + turn);
}

// The publisher's part of a launch. Senders have stored, and arrived at a barrier: one release covers what all of them wrote.
template <bool kMappedOnly>
__device__ inline void publish_dispatch(const DispatchArguments& a, SendShared& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  claim_own<kMappedOnly>(a, s);
  __syncwarp();
  signal(kClaimed);
  for (std::uint32_t n = 0;; ++n) {
    const std::uint32_t turn = n % 2;
    await(kStored + turn);
    const StoredUnit& unit = s.units[turn];
    if (unit.ended) return;
    if constexpr (!kMappedOnly)
      if (k.remote != 0) DispatchExtras<kMappedOnly>::count_remote_rows(a, s.step, unit);
    bool any = false;
    for (std::uint32_t i = lane; i < kMostChoicesOfUnit; i += 32) {
      const std::uint32_t token = i / kMaxTopK, nth = i % kMaxTopK;
      if (nth >= unit.rows(token) || (!unit.by_word[token][nth] && !unit.looks_blank[token])) continue;
      if (!kMappedOnly && is_remote(k, unit.rank[token][nth])) continue;
      publish(k, unit.row[token][nth] + k.dispatch.arrival_at, arrival_word(k.generation, s.step));
      any = true;
    }
    if (__any_sync(~0u, any)) mark_stage(k, s.step, Stage::Published);
    signal(kPublished + turn);
  }
}

}  // namespace pplx::cuda
