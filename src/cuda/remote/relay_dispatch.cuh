// A relay's part of a dispatch (protocol/nodes.h). A node block lies in its memory, and it alone hears of it. It numbers the rows of each
// mate, and tells its mates counts, as peers of the node do, row numbers, and which parts of it are there. They copy their rows from there.
#pragma once

#include "../common/relays.cuh"
#include "pass_on_counts.cuh"

namespace pplx::cuda {

// Waits, by one thread, until this rank's nth row of a remote source is there: of its block, or of a node's, where it lies among its
// mates'. Returns it; null: it will not come.
[[maybe_unused]] static __device__ __noinline__ const char* await_far_row(const DispatchArguments& a, std::uint32_t step,
                                                                          std::uint32_t source, std::uint32_t nth) {
  const Common& k = a.common;
  const std::uint32_t set = set_of(k.c, step);
  std::uint32_t row = nth;
  const char* block = own_slot(k, set, Op::Dispatch, source);
  bool is_there = false;
  if (has_relays(k)) {
    if (!wait<Match::Reached>(k, arrival(k, step, Signal::Dispatch, source), Phase::DispatchRecv, step, source)) return nullptr;
    row = __ldcg(rows_of_mate(k, a.relays, set, source, a.relays.number[k.c.rank]) + nth);
    block = node_block(k, a.relays, set, Op::Dispatch, source);
    is_there = parts_of(k, Op::Dispatch).part_of(row) == 0;  // with what tells of the numbers
  }
  if (!is_there && !row_was_passed_on(k, step, Op::Dispatch, Phase::DispatchRecv, source, row)) return nullptr;
  return block + k.dispatch.row_at(row);
}

// Returns how many of the step's sources were claimed before, or kNone in a graph from before a reset: what they are of is gone.
__device__ inline std::uint32_t claim_source(const Common& k, std::uint32_t step) {
  if (load_relaxed(&k.control->failure) != 0) return kNone;
  unsigned long long* const word = &k.control->looked_after[set_of(k.c, step)][static_cast<int>(Op::Dispatch)];
  for (unsigned long long seen = load_relaxed(word);;) {
    const std::uint32_t before = static_cast<std::uint32_t>(seen) == step ? static_cast<std::uint32_t>(seen >> 32) : 0;
    const unsigned long long next = 1ull * (before + 1) << 32 | step, was = atomicCAS(word, seen, next);
    if (was == seen) return before;
    seen = was;
  }
}
// The answers that warps have begun in the step's combine, whose dispatch begins at 0.
__device__ inline unsigned long long* answers_begun(const Common& k, std::uint32_t step) {
  return &k.control->looked_after[set_of(k.c, step)][static_cast<int>(Op::Weights)];
}

// Numbers the rows of a node block, whose masks are read once. A lane counts the rows of the mate with its number. False: a mask is wrong.
__device__ inline bool number_rows(const DispatchArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t rows,
                                   std::uint32_t& counted) {
  constexpr std::uint32_t kAtOnce = 4;
  const Common& k = a.common;
  const Relays& r = a.relays;
  const std::uint32_t set = set_of(k.c, step), lane = threadIdx.x % 32;
  const char* const block = own_slot(k, set, Op::Dispatch, source);
  const auto* const masks = reinterpret_cast<const std::uint32_t*>(block + masks_at(k.c));
  const NumbersOfNode numbers(k, r, set, source);
  const std::uint32_t all = min(__ldcg(reinterpret_cast<const std::uint32_t*>(block + offsetof(BlockHeader, masks))), k.most_rows);
  std::uint32_t found = 0;  // rows
  for (std::uint32_t begin = 0; begin < all; begin += 32 * kAtOnce) {
    std::uint32_t mask[kAtOnce];
#pragma unroll
    for (std::uint32_t j = 0; j < kAtOnce; ++j) {
      const std::uint32_t token = begin + 32 * j + lane;
      mask[j] = token < all ? __ldcg(masks + token) : 0;
    }
#pragma unroll
    for (std::uint32_t j = 0; j < kAtOnce; ++j) {
      const bool good = (mask[j] & ~r.mates) == 0;
      if (!good) blame(k, Phase::DispatchRecv, step, source, r.mates, mask[j]);
      if (!all_of_warp(good)) return false;
      const std::uint32_t some = __ballot_sync(~0u, mask[j] != 0), row = found + count_ranks_below(some, lane);
      found += __popc(some);
      for (std::uint32_t left = r.mates; left != 0; left &= left - 1) {
        const std::uint32_t mate = lowest_rank(left), wants = __ballot_sync(~0u, (mask[j] >> mate & 1) != 0);
        const std::uint32_t nth = __shfl_sync(~0u, counted, static_cast<int>(mate)) + count_ranks_below(wants, lane);
        const bool wanted = (wants >> lane & 1) != 0;
        if (wanted) rows_of_mate(k, r, set, source, mate)[nth] = row;
        if (mask[j] != 0) numbers.of_row(row, mate) = wanted ? nth : kNone;
        if (lane == mate) counted += __popc(wants);
      }
    }
  }
  if (found != rows && lane == 0) blame(k, Phase::DispatchRecv, step, source, rows, found);
  return found == rows;
}

// Tells each mate how many choices each of its experts gets.
__device__ inline void pass_on_choices(const DispatchArguments& a, std::uint32_t step, std::uint32_t source) {
  const Common& k = a.common;
  const std::uint32_t set = set_of(k.c, step), vectors = k.expert_vec16s;
  const auto* const counts = reinterpret_cast<const std::uint32_t*>(own_slot(k, set, Op::Dispatch, source) + sizeof(BlockHeader));
  for (std::uint32_t i = threadIdx.x % 32; i < k.c.node_ranks * vectors; i += 32) {
    const std::uint32_t mate = i / vectors, first = i % vectors * kNumbersOfVec16;
    if ((a.relays.mates >> mate & 1) == 0) continue;
    const std::uint32_t rank = a.relays.rank[mate], experts = local_experts_of(k, rank);
    std::uint32_t n[kNumbersOfVec16] = {};
#pragma unroll
    for (std::uint32_t j = 0; j < kNumbersOfVec16; ++j)
      if (first + j < experts) n[j] = __ldcg(counts + mate * k.experts_per_rank + first + j) & kMostOfNumber;
    const PackedNumbers p = pack_numbers(n);
    char* const to = k.peers[rank] + k.heap.counts_at(k.c, set, source) + kVec16Bytes * (i % vectors);
    store_tagged(k, to, step, p.words[0], p.words[1], p.words[2]);
  }
}

// Tells mates which parts of a source's node block are there, until all are: one thread.
__device__ inline void pass_on_parts_to_mates(const Common& k, const Relays& r, std::uint32_t step, std::uint32_t source,
                                              std::uint32_t rows) {
  pass_on_parts(k, step, Op::Dispatch, Phase::DispatchRecv, source, rows, [&](std::uint64_t word) {
    for (std::uint32_t left = r.mates; left != 0; left &= left - 1)
      publish(k, parts_word(k, k.peers[r.rank[lowest_rank(left)]], step, Op::Dispatch, source), word);
  });
}

// Passes on a source's node block, by a warp. False: it will not come, or is wrong.
static __device__ __noinline__ bool pass_on_node(const DispatchArguments& a, std::uint32_t step, std::uint32_t source) {
  const Common& k = a.common;
  const Relays& r = a.relays;
  const std::uint32_t set = set_of(k.c, step), lane = threadIdx.x % 32;
  if (!all_of_warp(lane != 0 || wait_for_block(k, step, Op::Dispatch, Phase::DispatchRecv, source))) return false;
  mark_stage(k, step, Stage::Heard);
  const BlockHeader h = load_header(own_slot(k, set, Op::Dispatch, source));
  if (!all_of_warp(lane != 0 || check_header(k, h, Phase::DispatchRecv, step, source))) return false;
  const std::uint32_t rows = __shfl_sync(~0u, h.rows, 0);
  std::uint32_t counted = 0;
  if (!number_rows(a, step, source, rows, counted)) return false;
  pass_on_choices(a, step, source);
  const NumbersOfNode numbers(k, r, set, source);
  if (lane == 0) numbers.all() = rows;
  const bool is_mate = (r.mates >> lane & 1) != 0;
  if (is_mate) {
    numbers.of_mate(lane) = counted;
    store_tagged(k, k.peers[r.rank[lane]] + k.heap.rows_at(k.c, set, source), step, counted, 0, 0);
  }
  __syncwarp();
  fuzz_delay(k, source);
  if (is_mate) raise_arrival<Atomics>(k.peers[r.rank[lane]], k.heap, k.c, Signal::Dispatch, source, k.generation, step);
  mark_stage(k, step, Stage::PassedOn);
  if (lane == 0) pass_on_parts_to_mates(k, r, step, source, rows);
  if (lane == 0) see_it_leave(k, step, Op::Combine, Phase::CombineSend, source);
  __syncwarp();
  return true;
}

// Passes on the node blocks of the sources whose relay this rank is: a warp of each thread block, each source by one. Then one warp waits
// for what other relays of this node pass on, and blames those: other warps have more patience.
[[maybe_unused]] static __device__ __noinline__ void pass_on_nodes(const DispatchArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const Relays& r = a.relays;
  const std::uint32_t lane = threadIdx.x % 32, all = count_ranks(r.sources);
  const std::uint64_t begun = nanoseconds();
  for (;;) {
    const std::uint32_t nth = of_first_lane([&] { return claim_source(k, step); });
    if (nth == 0 && lane == 0) *answers_begun(k, step) = 0;
    if (nth > all) return;
    if (nth == all) break;
    std::uint64_t left = r.sources;
    for (std::uint32_t i = 0; i < nth; ++i) left &= left - 1;
    if (!pass_on_node(a, step, lowest_rank(left))) return;
  }
  for (std::uint32_t source = lane; source < k.c.world; source += 32) {
    if (!is_remote(k, source) || (k.dead >> source & 1) != 0) continue;
    see_it_leave(k, step, Op::Weights, Phase::Weights, source);
    wait_and_count(k, arrival(k, step, Signal::Dispatch, source), Phase::DispatchRecv, step, rank_of_holder(r, source), begun,
                   kRelaysSooner);
  }
  __syncwarp();
}

}  // namespace pplx::cuda
