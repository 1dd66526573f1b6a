// combine_send beside the caller's kernel that makes its rows: combine(ready=). A warp looks at the words of the blocks that a unit reads, and
// sets the unit aside if some are not written yet: rows are not in the order in which experts are computed. It waits when it has set aside
// as many as it has lanes, or has nothing else to do.
//
// Rows that are written meanwhile are not read through the non-coherent path.
#pragma once

#include "combine_send.cuh"

namespace pplx::cuda {

// A wait for rows that this rank's own kernel writes.
struct RowsWait {
  std::uint32_t word = 0, seen = 0;  // the last block that was not there, and how far it was

  // For a warp: whether all that a row's sum is of is written. places: checked.
  __device__ bool are_written(const CombineArguments& a, const Places& places) {
    std::uint32_t count = 0, at = 0;
    bool good = true;
    if (places.place != kNone) {
      at = hook_word_of(a.common.c, places.place);
      count = load_acquire_here(a.ready.words + at);
      good = count >= a.ready.value;
    }
    const std::uint32_t missing = __ballot_sync(~0u, !good);
    if (missing == 0) return all_of_warp(true);
    const int of = __ffs(static_cast<int>(missing)) - 1;
    word = __shfl_sync(~0u, at, of);
    seen = __shfl_sync(~0u, count, of);
    return false;
  }
};

// Like ask() in words.cuh. Nobody else is to blame.
static __device__ __noinline__ Verdict ask_for_rows(const Common& k, const RowsWait& rows, std::uint32_t turn, std::uint64_t first,
                                                    std::uint64_t begun, std::uint32_t step) {
  const bool ask_host = (turn & 255) == 255;
  if (stopped(k, ask_host)) return Verdict::Failed;
  const std::uint64_t quarters = deadlines::kOwnQuarters * (step == k.c.first_step ? deadlines::kFirstStepFactor : 1);
  const std::uint64_t limit = k.timeout_ns / 4 * quarters, now = nanoseconds();
  const bool late = now - begun > limit;
  if ((late || ask_host) && load_acquire(&k.report->busy) != 0 && now - first < kBusyNs) return Verdict::Busy;
  if (!late) return Verdict::GoOn;
  fail(k, {AbortReason::Timeout, Phase::CombineSend, k.c.rank, k.c.rank, step}, kUnwritten | rows.word, rows.seen);
  return Verdict::Failed;
}

// Units of a warp whose rows are not written yet, one a lane.
class SetAside {
 public:
  __device__ bool empty() const { return !__any_sync(~0u, unit_ != kNone); }
  __device__ bool full() const { return __all_sync(~0u, unit_ != kNone); }
  __device__ void put(std::uint32_t unit) {
    const std::uint32_t free = __ballot_sync(~0u, unit_ == kNone);
    if (threadIdx.x % 32 + 1 == static_cast<std::uint32_t>(__ffs(static_cast<int>(free)))) unit_ = unit;
  }
  // try_send(unit): whether it could be sent. Returns whether any could.
  template <typename Try>
  __device__ bool look(const Try& try_send) {
    bool any = false;
    for (std::uint32_t there = __ballot_sync(~0u, unit_ != kNone); there != 0; there &= there - 1) {
      const int of = __ffs(static_cast<int>(there)) - 1;
      if (!try_send(__shfl_sync(~0u, unit_, of))) continue;
      if (threadIdx.x % 32 == static_cast<std::uint32_t>(of)) unit_ = kNone;
      any = true;
    }
    return any;
  }
  // Until some could be sent, with `all` until all were. False: something failed.
  template <typename Try>
  __device__ bool await(const CombineArguments& a, std::uint32_t step, const RowsWait& rows, bool all, const Try& try_send) {
    const std::uint64_t first = nanoseconds();
    std::uint64_t begun = first;
    for (std::uint32_t i = 1; !empty(); ++i) {
      if (look(try_send)) {
        if (!all) return true;
        begun = nanoseconds();
      } else if (i % kLooksBetween == 0) {
        std::uint32_t verdict = 0;
        if (threadIdx.x % 32 == 0) verdict = static_cast<std::uint32_t>(ask_for_rows(a.common, rows, i / kLooksBetween, first, begun, step));
        verdict = __shfl_sync(~0u, verdict, 0);
        if (verdict == static_cast<std::uint32_t>(Verdict::Failed)) return false;
        if (verdict == static_cast<std::uint32_t>(Verdict::Busy)) begun = nanoseconds();
      }
    }
    return true;
  }

 private:
  std::uint32_t unit_ = kNone;
};

// For each warp that sends, like send_combine().
template <typename T, int kVectors>
__device__ inline void send_when_ready(const CombineArguments& a, std::uint32_t step, const CombineUnits& units, std::uint32_t senders,
                                       CombineShared& s) {
  const Common& k = a.common;
  if (a.uses_weights) send_all_weights(a, step);
  RowsWait rows;
  SetAside aside;
  const auto try_send = [&](std::uint32_t unit) {
    if (unit < units.headers) {
      send_combine_header<false>(a, step, k.order[unit], s, units.runs);
      return true;
    }
    const std::uint32_t run = unit - units.headers;
    const RowOfUnit of(k, s, units, row_of_run(a, units, run));
    Places places;
    places.load<false>(a, s.rows_begin[of.source] + of.row);
    places.check(a);
    if (!rows.are_written(a, places)) return false;
    linger(k, unit);
    send_strips<T, false, kVectors, true>(a, step, run, units, places, true, false, s);
    return true;
  };
  const auto send = [&](std::uint32_t share, std::uint32_t nth) {
    const std::uint32_t unit = unit_of_share(share, nth);
    if (unit >= units.all || try_send(unit)) return true;
    aside.put(unit);
    return !aside.full() || aside.await(a, step, rows, false, try_send);
  };
  s.claimed.wait();
  for (std::uint32_t nth = threadIdx.x / 32; s.mine && nth * gridDim.x < units.all;) {
    if (!send(blockIdx.x, nth)) return;
    if (threadIdx.x % 32 == 0) nth = senders + atomicAdd(&s.sent, 1u);
    nth = __shfl_sync(~0u, nth, 0);
  }
  if (!aside.await(a, step, rows, true, try_send) || threadIdx.x >= 32) return;
  for (std::uint32_t share; (share = take_another_share(k, Op::Combine, step, min(gridDim.x, units.all))) != kNone;)
    for (std::uint32_t nth = 0; nth * gridDim.x < units.all; ++nth)
      if (!send(share, nth)) return;
  aside.await(a, step, rows, true, try_send);
}

}  // namespace pplx::cuda
