// The plan of a large dispatch, on which thread blocks share the work (docs/design.md, Plan). One warp counts a chunk's choices by
// expert, and its rows by rank, for all blocks. The counts before a chunk are a sum over chunks.
//
// A warp waits only for chunks that a running warp counts: it counts one itself that no warp has begun. A thread block that begins
// late finds its stretch of chunks taken, and only receives. In rounds the first `stretches` thread blocks claim single chunks: a
// round has room when all earlier ones have been sent.
#pragma once

#include "../common/step.cuh"
#include "../large/tuning.h"
#include "token_plan.cuh"
#include "../rounds/remote.cuh"

namespace pplx::cuda {

// A chunk whose tokens have their places, for the workers that send them.
struct PlannedChunk {
  std::int32_t id[kMostChoicesOfChunk];
  std::uint32_t index[kMostChoicesOfChunk];  // as in PlanView
  std::uint32_t row[kMostChoicesOfChunk];  // token_rows, as there
  float weight[kMostChoicesOfChunk];
};

// Known before the places: tokens are asked for at once.
struct ChunkBounds {
  std::uint32_t first, tokens;  // no tokens: there is no other chunk
};

struct LargePlan {
  ClosedWords closed;
  std::uint32_t step;
  std::uint32_t first_stretch, first_chunk;  // that this thread block sends
  bool taken;  // the set's memory is this step's
  Once claimed;  // taken
  std::uint64_t known[2], planned[2], used[2];  // turns of the chunks
  ChunkBounds bounds[2];
  PlannedChunk chunks[2];
};

// Named barriers of the block: its workers and its planner.
inline constexpr std::uint32_t kAmongPlanners = 1, kPlanners = 32 * (kWorkers + 1);

__device__ inline bool is_worker() { return threadIdx.x < 32 * kWorkers; }
__device__ inline bool is_planner() { return threadIdx.x / 32 == kWorkers; }

// The choices of a chunk, in the order in which the caller gave them: lane i of a warp has choices i, i + 32 ...
struct ChunkChoices {
  static constexpr std::uint32_t kOfLane = kMostChoicesOfChunk / 32;
  std::uint32_t first, tokens, all;  // tokens; all choices

  __device__ ChunkChoices(const DispatchArguments& a, std::uint32_t chunk)
      : first(chunk * a.tokens_per_chunk),
        tokens(first < a.own ? min(a.own - first, a.tokens_per_chunk) : 0),
        all(tokens * a.common.c.top_k) {}
  __device__ static std::uint32_t at(std::uint32_t i) { return 32 * i + threadIdx.x % 32; }
  __device__ std::uint64_t of_step(const DispatchArguments& a, std::uint32_t i) const {
    return std::uint64_t{first} * a.common.c.top_k + at(i);
  }
};

// A warp's shared memory for counting or placing a chunk: tokens of each column and ranks of each token, a bit each; valid ids.
struct ChunkMarks {
  std::uint32_t *tokens, *ranks;  // [columns]; [tokens][2]
  std::int32_t* ids;

  __device__ ChunkMarks(const Common& k, char* memory)
      : tokens(reinterpret_cast<std::uint32_t*>(memory)),
        ranks(tokens + chunk_columns(k.c)),
        ids(reinterpret_cast<std::int32_t*>(ranks + 2 * kMostTokensOfChunk)) {}
  __device__ void clear(const Common& k) const {
    for (std::uint32_t i = threadIdx.x % 32; i < chunk_columns(k.c) + 2 * kMostTokensOfChunk; i += 32) tokens[i] = 0;
    __syncwarp();
  }
};
constexpr std::uint32_t counting_bytes(const Config& c) { return 4 * (chunk_columns(c) + 2 * kMostTokensOfChunk + kMostChoicesOfChunk); }

// Marks the tokens of each rank, from the ranks of each token: choices that marked their rank's word would wait for each other.
__device__ inline void mark_ranks(const Common& k, const ChunkMarks& marks) {
  static_assert(kMostTokensOfChunk == 32, "a lane has a token");
  const std::uint32_t lane = threadIdx.x % 32, low = marks.ranks[2 * lane], high = marks.ranks[2 * lane + 1];
  for (std::uint32_t rank = 0; rank < k.c.world; ++rank) {
    const std::uint32_t tokens = __ballot_sync(~0u, ((rank < 32 ? low : high) >> rank % 32 & 1) != 0);
    if (lane == rank % 32) marks.tokens[k.c.num_experts + rank] = tokens;
  }
  __syncwarp();
}

// Keeps the nth choice of this rank's tokens in the plan, for further dispatches and this one's combine.
__device__ inline void keep_choice(const DispatchArguments& a, std::uint64_t n, std::int32_t id, std::uint32_t index,
                                   std::uint32_t entry, float weight) {
  a.plan.ids[n] = id;
  a.plan.index[n] = index;
  a.plan.token_rows[n] = entry;
  if (a.weights != nullptr) a.plan.weights[n] = weight;
}

// Ids on their way from the caller's memory.
struct ChunkIds {
  RawId ids[ChunkChoices::kOfLane];

