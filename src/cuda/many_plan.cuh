// The plan of a dispatch of many tokens. Counting all earlier tokens for each, as plan.cuh does, would take tens of microseconds, so thread
// blocks share the work: a chunk's choices are counted by expert, and its rows by rank, by one warp for all, and what comes before a chunk
// is a sum over chunks.
//
// A warp waits only for chunks that a running warp counts: one that nobody has begun it counts itself, and so does every planner once
// its first chunk is planned, for peers want to hear of all. Chunks are sent in the order in which planners, a warp of each thread block,
// claim them.
#pragma once

#include "claims.cuh"
#include "closed.cuh"
#include "gate.cuh"
#include "plan.cuh"

namespace pplx::cuda {

// A chunk whose tokens have their places, for the workers that send them.
struct PlannedChunk {
  std::int32_t id[kMostChoicesOfChunk];
  std::uint32_t index[kMostChoicesOfChunk];  // as in PlanView
  std::uint32_t row[kMostChoicesOfChunk];  // token_rows, as there
  float weight[kMostChoicesOfChunk];
};

// Whose tokens they are is known before their places: they are asked for at once.
struct ChunkBounds {
  std::uint32_t first, tokens;  // no tokens: there is no other chunk
};

struct ManyPlan {
  ClosedWords closed;
  std::uint32_t step;
  std::uint32_t first_chunk;  // that this thread block sends
  bool taken;  // the set's memory is this step's
  Gate claimed;  // taken
  std::uint64_t known[2], planned[2], used[2];  // turns of the chunks
  ChunkBounds bounds[2];
  PlannedChunk chunks[2];
};

// Named barriers of the block: its workers and its planner.
inline constexpr std::uint32_t kAmongPlanners = 1, kPlanners = 32 * (kWorkers + 1);

__device__ inline bool is_worker() { return threadIdx.x < 32 * kWorkers; }
__device__ inline bool is_planner() { return threadIdx.x / 32 == kWorkers; }

// A chunk's choices as a warp goes through them: a group of lanes for each token, a lane for each choice.
struct ChunkPass {
  static constexpr std::uint32_t kMost = kMostChoicesOfChunk / 32;  // of a chunk
  std::uint32_t first, tokens, at_once, token, choice;

