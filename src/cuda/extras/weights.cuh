// combine(weights=): a source sends its weights first, and rows that go back to it wait for them.
#pragma once

#include "../common/step.cuh"
#include "../remote/proxy.cuh"

namespace pplx::cuda {

__device__ inline void send_weights(const CombineArguments& a, std::uint32_t step, std::uint32_t peer) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  char* block = block_for(k, set_of(k.c, step), Op::Weights, peer);
  if (is_remote(k, peer) && !may_write(k, step, Op::Weights, peer)) return;
  write_header(k, block, step, a.plan.rows[peer], kUsesWeights, lane);
  for (std::uint32_t own = lane; own < a.own; own += 32) {
    const std::uint64_t at = std::uint64_t{own} * k.c.top_k;
    const float* weights = a.weights + std::uint64_t{k.slice.token(own)} * k.c.top_k;
    std::uint32_t row = kNone;
    for (std::uint32_t i = 0; i < k.c.top_k; ++i) {
      const std::uint32_t entry = a.plan.token_rows[at + i];
      if (entry != kNone && entry >> 20 == peer) row = entry & 0xfffffu;
    }
    if (row == kNone) continue;
    auto* to = reinterpret_cast<float*>(block + k.weights.row_at(row));
    for (std::uint32_t i = 0; i < k.c.top_k; ++i) {
      const std::int32_t id = a.plan.ids[at + i];
      if (id >= 0 && k.per_rank.divide(id) == peer) *to++ = weights[i];
    }
  }
  __syncwarp();
  if (lane != 0) return;
  if (is_remote(k, peer))
    hand_over(k, step, Op::Weights, peer, a.plan.rows[peer]);
  else
    raise_at_peer(k, step, Signal::Weights, peer);
}

// Checks that the weights that have come from this source are those of its rows; fails otherwise.
__device__ inline bool are_weights_of_rows(const CombineArguments& a, std::uint32_t step, std::uint32_t source) {
  const Common& k = a.common;
  const BlockHeader h = load_header(own_slot(k, set_of(k.c, step), Op::Weights, source));
  const std::uint32_t rows = a.received.rows_begin[source + 1] - a.received.rows_begin[source];
  if (!check_header(k, h, Phase::Weights, step, source)) return false;
  return h.rows == rows || blame(k, Phase::Weights, step, source, rows, h.rows);
}

// A warp's part: a lane looks after a remote peer's word, and its header.
__device__ inline void pass_on_weights(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  for (std::uint32_t peer = threadIdx.x % 32; peer < k.c.world; peer += 32) {
    if (!is_remote(k, peer) || (k.dead >> peer & 1) != 0) continue;
    if (wait_for_block(k, step, Op::Weights, Phase::Weights, peer) && are_weights_of_rows(a, step, peer))
      pass_on(k, step, Signal::Weights, peer);
  }
  __syncwarp();
}

// Loads the weight that a source gave to combine for the nth choice here of its row, if this lane wants it. False: none will come.
__device__ inline bool sent_weight(const CombineArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t row,
                                   std::uint32_t nth, bool wants, float& weight) {
  const Common& k = a.common;
  bool good = true;
  if (threadIdx.x % 32 == 0)
    good = wait<Match::Reached>(k, arrival(k, step, Signal::Weights, source), Phase::Weights, step, source) &&
           (is_remote(k, source) || are_weights_of_rows(a, step, source));
  if (!all_of_warp(good)) return false;
  const char* const slot = own_slot(k, set_of(k.c, step), Op::Weights, source);
  if (wants) weight = __ldcg(reinterpret_cast<const float*>(slot + k.weights.row_at(row)) + nth);
  return true;
}

// Strips wait for peers' weights, so these come first: before any warp of a block waits, all of them have been begun by blocks that run.
// Sends weights: `warps` warps of the block, of which this is number `warp`.
[[maybe_unused]] static __device__ __noinline__ void send_all_weights(const CombineArguments& a, std::uint32_t step, std::uint32_t warp, std::uint32_t warps) {
  const Common& k = a.common;
  const std::uint32_t all = k.living + (k.remote != 0 ? 1 : 0);
  for (std::uint32_t i = warp; i < all; i += warps) {
    if (of_first_lane([&] { return take_share(k, Op::Weights, i, step); }) == 0) continue;
    if (i < k.living)
      send_weights(a, step, k.order[i]);
    else
      pass_on_weights(a, step);
  }
}

}  // namespace pplx::cuda