  __device__ void load(const DispatchArguments& a, const ChunkChoices& chunk) {
#pragma unroll
    for (std::uint32_t i = 0; i < ChunkChoices::kOfLane; ++i)
      if (chunk.at(i) < chunk.all) ids[i] = load_raw_id(a, chunk.of_step(a, i));
  }
  __device__ void keep(const DispatchArguments& a, const ChunkChoices& chunk, bool report, std::int32_t* kept) const {
#pragma unroll
    for (std::uint32_t i = 0; i < ChunkChoices::kOfLane; ++i) {
      if (chunk.at(i) >= chunk.all) continue;
      if (report && is_bad(a, ids[i])) a.common.report->notices.bad_ids = 1;
      kept[chunk.at(i)] = valid_id<false>(a, ids[i]);
    }
  }
};

// True if rows have their numbers without other blocks' counts (plan/rank_plan.cuh).
inline constexpr std::uint32_t kMostNumberedRanks = 8;
__device__ inline bool numbers_rows(const DispatchArguments& a) {
  const Common& k = a.common;
  return a.ids != nullptr && k.c.layout == LayoutKind::Compact && k.c.world <= kMostNumberedRanks && !k.heap.in_pieces && k.remote == 0;
}

// Returns the rank to which rows for an expert go.
__device__ inline std::uint32_t rank_of_rows(const DispatchArguments& a, const Divider& per_rank, std::int32_t id) {
  const std::uint32_t rank = per_rank.divide(static_cast<std::uint32_t>(id));
  return has_relays(a.common) ? a.relays.rep[rank] : rank;
}

// ---- counts of chunks ----

// Marks a chunk's choices, by one warp: each calls mark(its expert's column, its token). Then marks the ranks of each token.
template <typename Mark>
__device__ inline void mark_choices(const DispatchArguments& a, const ChunkChoices& chunk, const ChunkMarks& marks, const Mark& mark) {
  marks.clear(a.common);
  const Divider per_rank = a.common.per_rank, top_k = a.common.top_k;
  // No step waits for the one before.
#pragma unroll
  for (std::uint32_t i = 0; i < ChunkChoices::kOfLane; ++i) {
    const std::uint32_t at = chunk.at(i);
    const std::int32_t id = at < chunk.all ? marks.ids[at] : -1;
    if (id < 0) continue;
    const std::uint32_t rank = rank_of_rows(a, per_rank, id), token = top_k.divide(at);
    mark(marks.tokens + id, token);
    atomicOr(marks.ranks + 2 * token + rank / 32, 1u << rank % 32);
  }
  __syncwarp();
  mark_ranks(a.common, marks);
}

// Tells peers how many rows they get: one warp of a rank with many tokens, whose rows do not show by themselves.
__device__ inline void publish_row_counts(const Common& k, std::uint32_t step, const std::uint32_t* rows) {
  for (std::uint32_t peer = threadIdx.x % 32; peer < k.c.world; peer += 32) {
    const std::uint32_t n = rows[peer];
    if ((k.dead >> peer & 1) != 0 || is_remote(k, peer)) continue;
    fuzz_delay(k, n);
    store_tagged(k, k.peers[peer] + k.heap.rows_at(k.c, set_of(k.c, step), k.c.rank), step, n, 0, 1);
  }
}

// Tells peers how many choices they get, and how many rows if they have not heard: one warp, when all is counted.
static __device__ __noinline__ void send_all_counts(const DispatchArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const bool planned = a.ids == nullptr;
  const std::uint32_t lane = threadIdx.x % 32;
  const auto count = [&](std::uint32_t expert) { return total_of(a, expert); };
  for (std::uint32_t i = lane; i < k.living * k.expert_vec16s; i += 32)
    send_vec16_of_counts<false>(a, step, k.order[i / k.expert_vec16s], i % k.expert_vec16s, planned, count);
  if (!numbers_rows(a)) {
    for (std::uint32_t peer = lane; !planned && peer < k.c.world; peer += 32) a.plan.rows[peer] = total_of(a, k.c.num_experts + peer);
    publish_row_counts(k, step, a.plan.rows);
  }
  __syncwarp();
  if (k.remote != 0) k.heap.in_pieces ? begin_remote_blocks(a, step) : begin_whole_blocks(a, step);
  mark_stage(k, step, Stage::Counted);
}

// Adds, by one warp, what has been counted to one of the sums of all chunks.
__device__ inline void add_to_totals(const DispatchArguments& a, const ChunkMarks& marks, std::uint32_t sum) {
  const std::uint32_t columns = chunk_columns(a.common.c);
  std::uint32_t* const totals = a.chunk_counts.totals + sum % kTotals * columns;
  for (std::uint32_t i = threadIdx.x % 32; i < columns; i += 32)
    if (marks.tokens[i] != 0) add_relaxed(totals + i, marks.tokens[i]);
}

// Counts a chunk: one warp. memory: counting_bytes() of its own. with_ids: the chunk's ids are there already.
static __device__ __noinline__ void count_chunk(const DispatchArguments& a, std::uint32_t step, std::uint32_t number, char* memory,
                                                bool with_ids) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, columns = chunk_columns(k.c);
  const ChunkChoices chunk(a, number);
  ChunkMarks marks(k, known_shared(memory));
  if (!with_ids) {
    ChunkIds ids;
    ids.load(a, chunk);
    ids.keep(a, chunk, true, marks.ids);
  }
  mark_choices(a, chunk, marks, [](std::uint32_t* column, std::uint32_t) { atomicAdd(column, 1u); });
  for (std::uint32_t i = k.c.num_experts + lane; i < columns; i += 32) marks.tokens[i] = __popc(marks.tokens[i]);
  __syncwarp();
  auto* const out = reinterpret_cast<uint4*>(a.chunk_counts.counts + std::uint64_t{number} * columns);
  for (std::uint32_t i = lane; i < columns / 8; i += 32) {
    std::uint32_t pair[4];
#pragma unroll
    for (std::uint32_t j = 0; j < 4; ++j) pair[j] = marks.tokens[8 * i + 2 * j] | marks.tokens[8 * i + 2 * j + 1] << 16;
    out[i] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
  if (has_relays(k) && lane < chunk.tokens) write_masks(a, step, chunk.first + lane, marks.ids + lane * k.c.top_k);
  __syncwarp();
  fuzz_delay(k, number);
  if (lane == 0) store_release_here(a.chunk_counts.ready + number, arrival_word(k.generation, step));
  add_to_totals(a, marks, number);
  if (count_of_warp(a.chunk_counts.counted, 1) == a.chunks - 1) send_all_counts(a, step);
}

// Claims the counting of a chunk; true if it was unclaimed.
__device__ inline bool take_chunk(const DispatchArguments& a, std::uint32_t step, std::uint32_t chunk) {
  return of_first_lane([&] { return atomicExch(a.chunk_counts.taken + chunk, step); }) != step;
}

// Waits, by one warp, until the counts of chunks [first, end) are there, 32 of them at most. All warps of the GPU look at the same few
// lines, so a warp acquires once, behind the last look.
__device__ inline void await_chunks(const DispatchArguments& a, std::uint32_t step, std::uint32_t first, std::uint32_t end, char* memory) {
  constexpr std::uint32_t kLooksAtOnce = 64;
  const std::uint32_t mine = first + threadIdx.x % 32;
  const std::uint64_t word = arrival_word(a.common.generation, step);
  bool there = mine >= end;
  for (std::uint32_t looks = 0;; ++looks) {
    if (!there) there = load_relaxed(a.chunk_counts.ready + mine) == word;
    const std::uint32_t missing = __ballot_sync(~0u, !there);
    if (missing == 0) break;
    if (looks < kLooksAtOnce) continue;
    if (looks < kLooksAtOnce + kPatientLooks) {
      __nanosleep(kBetweenLooksNs);
      continue;
    }
    const std::uint32_t chunk = first + (__ffs(static_cast<int>(missing)) - 1);
    if (take_chunk(a, step, chunk)) count_chunk(a, step, chunk, memory, false);
  }
  fence_here();
  __syncwarp();
}

// Adds, by one warp, two vec16s a lane of n chunks' counts.
__device__ inline void add_counts(const std::uint16_t* counts, std::uint32_t first, std::uint32_t n, std::uint32_t columns,
                                  std::uint32_t vec16, std::uint32_t* sums) {
  constexpr std::uint32_t kAtOnce = 6, kVec16s = 2;
  vec16 += threadIdx.x % 32;
  std::uint32_t sum[kVec16s][8] = {};
#pragma unroll 1
  for (std::uint32_t begin = 0; begin < n; begin += kAtOnce) {
    uint4 v[kVec16s][kAtOnce];
#pragma unroll
    for (std::uint32_t p = 0; p < kVec16s; ++p)
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        v[p][i] = make_uint4(0, 0, 0, 0);
        const std::uint64_t chunk = first + begin + i;
        if (begin + i < n && vec16 + 32 * p < columns / 8)
          v[p][i] = __ldcg(reinterpret_cast<const uint4*>(counts + chunk * columns) + vec16 + 32 * p);
      }
#pragma unroll
    for (std::uint32_t p = 0; p < kVec16s; ++p)
#pragma unroll
      for (std::uint32_t i = 0; i < kAtOnce; ++i) {
        const std::uint32_t pairs[4] = {v[p][i].x, v[p][i].y, v[p][i].z, v[p][i].w};
#pragma unroll
        for (std::uint32_t j = 0; j < 4; ++j) {
          sum[p][2 * j] += pairs[j] & 0xffffu;
          sum[p][2 * j + 1] += pairs[j] >> 16;
        }
      }
  }
#pragma unroll
  for (std::uint32_t p = 0; p < kVec16s; ++p)
#pragma unroll
    for (std::uint32_t j = 0; j < 8; ++j)
      if (sum[p][j] != 0) atomicAdd(sums + 8 * (vec16 + 32 * p) + j, sum[p][j]);
}

