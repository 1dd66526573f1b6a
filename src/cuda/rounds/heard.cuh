// The receive half of a dispatch in pieces, but for rows.
#pragma once

#include "../plan/output_rows.cuh"
#include "rounds.cuh"

namespace pplx::cuda {

// Keeps what sources tell of their rounds, by the warp that has counted rows: one thread block tells the combine, and makes its counts 0. Peers tell of
// the set's next step while this rank still sends, so the handle keeps what they told of this one.
__device__ inline void hear_of_rounds(const DispatchArguments& a, std::uint32_t step, const ReceiveShared& s) {
  if (!reports_counts() || !s.good) return;
  const Common& k = a.common;
  forget_rounds(k, a.pieces, step, Op::Combine);
  for (std::uint32_t i = threadIdx.x % 32; i < k.living; i += 32) {
    const std::uint32_t source = k.order[i];
    if (is_remote(k, source)) continue;  // the warp that passes on its headers keeps it
    std::uint32_t* const kept = kept_rounds(a.pieces, source);
    std::uint32_t rounds = 1;
    for (std::uint32_t round = 0; round < rounds; ++round) {
      uint4 piece;
      if (!await_round_begin(k, a.pieces, Phase::DispatchRecv, step, source, round, piece)) return;
      if (round == 0) rounds = min(piece.y, a.pieces.most);
      kept[1 + round] = piece.x;
    }
    kept[0] = rounds;
  }
}

// Clears padding, by a warp, behind all rows: no warp waits for what is between the segments of experts.
template <bool kHooks>
__device__ inline void clear_padding(const DispatchArguments& a, ReceiveShared& s, const Experts& e) {
  const Common& k = a.common;
  if (!k.c.zero_pad || k.c.layout != LayoutKind::Ragged) return;
  s.placed.wait();
  for (std::uint32_t expert = 0; s.placed_all;) {
    if (threadIdx.x % 32 == 0) expert = atomicAdd(&s.next, 1u) * gridDim.x + blockIdx.x;
    expert = __shfl_sync(~0u, expert, 0);
    if (expert >= k.experts) return;
    zero_padding<kHooks>(a, e, expert, s.ragged_rows);
  }
}

}  // namespace pplx::cuda
