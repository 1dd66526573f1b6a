// Room for the rounds of a combine in pieces, rows that one warp sends alone, and headers and words of remote peers.
#pragma once

#include "../decode/combine_recv.cuh"
#include "../extras/tails.cuh"
#include "../extras/weights.cuh"
#include "../remote/pass_on_rounds.cuh"

namespace pplx::cuda {

// Waits, by a warp, until the place of a round may be written, here and at its peer. False: something failed.
__device__ inline bool make_room(const Common& k, const PieceArguments& p, std::uint32_t step, const RoundRun& run) {
  const bool asks = run.round < kPlaces && is_remote(k, run.source);
  if (asks) come_late(k, step);
  bool good = !asks || threadIdx.x % 32 != 0 || may_write(k, step, Op::Combine, run.source);
  if (threadIdx.x % 32 == 0 && run.round >= kPlaces)
    good = await_room(k, p, Phase::CombineSend, step, Op::Combine, run.source, run.round);
  if (!all_of_warp(good)) return false;
  fence_copies();
  return true;
}

// Sends a run's rows one after the other, by one warp. slot_row: the first one's; word: of rows that do not show by themselves. False: the
// source's weights will not come.
template <typename T, bool kExtras>
[[maybe_unused]] static __device__ __noinline__ bool send_run_alone(const CombineArguments& a, std::uint32_t step, const RowRun& run,
                                                                    std::uint32_t slot_row, std::uint64_t word, const CombineShared& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t i = 0; i < run.rows; ++i) {
    char* const row = block_for(k, set_of(k.c, step), Op::Combine, run.source) + k.combine.row_at(slot_row + i);
    Places places;
    places.load<!kExtras>(a, s.rows_begin[run.source] + run.first + i);
    const std::uint32_t n = places.check(a);
    if (kExtras && a.uses_weights)
      if (!sent_weight(a, step, run.source, run.first + i, lane < k.c.top_k ? lane : kNone, places.weight)) return false;
    const bool copied = k.c.layout == LayoutKind::Compact;
    for (std::uint32_t at = 0; at < k.row_bytes; at += 512 * (copied ? kCopiedVectors : kSentVectors)) {
      const std::uint32_t begin = at + lane * 16;
      fuzz_delay(k, std::uint64_t{step} << 32 | at);
      if (copied) {
        copy_strip<kCopiedVectors>(a, places, row, begin, k.row_bytes, [] { return true; });
      } else {
        Sums<T, kSentVectors> sums;
        sum_row(a, places, n, begin, k.row_bytes, sums);
        sums.send(row, begin, k.row_bytes);
      }
    }
    const bool with_tail = kExtras && a.has_tail;
    if (with_tail) write_tail(a, places.choices, places.out_row, row + k.combine.tail_at);
    __syncwarp();
    if ((with_tail || has_many(s, run.source)) && lane == 0)
      publish(k, row + k.combine.arrival_at, has_many(s, run.source) ? word : arrival_word(k.generation, step));
  }
  return true;
}

// Sends a remote peer's header of a round, for which there is room. A release sends headers alone.
[[maybe_unused]] static __device__ __noinline__ void send_header_of_round(const CombineArguments& a, std::uint32_t step,
                                                                          const RoundRun& run, const CombineShared& s) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  const std::uint32_t peer = run.source, rows = s.rows_begin[peer + 1] - s.rows_begin[peer];
  const std::uint32_t flags = flags_of(a) | (*a.received.overflowed != 0 ? kOverflowed : 0u);
  const PieceRows of = a.release ? PieceRows{0, 0} : rows_of_kept_round(p, peer, run.round, rows);
  if (a.uses_weights && !await_weights(k, step, peer)) return;
  if (threadIdx.x % 32 == 0)
    write_piece_header(k, piece_for(k, step, Op::Combine, peer, run.round), step, a.release ? 0 : rows, flags, run.round,
                       *kept_rounds(p, peer), of);
  count_sums_of_round(k, p, step, peer, run.round, rows, kAllParts - of.rows() + (run.round == 0 ? kRoundBefore : 0));
}

// Checks a remote peer's piece of what comes back. False: it is not what this rank expects.
__device__ inline bool check_piece(const CombineArguments& a, std::uint32_t step, std::uint32_t peer, std::uint32_t piece,
                                   std::uint32_t pieces) {
  const Common& k = a.common;
  const BlockHeader h = load_header(own_slot(k, set_of(k.c, step), Op::Combine, peer) + k.heap.piece_at(Op::Combine, piece));
  if (!check_header(k, h, Phase::CombineRecv, step, peer)) return false;
  // With other flags there are no rows, and no pieces.
  if (piece == 0 && !check_combine_header(a, step, peer, h.rows, h.flags)) return false;
  const PieceRows of = a.release ? PieceRows{0, 0} : rows_of_own_round(a.pieces, a.plan, k, peer, piece, pieces);
  return check_piece_header(k, h, Phase::CombineRecv, step, peer, piece, pieces, of);
}

// Passes on what remote peers have read, and what they have sent. By one warp of a launch that receives.
__device__ inline void pass_on_combines(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  if (of_first_lane([&] { return claim_words(k, step, Op::Combine); }) == 0) return;
  const std::uint32_t rounds = rounds_of_own(p, a.own);
  const auto begin = [&](PassedPeer& of) {
    of.all_landed = rounds;
    of.all_room = rounds_to_be_free(p, *kept_rounds(p, of.peer));
  };
  const std::uint64_t begun = nanoseconds();
  const auto take = [&](std::uint32_t peer, std::uint32_t piece) {
    if (piece == 0) count_wait(k, Op::Combine, peer, nanoseconds() - begun);
    return check_piece(a, step, peer, piece, rounds);
  };
  if (!pass_on_rounds(k, p, step, {Op::Combine, Phase::CombineSend, Phase::CombineRecv}, begin, take)) return;
  for (std::uint32_t i = threadIdx.x % 32; i < remote_peers(k); i += 32)
    see_pieces_leave(k, p, step, Op::Dispatch, Phase::DispatchSend, k.order[i]);
  __syncwarp();
}

}  // namespace pplx::cuda