// Adds, by one warp, the counts of chunks [first, end) to the block's sums.
static __device__ __noinline__ void sum_chunks(const DispatchArguments& a, std::uint32_t step, std::uint32_t first, std::uint32_t end,
                                               std::uint32_t* sums, char* memory) {
  sums = known_shared(sums);
  const std::uint32_t columns = chunk_columns(a.common.c), vec16s = columns / 8;
  for (; first < end; first += 32) {
    {
      const SpanTimer spends(a.common, Span::AwaitingChunks);
      await_chunks(a, step, first, end, memory);
    }
    const std::uint32_t n = min(32u, end - first);
    for (std::uint32_t begin = 0; begin < vec16s; begin += 64) add_counts(a.chunk_counts.counts, first, n, columns, begin, sums);
  }
  __syncwarp();
}

// ---- the planner ----

// A chunk as its planner has it in registers, asked for before anything else is known.
struct LoadedChunk {
  ChunkIds ids;
  float weights[ChunkChoices::kOfLane];

  __device__ void load(const DispatchArguments& a, const ChunkChoices& chunk) {
    ids.load(a, chunk);
#pragma unroll
    for (std::uint32_t i = 0; i < ChunkChoices::kOfLane; ++i) {
      weights[i] = 1.0f;
      if (chunk.at(i) < chunk.all && a.weights != nullptr) weights[i] = a.weights[chunk.of_step(a, i)];
    }
  }
  __device__ void keep(const DispatchArguments& a, const ChunkChoices& chunk, std::int32_t* kept, PlannedChunk& planned) const {
    ids.keep(a, chunk, false, kept);
#pragma unroll
    for (std::uint32_t i = 0; i < ChunkChoices::kOfLane; ++i)
      if (chunk.at(i) < chunk.all) planned.weight[chunk.at(i)] = weights[i];
  }
};

