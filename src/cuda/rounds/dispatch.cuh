// The additions of a large dispatch in pieces. The planner that has a round's first chunk tells all peers. A send half plans
// all chunks and sends those of two rounds; the receive half sends the others by the plan that is kept.
#pragma once

#include "../plan/chunk_plan.cuh"
#include "rounds.cuh"

namespace pplx::cuda {

// The planner's shared memory. rows_at is for the dealer, too.
struct RoundPlan {
  char* rows_at[2][kMaxPeers];  // where rows of the chunks' rounds would begin at each peer if it had all rows of the block
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

// Tells peers all counts and rounds: the first planner, if the plan is given or there are no tokens.
__device__ inline void tell_all_rounds(const DispatchArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  std::uint32_t* const begin = a.pieces.begin_rows;
  for (std::uint32_t peer = threadIdx.x % 32; a.chunks == 0 && peer < k.c.world; peer += 32) begin[peer] = 0;
  __syncwarp();
  send_all_counts(a, step);
  for (std::uint32_t round = 0; round < rounds_of_own(a.pieces, a.own); ++round) tell_round(a, step, round, begin + round * k.c.world);
}

// Finds out how many rows come before chunk `number`'s round, and tells peers if the chunk is the round's first. `sums` has what comes before
// chunk `counted`, of an earlier round. memory: the planner's own, counting_bytes().
__device__ inline void enter_round(const DispatchArguments& a, std::uint32_t step, std::uint32_t number, std::uint32_t& counted, RoundPlan& s,
                                   std::uint32_t* sums, char* memory) {
  const Common& k = a.common;
  const std::uint32_t round = number / a.pieces.chunks, first = round * a.pieces.chunks;
  const bool given = a.ids == nullptr, tells = !given && number == first;
  std::uint32_t* const of_plan = a.pieces.begin_rows + round * k.c.world;
  if (!given) {
    sum_chunks(a, step, counted, first, sums, memory);
    counted = first;
  }
  for (std::uint32_t peer = threadIdx.x % 32; peer < k.c.world; peer += 32) {
    s.begin[peer] = given ? of_plan[peer] : sums[k.c.num_experts + peer];
    if (tells) of_plan[peer] = s.begin[peer];
  }
  __syncwarp();
  if (tells) tell_round(a, step, round, s.begin);
}

// Finds out where rows of a round go, for the nth chunk of this block.
__device__ inline void place_round(const DispatchArguments& a, std::uint32_t step, std::uint32_t round, std::uint32_t n, RoundPlan& s) {
  const Common& k = a.common;
  for (std::uint32_t peer = threadIdx.x % 32; peer < k.c.world; peer += 32) {
    if ((k.dead >> peer & 1) != 0) continue;
    const bool remote = is_remote(k, peer);
    const std::int64_t row = std::int64_t{remote ? 0 : round % kPlaces * a.pieces.tokens} - s.begin[peer];
    char* const block = remote ? piece_for(k, step, Op::Dispatch, peer, round) : block_for(k, set_of(k.c, step), Op::Dispatch, peer);
    s.rows_at[n % 2][peer] = block + k.dispatch.row_at(0) + row * k.dispatch.row_bytes;
  }
  __syncwarp();
}

// Keeps what sources have told of their rounds, by a warp of one thread block that has received all: peers tell of the set's next step while
// this rank still sends. many: those that have told.
__device__ inline void keep_rounds(const DispatchArguments& a, std::uint32_t step, std::uint64_t many) {
  const Common& k = a.common;
  forget_rounds(k, a.pieces, step, Op::Combine);
  for (std::uint32_t i = threadIdx.x % 32; i < k.living; i += 32) {
    const std::uint32_t source = k.order[i];
    if (is_remote(k, source)) continue;  // the warp that passes on its headers keeps it
    std::uint32_t* const kept = kept_rounds(a.pieces, source);
    std::uint32_t rounds = 1;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      uint4 vec16 = make_uint4(0, 1, 0, 0);
      if ((many >> source & 1) != 0 && !await_round_begin(k, a.pieces, Phase::DispatchRecv, step, source, round, vec16)) return;
      if (round == 0) rounds = min(vec16.y, a.pieces.most);
      kept[1 + round] = vec16.x;
    }
    kept[0] = rounds;
  }
}

}  // namespace pplx::cuda
