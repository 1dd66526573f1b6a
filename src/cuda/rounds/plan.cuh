// The plan of a dispatch in pieces: plan/chunk_plan.cuh in rounds. The planner that has a round's first chunk tells all peers. A send half plans all
// chunks and sends those of two rounds; the receive half sends the others by the plan that is kept.
#pragma once

#include "../plan/chunk_plan.cuh"
#include "rounds.cuh"

namespace pplx::cuda {

struct RoundPlan : LargePlan {
  char* rows_at[2][kMaxPeers];  // where rows of the chunks' rounds would begin at each peer if it had all rows of the block
  std::uint32_t round[2];
  std::uint32_t begin[kMaxPeers];  // rows of earlier rounds, by rank
};

// Tells each peer of a round of this rank.
__device__ inline void tell_round(const DispatchArguments& a, std::uint32_t step, std::uint32_t round, const std::uint32_t* begin) {
  const Common& k = a.common;
  const std::uint32_t rounds = rounds_of_own(a.pieces, a.own);
  for (std::uint32_t i = threadIdx.x % 32; i < k.living; i += 32) {
    const std::uint32_t peer = k.order[i];
    if (is_remote(k, peer)) continue;  // the headers of its pieces say so
    fuzz_delay(k, begin[peer]);
    store_tagged(k, k.peers[peer] + k.heap.round_at(k.c, set_of(k.c, step), k.c.rank, a.pieces.most, round), step, begin[peer], rounds, round);
  }
  __syncwarp();
}

// The planner's first part. As begin_plan(); a receive half has its step.
__device__ inline void begin_round_plan(const DispatchArguments& a, RoundPlan& s, std::uint32_t step) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  EarlyClosed closed;
  std::uint32_t first = 0;
  const unsigned long long word = load_relaxed(&k.control->step);
  closed.load(k, lane);
  if (lane == 0) first = a.pieces.begin * a.pieces.chunks + atomicAdd(a.chunk_counts.next, 1u);
  closed.keep(k, lane, s.closed);
  if (lane != 0) return;
  s.step = a.pieces.begins ? step_of(word) : step;
  s.first_chunk = first;
  if (a.pieces.begins) pass_step(k);
}

class RoundPlanner {
 public:
  // memory: of its own, counting_bytes(). sums: 0.
  __device__ RoundPlanner(const DispatchArguments& a, RoundPlan& s, std::uint32_t* sums, char* memory)
      : a_(a), k_(a.common), p_(a.pieces), s_(s), sums_(sums), memory_(memory), number_(s.first_chunk) {}

  __device__ void plan() {
    const std::uint32_t lane = threadIdx.x % 32;
    std::uint32_t n = 0;
    for (;; ++n) {
      if (n >= 2) await_turn(s_.used + n % 2, n / 2 - 1);
      const bool ends = number_ >= p_.end_chunk;
      if (lane == 0) tell_bounds(n % 2, ends);
      if (!ends) plan_chunk(n % 2);
      if (p_.begins && number_ == 0) begin_step();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(s_.planned + n % 2);
      if (n == 0 && a_.ids != nullptr) count_all(a_, s_.step, memory_);
      if (ends) break;
      next();
    }
    if (a_.ids == nullptr) return;
    // Plans the chunks that are left for the receive half to send.
    if (n > 0 && number_ < a_.chunks) await_turn(s_.used + (n - 1) % 2, (n - 1) / 2);
    for (; number_ < a_.chunks; next()) plan_chunk((n + 1) % 2);
  }

 private:
  __device__ void next() { number_ = p_.begin * p_.chunks + take_next(a_.chunk_counts.next); }

  __device__ void tell_bounds(std::uint32_t turn, bool ends) {
    const std::uint32_t first = number_ * a_.tokens_per_chunk;
    s_.bounds[turn] = {first, ends ? 0 : min(a_.own - first, a_.tokens_per_chunk)};
    mbarrier_arrive(s_.known + turn);
  }