// A chunk of a given plan.
[[maybe_unused]] static __device__ __noinline__ void copy_chunk(const DispatchArguments& a, std::uint32_t number, PlannedChunk* planned) {
  PlannedChunk& to = *known_shared(planned);
  const ChunkChoices chunk(a, number);
#pragma unroll 4
  for (std::uint32_t i = 0; i < ChunkChoices::kOfLane; ++i) {
    const std::uint32_t at = chunk.at(i);
    if (at >= chunk.all) break;
    const std::uint64_t from = chunk.of_step(a, i);
    to.id[at] = a.plan.ids[from];
    to.index[at] = a.plan.index[from];
    to.row[at] = a.plan.token_rows[from];
    to.weight[at] = a.weights != nullptr ? a.weights[from] : 1.0f;
  }
}

// memory: counting_bytes(), with the chunk's ids. `sums` has what comes before the chunk, and then what comes after it.
[[maybe_unused]] static __device__ __noinline__ void place_choices(const DispatchArguments& a, const ChunkChoices chunk, char* memory,
                                                                  std::uint32_t* sums, PlannedChunk* planned) {
  const Common& k = a.common;
  const ChunkMarks marks(k, known_shared(memory));
  PlannedChunk& to = *known_shared(planned);
  sums = known_shared(sums);
  const Divider per_rank = k.per_rank, top_k = k.top_k;
  const std::uint32_t lane = threadIdx.x % 32, experts = k.c.num_experts, choices = k.c.top_k, columns = chunk_columns(k.c);
  std::uint32_t twice = 0;  // some token has an expert twice
  mark_choices(a, chunk, marks, [&](std::uint32_t* column, std::uint32_t token) { twice |= atomicOr(column, 1u << token) & 1u << token; });
  const bool once = !__any_sync(~0u, twice != 0);
  const std::uint32_t *const rows = sums + experts, *const of_rank = marks.tokens + experts;
#pragma unroll 4
  for (std::uint32_t at = lane; at < chunk.all; at += 32) {
    const std::int32_t id = marks.ids[at];
    const std::uint32_t token = top_k.divide(at), of_token = token * choices, before = (1u << token) - 1;
    const std::uint32_t low = marks.ranks[2 * token], high = marks.ranks[2 * token + 1];
    to.id[at] = id;
    if (at - of_token >= __popc(low) + __popc(high)) to.row[at] = kNone;
    if (once) to.index[at] = id < 0 ? 0 : sums[id] + __popc(marks.tokens[id] & before);
    if (id < 0) continue;
    // Choices of one token and rank say the same.
    const std::uint32_t rank = rank_of_rows(a, per_rank, id), lower = (1u << rank % 32) - 1;
    const std::uint32_t nth = rank < 32 ? __popc(low & lower) : __popc(low) + __popc(high & lower);
    to.row[of_token + nth] = rank << 20 | (rows[rank] + __popc(of_rank[rank] & before));
  }
  __syncwarp();
  if (!once && lane == 0)
    for (std::uint32_t at = 0; at < chunk.all; ++at) to.index[at] = marks.ids[at] < 0 ? 0 : sums[marks.ids[at]]++;
  for (std::uint32_t i = (once ? 0 : experts) + lane; i < columns; i += 32) sums[i] += __popc(marks.tokens[i]);
  __syncwarp();
}

