// The additions of the general kernel of a combine: blocks of peers of other nodes, replicas, tails, weights, and sources of several rounds.
#pragma once

#include "../extras/nodes.cuh"
#include "../large/combine_kernel.cuh"
#include "relay_combine.cuh"

namespace pplx::cuda {

template <>
struct CombineExtras<false> {
  struct Shared : CombineShared {
    RoundRows rounds[kCombineWarps];
  };
  // Sends a step in pieces in which some source has many tokens, or the rounds that its send half has left, by all warps. It waits for those
  // sources alone, and they for no row that this rank receives.
  template <typename T>
  __device__ static __noinline__ void send_rounds(const CombineArguments& a, std::uint32_t step, Shared& s) {
    const Common& k = a.common;
    const PieceArguments& p = a.pieces;
    const std::uint32_t warp = threadIdx.x / 32;
    if (blockIdx.x == 0 && warp == 0) forget_rounds(k, p, step, Op::Dispatch);
    if (a.send && warp == 0) begin_to_send(a, step, s);
    if (a.release) return;
    if (a.send && a.uses_weights) send_all_weights(a, step);
    Rounds rounds(k, p, step, s.rows_begin, Phase::CombineSend, 1, s.rounds[warp]);
    bool good = rounds.open(p.begin, p.end, s.many);
    for (RoundRun run; good && rounds.find(claim(k, p, step, p.begins ? Claim::CombineSend : Claim::CombineRest), run);)
      good = run.rows == 0 || (make_room(k, p, step, run) && send_run_alone<T, true>(a, step, {run.source, run.first, run.rows}, run.slot_row,
                                                                                    word_of_round(k, step, run.round), s));
  }
  // Finds out whether remote peers' blocks may be written, by the whole block.
  __device__ static void find_what_may_be_sent(const Common& k, std::uint32_t step, CombineShared& s) {
    const std::uint32_t peer = threadIdx.x;
    const bool wanted = peer < k.c.world && is_remote(k, peer) && (k.dead >> peer & 1) == 0;
    come_late(k, step);
    const bool good = __syncthreads_and(!wanted || may_write(k, step, Op::Combine, peer)) != 0;
    if (threadIdx.x == 0) s.may_send = good;
    __syncthreads();
  }
  __device__ static void send_header(const CombineArguments& a, std::uint32_t step, std::uint32_t peer, std::uint32_t rows,
                                     std::uint32_t flags, std::uint32_t parts) {
    send_remote_header(a, step, peer, rows, flags, parts);
  }
  __device__ static void count_strips(const Common& k, std::uint32_t step, std::uint32_t source, std::uint32_t row, std::uint32_t runs, std::uint32_t rows) {
    count_part(k, step, Op::Combine, source, parts_of(k, Op::Combine).part_of(row), 1, runs, RowsOfBlock(rows));
  }
  // Brings a token's rows into the order of nodes. Returns a bit for each that is the last of its node; 0: each counts by itself.
  __device__ static std::uint32_t order_by_node(const CombineArguments& a, std::uint32_t& entry) {
    if (!a.by_node) return 0;
    entry = cuda::order_by_node(a, entry);
    return ends_of_nodes(a, entry);
  }
  template <typename T>
  __device__ static __noinline__ bool answer_sources(const CombineArguments& a, std::uint32_t step) {
    const std::uint32_t strips = a.received_in.strips;
    const auto answer = [&](std::uint32_t source, std::uint32_t rows, std::uint32_t unit) {
      return answer_strip<T>(a, step, source, rows, unit);
    };
    return cuda::answer_sources(a, step, strips, [&](std::uint32_t rows) { return rows * strips; }, answer);
  }
  template <typename T, int kVectors>
  __device__ static void add_node(Sums<T, kVectors>& sums, Sums<T, kVectors>& of_node) {
    cuda::add_node(sums, of_node);
  }
  // A warp's.
  __device__ static bool await_remote_row(const Common& k, std::uint32_t step, std::uint32_t source, std::uint32_t row) {
    return all_of_warp(threadIdx.x % 32 != 0 || row_was_passed_on(k, step, Op::Combine, Phase::CombineRecv, source, row));
  }
  // Before any thread block waits for rows of remote peers, one that runs looks after them: a thread for each.
  __device__ static void receive_headers(const CombineArguments& a, std::uint32_t step) {
    const Common& k = a.common;
    bool mine = false;
    if (threadIdx.x == 0) mine = claim_words(k, step, Op::Combine);
    if (__syncthreads_or(mine) == 0) return;
    const std::uint32_t peer = threadIdx.x;
    if (peer < k.c.world && is_remote(k, peer) && ((k.dead | a.relays.skipped) >> peer & 1) == 0) receive_remote_header(a, step, peer);
    __syncwarp();
  }
  __device__ static bool sent_weight(const CombineArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t row, float& weight) {
    const std::uint32_t nth = threadIdx.x % 32 < a.common.c.top_k ? threadIdx.x % 32 : kNone;
    return load_sent_weight(a, step, source, row, nth, weight);
  }
  __device__ static void send_all_weights(const CombineArguments& a, std::uint32_t step) {
    cuda::send_all_weights(a, step, threadIdx.x / 32, kCombineWarps);
  }
  __device__ static void write_tail(const CombineArguments& a, std::uint32_t choices, std::uint32_t place, char* to) {
    cuda::write_tail(a, choices, place, to);
  }
  // Waits for the words behind a token's tails, and takes these. False: they will not come.
  template <bool kGives>
  __device__ static bool read_tail(const CombineArguments& a, std::uint32_t step, std::uint32_t own, std::uint32_t n,
                                   const char* row, std::uint32_t rank) {
    const Common& k = a.common;
    const bool good = threadIdx.x % 32 >= n || is_remote(k, rank) ||
                      wait<Match::Exact>(k, row + k.combine.arrival_at, Phase::CombineRecv, step, rank);
    if (!all_of_warp(good)) return false;
    take_tail<kGives>(a, step, own, __ballot_sync(~0u, threadIdx.x % 32 < n), row, rank);
    return true;
  }
  template <typename T, int kVectors>
  __device__ static void give_strip(const Common& k, std::uint32_t step, std::uint32_t own, const Sums<T, kVectors>& sums,
                                     std::uint32_t begin, std::uint32_t end) {
    for (std::uint32_t i = 1; i < k.slice.of; ++i) {
      fuzz_delay(k, std::uint64_t{step} << 32 | i << 24 | begin);
      sums.give(slice_block(k, step, member(k, k.slice.number + i), k.c.rank) + k.combine.row_at(own), begin, end);
    }
  }
  // A replica does its own strips first, which the others wait for, then takes theirs. False: something failed.
  template <typename T>
  __device__ static __noinline__ bool receive_with_replicas(const CombineArguments& a, std::uint32_t step) {
    const Common& k = a.common;
    const std::uint32_t others = k.slice.of - 1, strips = a.received_in.strips, units = others + a.own * strips;
    std::uint32_t unit = claim_slice(k, step, units);
    while (unit < units) {
      const std::uint32_t next = claim_slice(k, step, units);
      if (unit < others)
        send_slice_header(a, step, member(k, k.slice.number + 1 + unit));
      else if (!receive_strip<T, true, false, kReceivedVectors>(a, step, unit - others, load_token_row(a, unit - others), [] {}))
        return false;
      unit = next;
    }
    const std::uint32_t warp = threadIdx.x / 32 * gridDim.x + blockIdx.x, warps = kCombineWarps * gridDim.x;
    for (unit = warp; unit < (a.tokens - a.own) * strips; unit += warps)
      if (!take_strip(a, step, unit)) return false;
    for (std::uint32_t i = warps - 1 - warp; i < others; i += warps)
      if (threadIdx.x % 32 == 0) receive_slice_header(a, step, (k.slice.number + 1 + i) % k.slice.of);
    return true;
  }
};

}  // namespace pplx::cuda
