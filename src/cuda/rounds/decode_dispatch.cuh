// What a rank with few tokens receives of a step in which others have so many that their blocks come in pieces.
#pragma once

#include "../decode/dispatch_recv.cuh"
#include "heard.cuh"

namespace pplx::cuda {

// A part of a row that came in a round. False: something failed.
template <bool kHooks>
__device__ inline bool receive_part_of_round(const DispatchArguments& a, std::uint32_t step, const RoundRun& run, std::uint32_t nth, std::uint32_t part,
                                             ReceiveShared& s, const Experts& e) {
  const Common& k = a.common;
  const std::uint32_t slot_row = run.slot_row + nth;
  ArrivedRow r;
  r.source = run.source;
  r.at = s.rows_begin[run.source] + run.first + nth;
  const bool remote = is_remote(k, run.source);
  char* const rows = rows_of_run(k, Op::Dispatch, k.dispatch, run, own_slot(k, set_of(k.c, step), Op::Dispatch, run.source));
  ArrivedPart arrived(k, rows + std::uint64_t{nth} * k.dispatch.row_bytes, part);
  const bool good = threadIdx.x % 32 != 0 || remote || row_has_come(k, arrived.row + k.dispatch.arrival_at, Phase::DispatchRecv, step, run.source, run.round);
  if (!all_of_warp(good)) return false;
  arrived.load(k, arrived.wanted);
  mark_stage(k, Stage::RowThere);
  s.placed.wait();
  if (!s.placed_all || !read_route(a, step, arrived.route, e, r)) return false;
  place_copies(a, r, arrived, quantised(k.c.wire) && part == k.parts - 1);
  if (part == 0) place_words(a, r);
  if constexpr (kHooks) HookWords<kHooks>::count_placed(a, r.out_row, a.hooks.part_units);
  if (!remote && slot_row < k.showing_rows) arrived.make_places_blank(k);
  mark_stage(k, Stage::RowPlaced);
  return true;
}

template <bool kMappedOnly, bool kHooks>
__device__ inline bool receive_run_of_round(const DispatchArguments& a, std::uint32_t step, const RoundRun& run, ReceiveShared& s, const Experts& e) {
  const Common& k = a.common;
  for (std::uint32_t nth = 0; nth < run.rows; ++nth)
    for (std::uint32_t part = 0; part < k.parts; ++part) {
      const bool good = run.in_pieces
                            ? receive_part_of_round<kHooks>(a, step, run, nth, part, s, e)
                            : receive_part<kMappedOnly, kHooks>(a, step, (s.rows_begin[run.source] + run.first + nth) * k.parts + part, s, e);
      if (!good) return false;
    }
  return true;
}

// Beside the way of a step in which all blocks are whole, whose registers it leaves alone.
template <bool kMappedOnly, bool kHooks>
static __device__ __noinline__ void receive_rounds(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, const Experts& e,
                                                   RoundRows& rows) {
  const Common& k = a.common;
  Rounds rounds(k, a.pieces, step, s.rows_begin, Phase::DispatchRecv, kRowsOfRoundRun, 1, rows);
  bool good = rounds.open(0, kNone);
  for (RoundRun run; good && rounds.find(claim(k, a.pieces, step, Claim::DispatchRecv), run);) {
    good = receive_run_of_round<kMappedOnly, kHooks>(a, step, run, s, e);
    if (good) finish_unit(k, a.pieces, step, Op::Dispatch, run.round, rounds.units(), run.is_first, rounds.all());
  }
  if (good && !rounds.failed()) clear_padding<kHooks>(a, s, e);
}

// For any warp of the block, once it has nothing to send. rows: its own.
template <bool kMappedOnly, bool kHooks>
__device__ inline void receive_in_pieces(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, const Experts& e, RoundRows& rows) {
  s.rows_known.wait();
  if (!s.good) return;
  if (any_in_pieces(a.common, s))
    receive_rounds<kMappedOnly, kHooks>(a, step, s, e, rows);
  else
    receive_dispatch<kMappedOnly, kHooks>(a, step, s, e);
}

struct DispatchRounds {
  static constexpr bool kPieces = true;
  using Rows = RoundRows;
  __device__ static void hear(const DispatchArguments& a, std::uint32_t step, const ReceiveShared& s) { hear_of_rounds(a, step, s); }
  template <bool kMappedOnly, bool kHooks>
  __device__ static void receive(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, const Experts& e, RoundRows& rows) {
    receive_in_pieces<kMappedOnly, kHooks>(a, step, s, e, rows);
  }
};

}  // namespace pplx::cuda
