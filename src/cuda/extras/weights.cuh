// combine(weights=): a source sends its weights first. What goes back to it waits for them, a header without rows, too: the source's next
// step may overtake them in the network, and a proxy takes them for those of a step that it knows.
#pragma once

#include "../common/step.cuh"
#include "../remote/proxy.cuh"

namespace pplx::cuda {

__device__ inline void send_weights(const CombineArguments& a, std::uint32_t step, std::uint32_t peer) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  char* block = block_for(k, set_of(k.c, step), Op::Weights, peer);
  const bool of_node = is_relayed(k, peer);
  if (is_remote(k, peer) && ((a.relays.skipped >> peer & 1) != 0 || !may_write(k, step, Op::Weights, peer))) return;
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
      if (of_node || (id >= 0 && k.per_rank.divide(id) == peer)) *to++ = weights[i];  // a mate knows the k of its choices
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
  const bool of_node = is_relayed(k, source);
  const std::uint32_t rows = of_node ? NumbersOfNode(k, a.relays, set_of(k.c, step), source).all()
                                     : a.received.rows_begin[source + 1] - a.received.rows_begin[source];
  if (!check_header(k, h, Phase::Weights, step, source)) return false;
  return h.rows == rows || blame(k, Phase::Weights, step, source, rows, h.rows);
}

// A warp's part: a lane looks after a remote peer's word, and its header. A relay tells its mates.
__device__ inline void pass_on_weights(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  for (std::uint32_t peer = threadIdx.x % 32; peer < k.c.world; peer += 32) {
    if (!is_remote(k, peer) || (k.dead >> peer & 1) != 0 || (has_relays(k) && (a.relays.sources >> peer & 1) == 0)) continue;
    if (!wait_for_block(k, step, Op::Weights, Phase::Weights, peer) || !are_weights_of_rows(a, step, peer)) continue;
    if (!has_relays(k)) pass_on(k, step, Signal::Weights, peer);
    fuzz_delay(k, peer);
    for (std::uint32_t left = a.relays.mates; left != 0; left &= left - 1)
      raise_arrival<Atomics>(k.peers[a.relays.rank[lowest_rank(left)]], k.heap, k.c, Signal::Weights, peer, k.generation, step);
  }
  __syncwarp();
}

// Loads the weight that a source gave to combine for the nth choice here of its row; kNone: this lane wants none. False: none will come.
__device__ inline bool sent_weight(const CombineArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t row,
                                   std::uint32_t nth, float& weight) {
  const Common& k = a.common;
  bool good = true;
  if (threadIdx.x % 32 == 0)
    good = wait<Match::Reached>(k, arrival(k, step, Signal::Weights, source), Phase::Weights, step, source) &&
           (is_remote(k, source) || are_weights_of_rows(a, step, source));
  if (!all_of_warp(good)) return false;
  const char* const slot = own_slot(k, set_of(k.c, step), Op::Weights, source);
  if (nth != kNone) weight = __ldcg(reinterpret_cast<const float*>(slot + k.weights.row_at(row)) + nth);
  return true;
}

// Waits for a remote source's weights, before it is answered: a warp.
[[maybe_unused]] static __device__ __noinline__ bool await_weights(const Common& k, std::uint32_t step, std::uint32_t source) {
  const bool good = threadIdx.x % 32 != 0 ||
                    wait<Match::Reached>(k, arrival(k, step, Signal::Weights, source), Phase::Weights, step, source);
  return all_of_warp(good);
}

// Does what sent_weight() does for a source whose weights lie in its relay's memory, all of a row's.
[[maybe_unused]] static __device__ __noinline__ bool sent_node_weight(const CombineArguments& a, std::uint32_t step, std::uint32_t source,
                                                                     std::uint32_t row, std::uint32_t nth, float& weight) {
  const Common& k = a.common;
  const Relays& r = a.relays;
  const std::uint32_t set = set_of(k.c, step);
  const bool good = threadIdx.x % 32 != 0 ||
                    wait<Match::Reached>(k, arrival(k, step, Signal::Weights, source), Phase::Weights, step, rank_of_holder(r, source));
  if (!all_of_warp(good)) return false;
  if (nth == kNone) return true;
  std::uint32_t choices = a.received.choices[a.received.rows_begin[source] + row];
  for (; nth != 0; --nth) choices &= choices - 1;
  if (choices == 0) return true;
  const std::uint32_t of_node = __ldcg(rows_of_mate(k, r, set, source, r.number[k.c.rank]) + row);
  const auto* const weights = reinterpret_cast<const float*>(node_block(k, r, set, Op::Weights, source) + k.weights.row_at(of_node));
  weight = __ldcg(weights + __ffs(static_cast<int>(choices)) - 1);
  return true;
}

// Loads it from where the source's weights lie.
__device__ inline bool load_sent_weight(const CombineArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t row,
                                        std::uint32_t nth, float& weight) {
  if (is_relayed(a.common, source)) return sent_node_weight(a, step, source, row, nth, weight);
  return sent_weight(a, step, source, row, nth, weight);
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
