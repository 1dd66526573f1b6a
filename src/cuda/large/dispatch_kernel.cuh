// The kernel of a large dispatch, of whole blocks and of pieces: one launch, or one per half.
#pragma once

#include "receive.cuh"
#include "../extras/hooks.cuh"
#include "../host/launch_table.h"
#include "../plan/rank_plan.cuh"
#include "../remote/pass_on_counts.cuh"
#include "../rounds/dispatch.cuh"
#include "store.cuh"
#include "route.cuh"

namespace pplx::cuda {
namespace {

// Warps with roles, most of them workers. A warp that has nothing to send, or no more, receives.
inline constexpr std::uint32_t kDealer = kWorkers - 2, kLoader = kWorkers - 1, kFirstStorer = kDealer - kStorers;
inline constexpr std::uint32_t kCounter = kWorkers + 1, kPlacer = kWorkers + 2, kTeller = kWorkers + 3;
inline constexpr std::uint32_t kPasser = kQuantisers;  // where there are remote peers
static_assert(kPasser < kFirstStorer && kTeller + 1 == kLargeWarps, "all have a warp");

__device__ inline bool is_storer(std::uint32_t warp) { return warp >= kFirstStorer && warp < kDealer; }

template <bool kRounds>
struct DispatchShared {
  LargePlan plan;
  ReceiveShared receive;
  CarriedRuns runs;
  char* rows_at[kMaxPeers];  // where this rank's rows begin at each peer
  Once sent;  // all that this thread block sends
  bool last;  // thread block to leave
  SendRings rings;
};
template <>
struct DispatchShared<true> : DispatchShared<false> {
  RoundPlan rounds;
  RoundRows received[kLargeWarps];
};

// The first chunk of a chunk's round; without rounds the chunk itself.
template <bool kRounds>
__device__ inline std::uint32_t first_of_round(const DispatchArguments& a, std::uint32_t chunk) {
  return kRounds ? chunk - chunk % a.pieces.chunks : chunk;
}

// A worker's part of counting, and of adding up what comes before the block's first chunk, or its round.
template <bool kRounds>
__device__ inline void count_chunks(const DispatchArguments& a, LargePlan& s, std::uint32_t first, std::uint32_t* sums, char* memory) {
  {
    const SpanTimer spends(a.common, Span::Counting);
    for (std::uint32_t c = first; c < a.chunks; c += kWorkers * gridDim.x)
      if (take_chunk(a, s.step, c)) count_chunk(a, s.step, c, memory, c == first);
  }
  if (s.first_chunk >= a.chunks) return;
  const SpanTimer spends(a.common, Span::Summing);
  // A worker's chunks lie together, so that it looks at few lines.
  const std::uint32_t worker = threadIdx.x / 32, end = first_of_round<kRounds>(a, s.first_chunk);
  sum_chunks(a, s.step, end * worker / kWorkers, end * (worker + 1) / kWorkers, sums, memory);
}

// Plans chunks: a planner whose block has summed what comes before its first chunk, or that chunk's round. It has loaded the
// chunk. In rounds a send half plans what it leaves to the receive half, too. memory: counting_bytes() of its own.
template <bool kRounds>
__device__ inline void plan_chunks(const DispatchArguments& a, DispatchShared<kRounds>& shared, LoadedChunk& loaded,
                                   std::uint32_t* sums, char* memory) {
  const Common& k = a.common;
  LargePlan& s = shared.plan;
  const std::uint32_t lane = threadIdx.x % 32, step = s.step;
  const bool given = a.ids == nullptr, numbers = !kRounds && numbers_rows(a);
  const std::uint32_t end = end_of_chunks<kRounds>(a), all = given ? end : a.chunks;
  std::uint32_t* const rows = sums + k.c.num_experts;
  Stretch stretch(a, s.first_stretch);
  std::uint32_t number = kRounds ? s.first_chunk : next_chunk<false>(a, stretch), counted = first_of_round<kRounds>(a, number);
  if (s.first_stretch == 0 && begins_step<kRounds>(a)) {
    if (lane == 0) {
      *a.received.step = step;  // the step's other phases read it there
      take_set(k, step);
    }
    if constexpr (kRounds)
      if (given || a.chunks == 0) tell_all_rounds(a, step);
    if (!kRounds && given) send_all_counts(a, step);
    if (numbers) publish_row_counts(k, step, rows);
    __syncwarp();
    if (numbers && lane < k.c.world) {
      a.plan.rows[lane] = rows[lane];
      rows[lane] = 0;
    }
    __syncwarp();
  }
  std::uint32_t round = kNone;
  bool sends = true;  // there are chunks to send
  for (std::uint32_t n = 0;; n += sends ? 1 : 0) {
    const bool ends = number >= all;
    const ChunkChoices chunk(a, number);
    const std::uint32_t next = ends ? number : next_chunk<kRounds>(a, stretch);
    if (n == 0 && !ends && sends && lane == 0) tell_bounds<kRounds>(a, s, 1, next);
    if constexpr (kRounds)
      if (!ends && number / a.pieces.chunks != round) {
        round = number / a.pieces.chunks;
        enter_round(a, step, number, counted, shared.rounds, sums, memory);
      }
    if (!ends && counted != number) {  // none, within a stretch
      if (numbers)
        count_rows_of_ranks<OneId, 2>(a, counted * a.tokens_per_chunk, number * a.tokens_per_chunk, 0, 1, rows);
      else if (!given)
        sum_chunks(a, step, counted, number, sums, memory);
    }
    __syncwarp();
    if (n >= 2 && sends) await_turn(k, Span::AwaitingPlaceOut, s.used + n % 2, n / 2 - 1);
    if (n >= 2 && sends && lane == 0) tell_bounds<kRounds>(a, s, n, number);
    PlannedChunk& planned = s.chunks[n % 2];
    if constexpr (kRounds)
      if (!ends) place_round(a, step, round, n, shared.rounds);
    if (!ends && given) copy_chunk(a, number, &planned);
    if (!ends && !given) {
      const SpanTimer spends(k, Span::PlacingChunks);
      std::int32_t* const ids = ChunkMarks(k, memory).ids;
      loaded.keep(a, chunk, ids, planned);
      if (next < all) loaded.load(a, ChunkChoices(a, next));
      __syncwarp();
      if (numbers)
        number_choices(k, chunk, ids, rows, &planned);
      else
        place_choices(a, chunk, memory, sums, &planned);
      const std::uint64_t choice = std::uint64_t{chunk.first} * k.c.top_k;
      for (std::uint32_t i = lane; kRounds && i < chunk.all; i += 32)  // the receive half sends some of it
        keep_choice(a, choice + i, planned.id[i], planned.index[i], planned.row[i], planned.weight[i]);
    }
    __syncwarp();
    if (lane == 0 && sends) mbarrier_arrive(s.planned + n % 2);
    if (numbers ? ends : n == 0 && !given) count_all(a, step, memory);
    if (ends) return;
    if constexpr (kRounds) sends = number < end;
    counted = number + 1;
    number = next;
  }
}

// Launched shared memory: sums of what comes before a chunk, counts of the planner's own, the places of experts, rings, and
// counts of the placer's own.
struct DispatchMemory {
  std::uint32_t counts, places, rings, placer, bytes;  // where each begins; all