  __device__ void begin_step() {
    if (threadIdx.x % 32 == 0) {
      *a_.received.step = s_.step;  // the step's other phases read it there
      take_set(k_, s_.step);
    }
    if (a_.ids != nullptr && a_.chunks != 0) return;
    for (std::uint32_t peer = threadIdx.x % 32; a_.chunks == 0 && peer < k_.c.world; peer += 32) p_.begin_rows[peer] = 0;
    __syncwarp();
    send_all_counts(a_, s_.step);
    for (std::uint32_t round = 0; round < rounds_of_own(p_, a_.own); ++round) tell_round(a_, s_.step, round, p_.begin_rows + round * k_.c.world);
  }

  __device__ void plan_chunk(std::uint32_t turn) {
    const std::uint32_t round = number_ / p_.chunks;
    if (a_.ids == nullptr) {
      copy_chunk(a_, number_, s_.chunks + turn);
      find_round(round, p_.begin_rows + round * k_.c.world);
    } else {
      enter(round);
      make_chunk(turn);
    }
    if (threadIdx.x % 32 == 0) s_.round[turn] = round;
    for (std::uint32_t peer = threadIdx.x % 32; peer < k_.c.world; peer += 32) {
      if ((k_.dead >> peer & 1) != 0) continue;
      const bool remote = is_remote(k_, peer);
      const std::int64_t row = std::int64_t{remote ? 0 : round % kPlaces * p_.tokens} - s_.begin[peer];
      char* const block = remote ? piece_for(k_, s_.step, Op::Dispatch, peer, round) : block_for(k_, set_of(k_.c, s_.step), Op::Dispatch, peer);
      s_.rows_at[turn][peer] = block + k_.dispatch.row_at(0) + row * k_.dispatch.row_bytes;
    }
    __syncwarp();
  }

  // Finds the round's beginnings in a given plan.
  __device__ void find_round(std::uint32_t round, const std::uint32_t* begin) {
    if (round == round_) return;
    for (std::uint32_t peer = threadIdx.x % 32; peer < k_.c.world; peer += 32) s_.begin[peer] = begin[peer];
    round_ = round;
    __syncwarp();
  }

  // Adds up what comes before the chunk's round, and tells of it if the chunk is the first one.
  __device__ void enter(std::uint32_t round) {
    if (round == round_) return;
    const std::uint32_t first = round * p_.chunks;
    sum_chunks(a_, s_.step, summed_, first, sums_, memory_);
    summed_ = first;
    for (std::uint32_t peer = threadIdx.x % 32; peer < k_.c.world; peer += 32) {
      s_.begin[peer] = sums_[k_.c.num_experts + peer];
      if (number_ == first) p_.begin_rows[round * k_.c.world + peer] = s_.begin[peer];
    }
    round_ = round;
    __syncwarp();
    if (number_ == first) tell_round(a_, s_.step, round, s_.begin);
  }

  // sums_ has what comes before the chunk's round, or the chunk before this one.
  __device__ void make_chunk(std::uint32_t turn) {
    const ChunkChoices chunk(a_, number_);
    PlannedChunk& planned = s_.chunks[turn];
    LoadedChunk loaded;
    loaded.load(a_, chunk);
    sum_chunks(a_, s_.step, summed_, number_, sums_, memory_);
    summed_ = number_ + 1;
    const SpanTimer spends(k_, Span::PlacingChunks);
    loaded.keep(a_, chunk, ChunkMarks(k_, memory_).ids, planned);
    place_choices(k_, chunk, memory_, sums_, &planned);
    for (std::uint32_t at = threadIdx.x % 32; at < chunk.all; at += 32) {
      const std::uint64_t to = std::uint64_t{chunk.first} * k_.c.top_k + at;
      a_.plan.ids[to] = planned.id[at];
      a_.plan.index[to] = planned.index[at];
      a_.plan.token_rows[to] = planned.row[at];
      if (a_.weights != nullptr) a_.plan.weights[to] = planned.weight[at];
    }
  }

  const DispatchArguments& a_;
  const Common& k_;
  const PieceArguments& p_;
  RoundPlan& s_;
  std::uint32_t* const sums_;
  char* const memory_;
  std::uint32_t number_, summed_ = 0;
  std::uint32_t round_ = kNone;  // that s_.begin is of
};

}  // namespace pplx::cuda