// Workers of this block may wait for peers, and they for the counts of all chunks.
__device__ inline void count_all(const DispatchArguments& a, std::uint32_t step, char* memory) {
  for (std::uint32_t first = 0; first < a.chunks; first += 32) await_chunks(a, step, first, min(first + 32, a.chunks), memory);
}

// Neighbouring chunks that one thread block sends.
struct Stretch {
  std::uint32_t next, end;

  __device__ Stretch(const DispatchArguments& a, std::uint32_t number) {
    const std::uint32_t all = min(a.stretches, a.chunks);
    next = number < all ? number * a.chunks / all : a.chunks;
    end = number < all ? (number + 1) * a.chunks / all : a.chunks;
  }
};
// Returns the next chunk of this block's stretch: one warp.
template <bool kRounds>
__device__ inline std::uint32_t next_chunk(const DispatchArguments& a, Stretch& stretch) {
  if constexpr (kRounds) return a.pieces.begin * a.pieces.chunks + take_next(a.chunk_counts.received);
  if (stretch.next == stretch.end && stretch.next < a.chunks) stretch = Stretch(a, take_next(a.chunk_counts.next));
  return stretch.next < a.chunks ? stretch.next++ : a.chunks;
}

// The chunk behind the last one that this launch sends.
template <bool kRounds>
__device__ inline std::uint32_t end_of_chunks(const DispatchArguments& a) { return kRounds ? a.pieces.end_chunk : a.chunks; }

