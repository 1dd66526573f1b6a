// combine(ready=) in rounds. A warp sends what it has claimed of a round in the order in which rows are written, and has sent all of it before it
// begins with a later round: room for that may need peers to have read this one.
#pragma once

#include "ready.cuh"
#include "send_rounds.cuh"

namespace pplx::cuda {

// For a warp. claim(): its next unit. try_send(run): see send_as_written(). good: whether nothing has failed; try_send() may change it.
template <typename ClaimNext, typename Try, typename Idle>
__device__ inline void send_rounds_as_written(const CombineArguments& a, std::uint32_t step, Rounds& rounds, const RowsWait& rows, bool& good,
                                              const ClaimNext& claim, const Try& try_send, const Idle& idle) {
  std::uint32_t claimed = claim();
  const auto next = [&] {
    if (claimed == kNone) claimed = claim();
    if (!good || !rounds.holds(claimed)) return kNone;
    const std::uint32_t unit = claimed;
    claimed = kNone;
    return unit;
  };
  const auto try_unit = [&](std::uint32_t unit) {
    RoundRun run;
    if (!good || !rounds.find(unit, run)) return true;
    const bool nothing = run.is_header ? !has_header(a.pieces, run) : run.rows == 0;
    return nothing || try_send(run);
  };
  for (RoundRun first; good && rounds.find(claimed, first);)
    if (!send_as_written(a, step, rows, next, try_unit, idle)) return;
}

// Like send_rounds().
template <typename T, int kVectors>
static __device__ __noinline__ void send_rounds_when_ready(const CombineArguments& a, std::uint32_t step, CombineShared& s, RoundRows& rows) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  if (a.uses_weights && p.begins) send_all_weights(a, step, threadIdx.x / 32, kCombineWarps);
  const std::uint32_t remote = remote_peers(k), headers = p.begins ? k.living - remote : 0;
  Rounds rounds(k, p, step, s.rows_begin, Phase::CombineSend, kRowsOfRoundRun, 1, rows);
  bool good = rounds.open(p.begin, p.end);
  if (!good) return;
  RowsWait written;
  const auto claim_run = [&] {
    for (;;) {
      const std::uint32_t unit = claim(k, p, step, claim_of_sums(p));
      if (unit >= headers) return unit - headers;
      send_combine_header<true>(a, step, k.order[remote + unit], s, 0);
    }
  };
  const auto try_send = [&](const RoundRun& run) {
    if (!run.is_header && !written.are_written<false>(a, s.rows_begin[run.source] + run.first, run.rows)) return false;
    linger(k, std::uint64_t{run.round} << 32 | run.first);
    good = await_room_for_sums(k, p, step, run.source, run.round);
    if (good && run.is_header) send_header_of_round(a, step, run, s);
    if (good && !run.is_header) send_run_of_round<T, false, kVectors, true>(a, step, run, s);
    return true;
  };
  send_rounds_as_written(a, step, rounds, written, good, claim_run, try_send, [] {});
}

}  // namespace pplx::cuda