  __device__ ChunkPass(const DispatchArguments& a, std::uint32_t chunk)
      : first(chunk * a.tokens_per_chunk),
        tokens(first < a.own ? min(a.own - first, a.tokens_per_chunk) : 0),
        at_once(32u >> a.common.group_shift),
        token(threadIdx.x % 32 >> a.common.group_shift),
        choice(threadIdx.x % 32 & ((1u << a.common.group_shift) - 1)) {}
  // Of this lane, in the nth pass: whether there is such a choice, and which of the chunk's it is.
  __device__ bool has(const DispatchArguments& a, std::uint32_t nth) const {
    return nth * at_once + token < tokens && choice < a.common.c.top_k;
  }
  __device__ std::uint32_t at(const DispatchArguments& a, std::uint32_t nth) const {
    return (nth * at_once + token) * a.common.c.top_k + choice;
  }
  // Of all passes at once.
  __device__ void load_ids(const DispatchArguments& a, RawId (&ids)[kMost]) const {
#pragma unroll
    for (std::uint32_t i = 0; i < kMost; ++i) {
      ids[i] = {};
      if (has(a, i)) ids[i] = load_raw_id(a, std::uint64_t{first} * a.common.c.top_k + at(a, i));
    }
  }
  // To shared memory, where a loop that is not unrolled finds them: of each pass, 32.
  __device__ void keep_ids(const DispatchArguments& a, const RawId (&ids)[kMost], bool report, std::int32_t* kept) const {
#pragma unroll
    for (std::uint32_t i = 0; i < kMost; ++i) {
      if (report && has(a, i) && is_bad(a, ids[i])) a.common.report->notices.bad_ids = 1;
      kept[32 * i + threadIdx.x % 32] = valid_id<false>(a, ids[i]);
    }
  }
};
// What a warp counts a chunk in: its columns, and ids.
constexpr std::uint32_t counting_bytes(const Config& c) { return 4 * (chunk_columns(c) + kMostChoicesOfChunk); }

// Of equal keys of a warp, those of lower lanes. A lane without a key has none.
__device__ inline std::uint32_t same_before(bool has_key, std::uint32_t key, std::uint32_t& same) {
  const std::uint32_t lane = threadIdx.x % 32;
  same = __match_any_sync(~0u, has_key ? key : kNone - lane);
  return same & ((1u << lane) - 1);
}

// ---- counts of chunks ----

// By one warp, when all is counted: peers hear how many rows and choices they get. The rows are none that show by themselves.
static __device__ __noinline__ void send_all_counts(const DispatchArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const bool planned = a.ids == nullptr;
  const std::uint32_t lane = threadIdx.x % 32, set = set_of(k.c, step);
  for (std::uint32_t i = lane; i < k.living * k.expert_pieces; i += 32) {
    const std::uint32_t peer = k.order[i / k.expert_pieces], nth = i % k.expert_pieces;
    const std::uint32_t first = first_expert_of(k, peer), experts = local_experts_of(k, peer);
    std::uint32_t numbers[kNumbersOfPiece] = {};
#pragma unroll
    for (std::uint32_t j = 0; j < kNumbersOfPiece; ++j) {
      const std::uint32_t e = nth * kNumbersOfPiece + j;
      if (e >= experts) continue;
      numbers[j] = planned ? a.plan.counts[first + e] : __ldcg(a.chunk_counts.totals + first + e);
      if (!planned) a.plan.counts[first + e] = numbers[j];
    }
    const PackedNumbers p = pack_numbers(numbers);
    linger(k, p.words[0]);
    store_tagged(k, k.peers[peer] + k.heap.counts_at(k.c, set, k.c.rank) + kPieceBytes * nth, step, p.words[0], p.words[1], p.words[2]);
  }
  for (std::uint32_t peer = lane; peer < k.c.world; peer += 32) {
    const std::uint32_t rows = planned ? a.plan.rows[peer] : __ldcg(a.chunk_counts.totals + k.c.num_experts + peer);
    if (!planned) a.plan.rows[peer] = rows;
    if ((k.dead >> peer & 1) != 0) continue;
    linger(k, rows);
    store_tagged(k, k.peers[peer] + k.heap.rows_at(k.c, set, k.c.rank), step, rows, 0, 0);
  }
  note(k, Stage::Counted);
}

// By one warp. counts: shared memory of its own, counting_bytes().
static __device__ __noinline__ void count_chunk(const DispatchArguments& a, std::uint32_t step, std::uint32_t chunk, std::uint32_t* counts) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, columns = chunk_columns(k.c);
  const ChunkPass pass(a, chunk);
  auto* const kept = reinterpret_cast<std::int32_t*>(counts + columns);
  {
    const Spends spends(k, Span::LoadingIds);
    RawId ids[ChunkPass::kMost];
    pass.load_ids(a, ids);
    pass.keep_ids(a, ids, true, kept);
  }
  for (std::uint32_t i = lane; i < columns; i += 32) counts[i] = 0;
  __syncwarp();
#pragma unroll 1
  for (std::uint32_t i = 0; i * pass.at_once < pass.tokens; ++i) {
    const Spends spends(k, Span::CountingIds);
    const std::int32_t id = kept[32 * i + lane];
    const std::uint32_t rank = id < 0 ? 0 : k.per_rank.divide(static_cast<std::uint32_t>(id));
    std::uint32_t same;
    const bool again = same_before(id >= 0, rank << 16 | pass.token, same) != 0;
    if (id < 0) continue;
    atomicAdd(counts + id, 1u);
    if (!again) atomicAdd(counts + k.c.num_experts + rank, 1u);
  }
  __syncwarp();
  const Spends spends(k, Span::PublishingCounts);
  auto* const out = reinterpret_cast<uint4*>(a.chunk_counts.counts + std::uint64_t{chunk} * columns);
  for (std::uint32_t i = lane; i < columns / 8; i += 32) {
    std::uint32_t pair[4];
#pragma unroll
    for (std::uint32_t j = 0; j < 4; ++j) {
      const std::uint32_t low = counts[8 * i + 2 * j], high = counts[8 * i + 2 * j + 1];
      pair[j] = low | high << 16;
      if (low != 0) add_relaxed(a.chunk_counts.totals + 8 * i + 2 * j, low);
      if (high != 0) add_relaxed(a.chunk_counts.totals + 8 * i + 2 * j + 1, high);
    }
    out[i] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
  __syncwarp();
  std::uint32_t before = 0;
  if (lane == 0) {
    linger(k, chunk);
    store_release_here(a.chunk_counts.ready + chunk, arrival_word(k.generation, step));
    before = count_in_order(a.chunk_counts.counted, 1);
  }
  if (__shfl_sync(~0u, before, 0) == a.chunks - 1) send_all_counts(a, step);
}

// Whether this warp is to count it.
__device__ inline bool take_chunk(const DispatchArguments& a, std::uint32_t step, std::uint32_t chunk) {
  bool mine = false;
  if (threadIdx.x % 32 == 0) mine = atomicExch(a.chunk_counts.taken + chunk, step) != step;
  return __any_sync(~0u, mine);
}

// By one warp: until the counts of chunks first, first + stride ... (32 of them at most, below end) are there.
__device__ inline void await_chunks(const DispatchArguments& a, std::uint32_t step, std::uint32_t first, std::uint32_t end,
                                    std::uint32_t stride, std::uint32_t* counts) {
  constexpr std::uint32_t kLooksAtOnce = 64;
  const std::uint32_t mine = first + threadIdx.x % 32 * stride;
  const std::uint64_t word = arrival_word(a.common.generation, step);
  for (std::uint32_t looks = 0;; ++looks) {
    const bool there = mine >= end || load_acquire(a.chunk_counts.ready + mine) == word;
    const std::uint32_t missing = __ballot_sync(~0u, !there);
    if (missing == 0) break;
    if (looks < kLooksAtOnce) continue;
    if (looks < kLooksAtOnce + kPatientLooks) {
      __nanosleep(kBetweenLooksNs);
      continue;
    }
    const std::uint32_t chunk = first + (__ffs(static_cast<int>(missing)) - 1) * stride;
    if (take_chunk(a, step, chunk)) count_chunk(a, step, chunk, counts);
  }
  __syncwarp();
}

// By one warp: adds the counts of chunks first, first + stride ... below end to the block's sums.
static __device__ __noinline__ void sum_chunks(const DispatchArguments& a, std::uint32_t step, std::uint32_t first, std::uint32_t end,
                                  std::uint32_t stride, std::uint32_t* sums, std::uint32_t* counts) {
  constexpr std::uint32_t kAtOnce = 8;
  const std::uint32_t lane = threadIdx.x % 32, columns = chunk_columns(a.common.c), pieces = columns / 8;
  for (; first < end; first += 32 * stride) {
    {
      const Spends spends(a.common, Span::AwaitingChunks);
      await_chunks(a, step, first, end, stride, counts);
    }
    const std::uint32_t n = min(32u, (end - first + stride - 1) / stride);
#pragma unroll 1
    for (std::uint32_t piece = lane; piece < pieces; piece += 32) {
      const std::uint16_t* const column = a.chunk_counts.counts + std::uint64_t{first} * columns + 8 * piece;
      std::uint32_t sum[8] = {};
#pragma unroll 1
      for (std::uint32_t begin = 0; begin < n; begin += kAtOnce) {
        uint4 v[kAtOnce];
#pragma unroll
        for (std::uint32_t i = 0; i < kAtOnce; ++i)
          v[i] = begin + i < n ? __ldcg(reinterpret_cast<const uint4*>(column + std::uint64_t{begin + i} * stride * columns)) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (std::uint32_t i = 0; i < kAtOnce; ++i) {
          const std::uint32_t pairs[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
#pragma unroll
          for (std::uint32_t j = 0; j < 4; ++j) {
            sum[2 * j] += pairs[j] & 0xffffu;
            sum[2 * j + 1] += pairs[j] >> 16;
          }
        }
      }
#pragma unroll
      for (std::uint32_t j = 0; j < 8; ++j)
        if (sum[j] != 0) atomicAdd(sums + 8 * piece + j, sum[j]);
    }
  }
  __syncwarp();
}

// ---- the planner ----

// A chunk as its planner has it in registers, asked for before anything else is known.
struct LoadedChunk {
  RawId ids[ChunkPass::kMost];
  float weights[ChunkPass::kMost];
  std::uint32_t index[ChunkPass::kMost], row[ChunkPass::kMost];  // of a given plan

  __device__ void load(const DispatchArguments& a, std::uint32_t chunk) {
    const ChunkPass pass(a, chunk);
    const bool planned = a.ids == nullptr;
    if (!planned) pass.load_ids(a, ids);
#pragma unroll
    for (std::uint32_t i = 0; i < ChunkPass::kMost; ++i) {
      const bool has = pass.has(a, i);
      const std::uint64_t at = std::uint64_t{pass.first} * a.common.c.top_k + pass.at(a, i);
      weights[i] = has && a.weights != nullptr ? a.weights[at] : 1.0f;
      if (!planned) continue;
      ids[i] = {};
      row[i] = kNone;
      if (!has) continue;
      ids[i].low = static_cast<std::uint32_t>(a.plan.ids[at]);
      index[i] = a.plan.index[at];
      row[i] = a.plan.token_rows[at];
    }
  }
};

// Which choices of a pass come before which, of an expert and of a rank: `sums` has what comes before the pass, and then after it.
__device__ inline void place_pass(const DispatchArguments& a, const ChunkPass& pass, std::uint32_t nth, std::int32_t id, std::uint32_t* sums,
                                  PlannedChunk& chunk) {
  const Common& k = a.common;
  const bool has = pass.has(a, nth);
  const std::uint32_t rank = id < 0 ? 0 : k.per_rank.divide(static_cast<std::uint32_t>(id));
  std::uint32_t same, same_row, same_rank;
  const std::uint32_t before = same_before(id >= 0, static_cast<std::uint32_t>(id), same);
  const bool new_row = same_before(id >= 0, rank << 16 | pass.token, same_row) == 0 && id >= 0;
  const std::uint32_t rows_before = same_before(new_row, rank, same_rank);
  unsigned long long ranks = new_row ? 1ull << rank : 0;  // of the token
  for (std::uint32_t i = 1; i < 32 / pass.at_once; i *= 2) ranks |= __shfl_xor_sync(~0u, ranks, static_cast<int>(i));
  std::uint32_t* const rows = sums + k.c.num_experts;
  const std::uint32_t index = id < 0 ? 0 : sums[id] + __popc(before), row = new_row ? rows[rank] + __popc(rows_before) : 0;
  __syncwarp();
  if (id >= 0 && before == 0) sums[id] += __popc(same);
  if (new_row && rows_before == 0) rows[rank] += __popc(same_rank);
  __syncwarp();
  if (!has) return;
  const std::uint32_t at = pass.at(a, nth), of_token = at - pass.choice;
  chunk.id[at] = id;
  chunk.index[at] = index;
  if (pass.choice >= __popcll(ranks)) chunk.row[at] = kNone;
  if (new_row) chunk.row[of_token + __popcll(ranks & ((1ull << rank) - 1))] = rank << 20 | row;
}

// ids: shared memory of its own for a chunk's.
__device__ inline void place_chunk(const DispatchArguments& a, std::uint32_t number, const LoadedChunk& loaded, std::uint32_t* sums,
                                   std::int32_t* ids, PlannedChunk& chunk) {
  const Spends spends(a.common, Span::PlacingChunks);
  const ChunkPass pass(a, number);
#pragma unroll
  for (std::uint32_t i = 0; i < ChunkPass::kMost; ++i) {
    if (!pass.has(a, i)) continue;
    const std::uint32_t at = pass.at(a, i);
    chunk.weight[at] = loaded.weights[i];
    if (a.ids != nullptr) continue;
    chunk.id[at] = static_cast<std::int32_t>(loaded.ids[i].low);
    chunk.index[at] = loaded.index[i];
    chunk.row[at] = loaded.row[i];
  }
  if (a.ids == nullptr) return;
  pass.keep_ids(a, loaded.ids, false, ids);
  __syncwarp();
#pragma unroll 1
  for (std::uint32_t i = 0; i * pass.at_once < pass.tokens; ++i) place_pass(a, pass, i, ids[32 * i + threadIdx.x % 32], sums, chunk);
}

__device__ inline void await_turn(std::uint64_t* turns, std::uint32_t nth) {
  while (!turn_is_over(turns, nth & 1)) {
  }
}

// Workers of this block may wait for peers, and they for the counts of all chunks.
__device__ inline void count_all(const DispatchArguments& a, std::uint32_t step, std::uint32_t* counts) {
  for (std::uint32_t first = 0; first < a.chunks; first += 32) await_chunks(a, step, first, min(first + 32, a.chunks), 1, counts);
}

// By one thread of a planner. The nth chunk of this block, whose place nobody looks at any more.
__device__ inline void tell_bounds(const DispatchArguments& a, ManyPlan& s, std::uint32_t n, std::uint32_t chunk) {
  const std::uint32_t first = chunk * a.tokens_per_chunk;
  s.bounds[n % 2] = {first, chunk >= a.chunks ? 0 : min(a.own - first, a.tokens_per_chunk)};
  turns_arrive(s.known + n % 2);
}

// For a planner whose block has added up what comes before its first chunk. counts: shared memory of its own.
__device__ inline void plan_chunks(const DispatchArguments& a, ManyPlan& s, std::uint32_t* sums, std::uint32_t* counts) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, step = s.step;
  std::uint32_t chunk = s.first_chunk, summed = chunk;
  for (std::uint32_t n = 0;; ++n) {
    const bool ends = chunk >= a.chunks;
    LoadedChunk loaded;
    if (!ends) loaded.load(a, chunk);
    if (!ends && a.ids != nullptr) sum_chunks(a, step, summed, chunk, 1, sums, counts);
    if (n >= 2) await_turn(s.used + n % 2, n / 2 - 1);
    if (n >= 2 && lane == 0) tell_bounds(a, s, n, chunk);
    auto* const ids = reinterpret_cast<std::int32_t*>(counts + chunk_columns(k.c));
    if (!ends) place_chunk(a, chunk, loaded, sums, ids, s.chunks[n % 2]);
    if (chunk == 0) {
      if (lane == 0) {
        *a.received.step = step;  // the step's other phases read it there
        take_set(k, step);
      }
      if (a.ids == nullptr) send_all_counts(a, step);
    }
    __syncwarp();
    if (lane == 0) turns_arrive(s.planned + n % 2);
    if (n == 0 && a.ids != nullptr) count_all(a, step, counts);
    if (ends) return;
    summed = chunk + 1;
    if (lane == 0) chunk = atomicAdd(a.chunk_counts.next, 1u);
    chunk = __shfl_sync(~0u, chunk, 0);
    if (n == 0 && lane == 0) tell_bounds(a, s, 1, chunk);
  }
}

// The planner's first part: the step, the block's first chunk, and whether this launch may write.
__device__ inline void begin_plan(const DispatchArguments& a, ManyPlan& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  EarlyClosed closed;
  std::uint32_t first = 0;
  const unsigned long long word = load_relaxed(&k.control->step);
  closed.load(k, lane);
  if (lane == 0) first = atomicAdd(a.chunk_counts.next, 1u);
  closed.keep(k, lane, s.closed);
  if (lane != 0) return;
  s.step = step_of(word);
  s.first_chunk = first;
  tell_bounds(a, s, 0, first);
  pass_step(k);
}

__device__ inline void claim_set(const DispatchArguments& a, ManyPlan& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  bool taken = may_take_at_once(k, s.step, s.closed);
  if (!taken) {
    if (lane == 0) taken = may_take_later(k, s.step);
    taken = __shfl_sync(~0u, taken, 0);
  }
  if (lane == 0) s.taken = taken;
  s.claimed.open();
}

// By the last thread block to leave: the next launch that sends finds everything as this one did.
__device__ inline void leave_plan(const DispatchArguments& a, bool& last) {
  __syncthreads();
  if (threadIdx.x == 0) last = count_in_order(a.chunk_counts.left, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  for (std::uint32_t i = threadIdx.x; i < chunk_columns(a.common.c); i += kManyThreads) a.chunk_counts.totals[i] = 0;
  if (threadIdx.x == 0) *a.chunk_counts.next = *a.chunk_counts.counted = *a.chunk_counts.left = 0;
}

}  // namespace pplx::cuda