// Tells the bounds of this block's nth chunk: one thread of a planner. No warp looks at their former values any more.
template <bool kRounds>
__device__ inline void tell_bounds(const DispatchArguments& a, LargePlan& s, std::uint32_t n, std::uint32_t chunk) {
  const std::uint32_t first = chunk * a.tokens_per_chunk;
  s.bounds[n % 2] = {first, chunk >= end_of_chunks<kRounds>(a) ? 0 : min(a.own - first, a.tokens_per_chunk)};
  mbarrier_arrive(s.known + n % 2);
}

// True if this launch begins its step. A receive half sends the later rounds of one that has begun.
template <bool kRounds>
__device__ inline bool begins_step(const DispatchArguments& a) { return !kRounds || a.pieces.begins; }

// The planner's first part: the step, the block's first chunk, and whether this launch may write. open: the step, if it has begun.
template <bool kRounds>
__device__ inline void begin_plan(const DispatchArguments& a, LargePlan& s, std::uint32_t open) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  EarlyClosed closed;
  std::uint32_t first = 0;
  const unsigned long long word = load_relaxed(&k.control->step);
  closed.load(k, lane);
  if (lane == 0) first = atomicAdd(a.chunk_counts.next, 1u);
  closed.keep(k, lane, s.closed);
  if (lane != 0) return;
  s.step = begins_step<kRounds>(a) ? step_of(word) : open;
  s.first_stretch = first;
  if constexpr (kRounds)
    s.first_chunk = first < a.stretches ? a.pieces.begin * a.pieces.chunks + atomicAdd(a.chunk_counts.received, 1u) : a.chunks;
  else
    s.first_chunk = Stretch(a, first).next;
  tell_bounds<kRounds>(a, s, 0, s.first_chunk);
  if (begins_step<kRounds>(a)) pass_step(k);
}

template <bool kRounds, bool kGeneral>
__device__ inline void claim_set(const DispatchArguments& a, LargePlan& s) {
  const Common& k = a.common;
  bool taken = !begins_step<kRounds>(a) || may_take_set(k, s.step, s.closed);
  if constexpr (kGeneral) taken = taken && (k.remote == 0 || !begins_step<kRounds>(a) || may_write_all(k, s.step, Op::Dispatch));
  if (threadIdx.x % 32 == 0) s.taken = taken;
  s.claimed.set();
}

// Zeroes the counts, in the last thread block to leave: the next launch that sends finds everything as this one did.
__device__ inline void leave_plan(const DispatchArguments& a, bool& last) {
  __syncthreads();
  if (threadIdx.x == 0) last = count_in_order(a.chunk_counts.left, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  for (std::uint32_t i = threadIdx.x; i < kTotals * chunk_columns(a.common.c); i += kLargeThreads) a.chunk_counts.totals[i] = 0;
  if (threadIdx.x == 0) *a.chunk_counts.next = *a.chunk_counts.counted = *a.chunk_counts.left = *a.chunk_counts.received = 0;
}

}  // namespace pplx::cuda