  constexpr explicit DispatchMemory(const Config& c)
      : counts(4 * chunk_columns(c)),
        places(counts + counting_bytes(c)),
        rings(static_cast<std::uint32_t>(align_up(places + 4ull * (c.world + 1) * kNumbersOfVec16 * expert_vec16s(c), kLine))),
        placer(rings + kRingBytes),
        bytes(placer + counting_bytes(c)) {}
};

// Initialises a launch's barriers, before the first `__syncthreads`.
template <typename Mode>
__device__ inline void prepare(const Common& k, DispatchShared<false>& s) {
  if (threadIdx.x == 0) {
    s.plan.claimed.init();
    s.receive.rows_known.init();
    s.receive.placed.init();
    s.receive.next = 0;
    s.sent.init();
    s.runs.known.init();
  }
  if (threadIdx.x < kMaxPeers) s.receive.choices[threadIdx.x] = 0;
  if (threadIdx.x == 32 * kWorkers)
    for (std::uint32_t i = 0; i < 2; ++i) {
      mbarrier_init(s.plan.known + i, 1);
      mbarrier_init(s.plan.planned + i, 1);
      mbarrier_init(s.plan.used + i, 2);  // the loader and the dealer
    }
  if (threadIdx.x / 32 == kTeller) init_rings<Mode>(k, s.rings);
}

// Until there is nothing more to send, or nothing may be sent.
template <typename Mode, bool kHooks, bool kRounds>
__device__ inline void send_large(const DispatchArguments& a, DispatchShared<kRounds>& s, const Experts& experts, char* launched,
                                  std::uint32_t* sums) {
  const Common& k = a.common;
  const DispatchMemory at(k.c);
  char *const in = launched + at.rings, *const out = in + kTokensInBytes;
  const std::uint32_t warp = threadIdx.x / 32;
  if (is_planner()) {
    claim_set<kRounds, kHooks>(a, s.plan);
    if (!s.plan.taken) return;
    LoadedChunk loaded;
    if (a.ids != nullptr) loaded.load(a, ChunkChoices(a, s.plan.first_chunk));
    barrier_sync<kPlanners>(kAmongPlanners);
    const SpanTimer plans(k, Span::Planning);
    plan_chunks<kRounds>(a, s, loaded, sums, launched + at.counts);
  } else if (is_worker()) {
    TokenLoader<Mode> loader(a, s.plan, s.rings, in);
    // Tokens come while chunks are counted, where there is room for both.
    const bool room = kWorkers * counting_bytes(k.c) <= kRowsOutBytes;
    char* const counting = (room ? out : in) + warp * counting_bytes(k.c);
    // The first chunk that this worker counts, if no warp has begun it: its ids come while the launch begins.
    const std::uint32_t first = warp * gridDim.x + blockIdx.x;
    const bool numbers = !kRounds && numbers_rows(a), counts = a.ids != nullptr && !numbers;
    ChunkIds ids;
    if (counts && first < a.chunks) ids.load(a, ChunkChoices(a, first));
    if (room && warp == kLoader) loader.ask_early();
    if (numbers)
      count_rows_before(a, s.plan, sums);
    else if (counts && first < a.chunks)
      ids.keep(a, ChunkChoices(a, first), true, ChunkMarks(k, counting).ids);
    await_turn(k, Span::AwaitingClaims, &s.plan.claimed.word, 0);
    if (!s.plan.taken) {
      if (warp == kLoader) loader.drop();
      return;
    }
    if (counts) count_chunks<kRounds>(a, s.plan, first, sums, counting);
    if (!kRounds && threadIdx.x < k.c.world)
      s.rows_at[threadIdx.x] = block_for<!kHooks>(k, set_of(k.c, s.plan.step), Op::Dispatch, threadIdx.x) + k.dispatch.row_at(0);
    fence_shared_copies();  // where chunks were counted, tokens come
    barrier_sync<kPlanners>(kAmongPlanners);
    if constexpr (kQuantises<Mode>)
      if (warp < kQuantisers) quantise_tokens<Mode>(k, s.rings, in, out, warp);
    if (warp == kLoader) loader.load();
    if (is_storer(warp)) RowStorer<Mode>(a, s.rings, kQuantises<Mode> ? out : in, warp - kFirstStorer).store();
    char* const* rows_at = s.rows_at;
    if constexpr (kRounds) rows_at = s.rounds.rows_at[0];
    if (warp == kDealer) TokenDealer<kHooks, kRounds>(a, s.plan, s.receive, experts, rows_at, s.rings).deal();
  } else if (warp == kTeller) {
    s.plan.claimed.wait();
  } else if (warp == kPlacer && !kRounds && numbers_rows(a)) {
    s.plan.claimed.wait();
    if (s.plan.taken) count_choices(a, s.plan.step, launched + at.placer);
  }
  if ((warp == kTeller || is_storer(warp)) && s.plan.taken) tell_of_rows<kHooks, kRounds>(a, s.plan.step, s.rings);
  if (warp == kTeller) s.sent.set();
}

template <bool kHooks, bool kRounds>
__device__ inline void receive_large(const DispatchArguments& a, std::uint32_t step, DispatchShared<kRounds>& s, const Experts& experts) {
  const std::uint32_t warp = threadIdx.x / 32;
  RowCarrier<kHooks, kRounds> carrier(a, step, s.receive, &s.runs, experts);
  if (warp == kCounter) {
    count_rows(a, step, s.receive);
    if constexpr (!kRounds) carrier.find_runs();
  }
  if (warp == kPlacer) place_rows<true, kHooks>(a, step, s.receive, experts);
  if (warp == kTeller && counts_here(a.common)) count_waits(a, step, s.receive);
  if constexpr (kHooks)
    if (warp == kPasser && a.common.remote != 0) has_relays(a.common) ? pass_on_nodes(a, step) : pass_on_dispatches<kRounds>(a, step);
  if constexpr (kRounds) {
    carrier.receive_rounds(s.received[warp], warp == kCounter && reports_counts());
    return;
  }
  if (a.send) s.plan.claimed.wait();
  if (a.send && a.stretches < gridDim.x && s.plan.first_chunk < a.chunks) s.sent.wait();  // other blocks receive from the start
  carrier.receive(!kHooks && a.send && s.plan.taken ? &s.rings.kept : nullptr);
}

}  // namespace

namespace large {
namespace {

// kHooks: the general kernel, which raises words of hooks where there are any, and has peers of other nodes.
template <typename Mode, bool kHooks, bool kRounds>
__global__ void __launch_bounds__(kLargeThreads, 1) dispatch(const __grid_constant__ DispatchArguments a) {
  PPLX_LAUNCHED_SHARED(words);
  PPLX_SHARED(DispatchShared<kRounds>, s);
  const Common& k = a.common;
  PPLX_SHARED(LaunchTime::Begun, begun);
  const LaunchTime time(k, begun, kTeller);
  mark_stage(k, 0, Stage::DispatchBegins);
  SpanTimer::begin();
  char* const launched = reinterpret_cast<char*>(words);
  prepare<Mode>(k, s);
  for (std::uint32_t i = threadIdx.x; a.send && i < chunk_columns(k.c); i += kLargeThreads) words[i] = 0;
  const Experts experts{reinterpret_cast<std::uint32_t*>(launched + DispatchMemory(k.c).places), k.expert_vec16s};
  std::uint32_t step = 0;
  const auto is_open = [&] {
    const bool open = find_open_step(a, step);
    if constexpr (kHooks)
      if (!open) HookWords<kHooks>::raise_after_failure(a);
    return open;
  };
  if (kRounds && !a.pieces.begins && !is_open()) return;
  if (a.send) {
    {
      const SpanTimer begins(k, Span::Beginning);
      if (is_planner()) begin_plan<kRounds>(a, s.plan, step);
      __syncthreads();
    }
    step = s.plan.step;
    time.keep(Op::Dispatch, step, true, a.recv);
    send_large<Mode, kHooks, kRounds>(a, s, experts, launched, words);
  } else if (!kRounds && !is_open()) {
    return;
  } else {
    time.keep(Op::Dispatch, step, false, true);
  }
  if (a.recv) {
    receive_large<kHooks, kRounds>(a, step, s, experts);
    if constexpr (kHooks) HookWords<kHooks>::raise_after_failure(a);
  }
  if (a.send) leave_plan(a, s.last);
  mark_stage(k, step, Stage::DispatchEnds);
  SpanTimer::end(k);
  time.end(Op::Dispatch, step, a.send, a.recv, true);
}

}  // namespace

}  // namespace large
}  // namespace pplx::cuda
