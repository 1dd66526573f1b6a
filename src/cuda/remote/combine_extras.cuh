// The additions of the general kernel of a combine: blocks of peers of other nodes, replicas, tails and weights.
#pragma once

#include "../decode/combine_recv.cuh"
#include "../extras/tails.cuh"
#include "../extras/weights.cuh"

namespace pplx::cuda {

__device__ inline void receive_remote_header(const CombineArguments& a, std::uint32_t step, std::uint32_t peer) {
  const Common& k = a.common;
  if (!wait_for_block(k, step, Op::Combine, Phase::CombineRecv, peer)) return;
  bool good = true;
  const BlockHeader h = read_header(k, own_slot(k, set_of(k.c, step), Op::Combine, peer), Phase::CombineRecv, step, peer, good);
  if (!good) return;
  if (check_combine_header(a, step, peer, h.rows, h.flags)) pass_on_rows(k, step, Op::Combine, Phase::CombineRecv, peer, h.rows);
  see_it_leave(k, step, Op::Dispatch, Phase::DispatchSend, peer);
}

template <>
struct CombineExtras<false> {
  // Finds out whether remote peers' blocks may be written, by the whole block.
  __device__ static void find_what_may_be_sent(const Common& k, std::uint32_t step, CombineShared& s) {
    const std::uint32_t peer = threadIdx.x;
    const bool wanted = peer < k.c.world && is_remote(k, peer) && (k.dead >> peer & 1) == 0;
    come_late(k, step);
    const bool good = __syncthreads_and(!wanted || may_write(k, step, Op::Combine, peer)) != 0;
    if (threadIdx.x == 0) s.may_send = good;
    __syncthreads();
  }
  // A warp's.
  __device__ static void send_header(const Common& k, std::uint32_t step, std::uint32_t peer, char* block, std::uint32_t rows, std::uint32_t flags,
                                     std::uint32_t parts) {
    write_header(k, block, step, rows, flags, threadIdx.x % 32);
    __syncwarp();
    if (threadIdx.x % 32 == 0) count_header(k, step, Op::Combine, peer, rows, parts);
  }
  __device__ static void count_strips(const Common& k, std::uint32_t step, std::uint32_t source, std::uint32_t row, std::uint32_t runs, std::uint32_t rows) {
    count_piece(k, step, Op::Combine, source, row, runs, RowsOfBlock(rows));
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
    if (peer < k.c.world && is_remote(k, peer) && (k.dead >> peer & 1) == 0) receive_remote_header(a, step, peer);
    __syncwarp();
  }
  __device__ static bool sent_weight(const CombineArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t row, float& weight) {
    return cuda::sent_weight(a, step, source, row, threadIdx.x % 32, threadIdx.x % 32 < a.common.c.top_k, weight);
  }
  __device__ static void send_all_weights(const CombineArguments& a, std::uint32_t step) {
    cuda::send_all_weights(a, step, threadIdx.x / 32, kCombineWarps);
  }
  __device__ static void write_tail(const CombineArguments& a, std::uint32_t choices, std::uint32_t place, char* to) {
    cuda::write_tail(a, choices, place, to);
  }
  template <bool kGives>
  __device__ static bool read_tail(const CombineArguments& a, std::uint32_t step, std::uint32_t own, std::uint32_t n, const char* row, std::uint32_t rank) {
    return cuda::read_tail<kGives>(a, step, own, n, row, rank);
  }

  template <typename T, int kVectors>
  __device__ static void give_strip(const Common& k, std::uint32_t step, std::uint32_t own, const Sums<T, kVectors>& sums, std::uint32_t begin,
                                    std::uint32_t end) {
    cuda::give_strip(k, step, own, sums, begin, end);
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
      else if (!receive_strip<T, true, false>(a, step, unit - others, load_token_row(a, unit - others)))
        return false;
      unit = next;
    }
    const std::uint32_t warp = threadIdx.x / 32 * gridDim.x + blockIdx.x, warps = kCombineWarps * gridDim.x;
    for (unit = warp; unit < (a.tokens - a.own) * strips; unit += warps)
      if (!take_strip<kReceivedVectors>(a, step, unit)) return false;
    for (std::uint32_t i = warps - 1 - warp; i < others; i += warps)
      if (threadIdx.x % 32 == 0) receive_slice_header(a, step, (k.slice.number + 1 + i) % k.slice.of);
    return true;
  }
};

}  // namespace pplx::cuda
