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
  // So many rows, from one on of those of all sources.
  template <bool kPlain>
  __device__ bool are_written(const CombineArguments& a, std::uint32_t begin, std::uint32_t rows) {
    for (std::uint32_t i = 0; i < rows; ++i) {
      Places places;
      places.load<kPlain>(a, begin + i);
      places.check(a);
      if (!are_written(a, places)) return false;
    }
    return true;
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
  // Returns its lane, a bit.
  __device__ std::uint32_t put(std::uint32_t unit) {
    const std::uint32_t free = __ballot_sync(~0u, unit_ == kNone), lane = free & ~(free - 1);
    if ((lane >> threadIdx.x % 32 & 1) != 0) unit_ = unit;
    return lane;
  }
  // Of these lanes. try_send(unit): whether it could be sent. Returns whether any could.
  template <typename Try>
  __device__ bool look(std::uint32_t lanes, const Try& try_send) {
    bool any = false;
    for (lanes &= __ballot_sync(~0u, unit_ != kNone); lanes != 0; lanes &= lanes - 1) {
      const int of = __ffs(static_cast<int>(lanes)) - 1;
      if (!try_send(__shfl_sync(~0u, unit_, of))) continue;
      if (threadIdx.x % 32 == static_cast<std::uint32_t>(of)) unit_ = kNone;
      any = true;
    }
    return any;
  }

 private:
  std::uint32_t unit_ = kNone;
};

// For a warp: sends all units that next() gives until it gives kNone, in the order in which their rows are written. idle() is called before
// it waits. False: something failed.
template <typename Next, typename Try, typename Idle>
__device__ inline bool send_as_written(const CombineArguments& a, std::uint32_t step, const RowsWait& rows, const Next& next, const Try& try_send,
                                       const Idle& idle) {
  SetAside aside;
  bool more = true;
  std::uint64_t first = 0, begun = 0;
  for (std::uint32_t looks = 0;;) {
    std::uint32_t lanes = ~0u;
    if (more && !aside.full()) {
      const std::uint32_t unit = next();
      more = unit != kNone;
      if (more) lanes = aside.put(unit);
    }
    if (!more && aside.empty()) return true;
    if (aside.look(lanes, try_send)) {
      looks = 0;
      continue;
    }
    if (lanes != ~0u) continue;
    if (looks == 0) {
      idle();
      first = begun = nanoseconds();
    }
    if (++looks % kLooksBetween != 0) continue;
    std::uint32_t verdict = 0;
    if (threadIdx.x % 32 == 0) verdict = static_cast<std::uint32_t>(ask_for_rows(a.common, rows, looks / kLooksBetween, first, begun, step));
    verdict = __shfl_sync(~0u, verdict, 0);
    if (verdict == static_cast<std::uint32_t>(Verdict::Failed)) return false;
    if (verdict == static_cast<std::uint32_t>(Verdict::Busy)) begun = nanoseconds();
  }
}

// For each warp that sends, like send_combine().
template <typename T, int kVectors>
__device__ inline void send_when_ready(const CombineArguments& a, std::uint32_t step, const CombineUnits& units, std::uint32_t senders,
                                       CombineShared& s) {
  const Common& k = a.common;
  if (a.uses_weights) send_all_weights(a, step, threadIdx.x / 32, kCombineWarps);
  RowsWait rows;
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
  s.claimed.wait();
  // The block's own share, which its warps take in turn; then, for the first warp, those that nobody has begun.
  bool own = s.mine;
  std::uint32_t share = blockIdx.x, nth = own ? threadIdx.x / 32 : units.all;
  const auto next = [&] {
    for (;;) {
      while (nth * gridDim.x < units.all) {
        const std::uint32_t unit = unit_of_share(share, nth);
        if (threadIdx.x % 32 == 0) nth = own ? senders + atomicAdd(&s.sent, 1u) : nth + 1;
        nth = __shfl_sync(~0u, nth, 0);
        if (unit < units.all) return unit;
      }
      own = false;
      share = threadIdx.x < 32 ? take_another_share(k, Op::Combine, step, min(gridDim.x, units.all)) : kNone;
      if (share == kNone) return kNone;
      nth = 0;
    }
  };
  send_as_written(a, step, rows, next, try_send, [] {});
}

}  // namespace pplx::cuda
