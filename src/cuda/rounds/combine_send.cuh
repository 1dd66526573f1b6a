// Headers of a combine in pieces for peers of other nodes, in rounds.
#pragma once

#include "../decode/combine_send.cuh"
#include "../remote/combine_extras.cuh"
#include "../remote/pass_on_rounds.cuh"

namespace pplx::cuda {

// Rounds of a combine that a launch sends. The second one, a receive half, does not wait with what the first has claimed.
__device__ inline Claim claim_of_sums(const PieceArguments& p) { return p.begins ? Claim::CombineSend : Claim::CombineRest; }

// Waits until what a peer's round of the slot held, here and there, is of no use any more. A warp's.
__device__ inline bool await_room_for_sums(const Common& k, const PieceArguments& p, std::uint32_t step, std::uint32_t peer, std::uint32_t round) {
  const bool begins = round < kPlaces && is_remote(k, peer);
  bool good = true;
  if (threadIdx.x % 32 == 0) {
    if (begins) come_late(k, step);
    good = begins ? may_write(k, step, Op::Combine, peer) : await_room(k, p, Phase::CombineSend, step, Op::Combine, peer, round);
  }
  return all_of_warp(good);
}

// A remote peer's header of a round, for which there is room. A release sends headers alone.
static __device__ __noinline__ void send_header_of_round(const CombineArguments& a, std::uint32_t step, const RoundRun& run, const CombineShared& s) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  const std::uint32_t peer = run.source, rows = s.rows_begin[peer + 1] - s.rows_begin[peer];
  const std::uint32_t flags = flags_of(a) | (*a.received.overflowed != 0 ? kOverflowed : 0u);
  const PieceRows of = a.release ? PieceRows{0, 0} : rows_of_kept_round(p, peer, run.round, rows);
  if (threadIdx.x % 32 == 0)
    write_piece_header(k, piece_for(k, step, Op::Combine, peer, run.round), step, a.release ? 0 : rows, flags, run.round, *kept_rounds(p, peer), of);
  count_sums_of_round(k, p, step, peer, run.round, rows, kAllParts - of.rows() + (run.round == 0 ? kRoundBefore : 0));
}
// True if the peer of a unit that is a header has one in that round.
__device__ inline bool has_header(const PieceArguments& p, const RoundRun& run) { return run.round < *kept_rounds(p, run.source); }

}  // namespace pplx::cuda
