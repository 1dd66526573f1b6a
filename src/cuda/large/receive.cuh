// The receivers of a dispatch of many tokens. A warp carries each row of a run through registers: bulk copies are one queue of their
// multiprocessor, in which a store that the link does not take stands before all loads. Rows of a source that has few are received as by a
// dispatch of few tokens.
#pragma once

#include "../decode/dispatch_recv.cuh"
#include "../remote/relay_dispatch.cuh"
#include "../rounds/dispatch.cuh"
#include "ring.cuh"
#include "tuning.h"

namespace pplx::cuda {

// This rank's own rows that a thread block has stored as it stores those of peers, because their places were not known yet.
struct KeptRows {
  Once known;  // all of them
  std::uint32_t rows, next;
  std::uint32_t row[kMostKeptRows];  // numbers in the block that this rank sends itself
};

// Facts by which a warp finds the runs of peers' rows. They lie in shared memory, since a warp that kept them in registers would spill.
struct CarriedRuns {
  Once known;
  std::uint32_t most;  // rows of a run
  RunCounts counts;
};

// Receives what is in no round, by any warp that has received the rounds: rows of sources that have few tokens, for which no peer waits, then
// padding.
template <bool kHooks>
static __device__ __noinline__ void receive_rest(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, const Experts e) {
  const Common& k = a.common;
  const std::uint32_t padding = k.c.zero_pad && k.c.layout == LayoutKind::Ragged ? k.experts : 0;
  const auto rows_of = [&](std::uint32_t source) { return (s.many >> source & 1) != 0 ? 0 : s.rows_begin[source + 1] - s.rows_begin[source]; };
  std::uint32_t rows = 0;
  for (std::uint32_t source = 0; source < k.c.world; ++source) rows += rows_of(source);
  for (std::uint32_t unit; (unit = take_next(&s.next) * gridDim.x + blockIdx.x) < rows + padding;) {
    if (unit < rows) {
      std::uint32_t source = 0;
      for (; unit >= rows_of(source); ++source) unit -= rows_of(source);
      if (!receive_showing<kHooks>(a, step, s, e, s.rows_begin[source] + unit, 1)) return;
    } else {
      s.placed.wait();
      if (!s.placed_all) return;
      zero_padding<kHooks>(a, e, unit - rows, s.ragged_rows);
    }
  }
}

// The receiver: any warp that has nothing to send.
template <bool kHooks, bool kRounds>
class RowCarrier {
 public:
  __device__ RowCarrier(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, CarriedRuns* runs, const Experts& e)
      : a_(a), k_(a.common), step_(step), s_(s), runs_(runs), e_(e) {}

  // Counts the runs, by the warp that has counted rows.
  __device__ void find_runs() {
    if (s_.good) {
      const std::uint32_t own = sources() == k_.living ? 0 : s_.rows_begin[k_.c.rank + 1] - s_.rows_begin[k_.c.rank];
      const std::uint32_t most = rows_of_run(s_.rows_begin[k_.c.world] - own, gridDim.x);
      const RowRuns runs(k_, s_.rows_begin, sources(), most, a_.stretches);
      runs_->most = most;
      runs_->counts = runs.counts();
    }
    runs_->known.set();
  }

  // kept: what else there is to receive, if anything.
  __device__ void receive(KeptRows* kept = nullptr) {
    runs_->known.wait();
    if (!s_.good) return;
    const SpanTimer all(k_, Span::Receiving);
    const std::uint32_t padding = k_.c.zero_pad && k_.c.layout == LayoutKind::Ragged ? k_.experts : 0;
    for (;;) {
      const std::uint32_t unit = a_.send ? take_next(a_.chunk_counts.received) : take_next(&s_.next) * gridDim.x + blockIdx.x;
      const RunCounts counts = runs_->counts;
      if (unit >= counts.all && unit < counts.all + padding) {
        s_.placed.wait();
        if (!s_.placed_all) break;
        zero_padding<kHooks>(a_, e_, unit - counts.all, s_.ragged_rows);
        continue;
      }
      RowRun run;
      // Peers' thread blocks send side by side; each peer has about the number of this rank's.
      if (unit < counts.all)
        run = RowRuns(k_, s_.rows_begin, sources(), runs_->most, a_.stretches, counts).at(unit);
      else if (kept == nullptr || !find_kept(*kept, run))
        break;
      const bool shows = s_.showing[run.source] != 0;
      if (!(shows ? receive_showing<kHooks>(a_, step_, s_, e_, s_.rows_begin[run.source] + run.first, run.rows)
                  : carry_run(run, run.first, 0)))
        break;
    }
  }

  // In rounds, in which senders of this thread block may wait for what it receives. rows: of this warp; keeps: what sources tell.
  __device__ void receive_rounds(RoundRows& rows, bool keeps) {
    s_.rows_known.wait();
    if (!s_.good) return;
    const SpanTimer all(k_, Span::Receiving);
    Rounds rounds(k_, a_.pieces, step_, s_.rows_begin, Phase::DispatchRecv, rows_of_run(a_.pieces.tokens * k_.living, gridDim.x), rows);
    bool good = rounds.open(0, kNone, s_.many);
    for (RoundRun run; good && rounds.find(claim(k_, a_.pieces, step_, Claim::DispatchRecv), run);) {
      good = run.rows == 0 || carry_run({run.source, run.first, run.rows}, run.slot_row, run.round);
      if (good) finish_unit(k_, a_.pieces, step_, Op::Dispatch, run.round, rounds.units(), run.is_first, rounds.all());
    }
    if (!good || rounds.failed()) return;
    receive_rest<kHooks>(a_, step_, s_, e_);
    if (keeps) keep_rounds(a_, step_, s_.many);
  }

 private:
  static constexpr std::uint32_t kVectors = kPartBytes / 512;  // sixteen bytes each, of a lane
  static constexpr bool kFar = kHooks && !kRounds;  // remote peers' blocks are whole

  // A lane's part of what lies behind a row's payload.
  struct RowEnd {
    uint4 route, scales;
  };

  // Senders have placed this rank's own rows.
  __device__ std::uint32_t sources() const { return k_.living - (a_.send && !kHooks ? 1 : 0); }

  __device__ bool find_kept(KeptRows& kept, RowRun& run) const {
    kept.known.wait();
    const std::uint32_t nth = take_next(&kept.next);
    if (nth >= kept.rows) return false;
    run = {k_.c.rank, kept.row[nth], 1};
    return true;
  }

  __device__ RowEnd load_end(const char* row) const {
    const std::uint32_t lane = lane_anew();
    RowEnd end;
    end.route = make_uint4(kNowhere, 0, 0, 0);
    end.scales = make_uint4(0, 0, 0, 0);
    if (lane < k_.c.top_k) end.route = load_arrived(row + k_.dispatch.route_at + 16 * lane);
    if (lane < k_.scale_vec16s) end.scales = load_arrived(row + k_.dispatch.scales_at + 16 * lane);
    return end;
  }

  // True if a row's word says that it is here. A remote peer's is here with its piece.
  __device__ bool has_come(const char* word, std::uint32_t source, std::uint32_t round) const {
    if constexpr (kRounds)
      return is_remote(k_, source) || await_round(k_, word, Phase::DispatchRecv, step_, source, round, Says::Row);
    else
      return wait<Match::Exact>(k_, word, Phase::DispatchRecv, step_, source);
  }

  // The next row is asked for before this one's place is looked up. slot_row: where the run lies, unless it is a remote peer's.
  __device__ bool carry_run(const RowRun& run, std::uint32_t slot_row, std::uint32_t round) const {
    const std::uint32_t lane = lane_anew(), row_bytes = k_.dispatch.row_bytes;
    const bool far = kFar && is_remote(k_, run.source);
    const char* row = own_slot<!kRounds>(k_, set_of(k_.c, step_), Op::Dispatch, run.source) + k_.dispatch.row_at(slot_row);
    if (kRounds && is_remote(k_, run.source)) row += k_.heap.piece_at(Op::Dispatch, round);  // a piece has its own header
    const char* mine = row + std::uint64_t{lane} * row_bytes;
    {
      const SpanTimer waits(k_, Span::AwaitingRow);
      if (far && lane < run.rows) mine = await_far_row(a_, step_, run.source, run.first + lane);
      const bool there = lane >= run.rows || (far ? mine != nullptr : has_come(mine + k_.dispatch.arrival_at, run.source, round));
      if (!all_of_warp(there)) return false;
    }
    mark_stage(k_, step_, Stage::RowThere);
    if (far) row = of_lane(mine, 0);
    RowEnd end = load_end(row);
    uint4 v[kVectors];
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if (16 * lane + 512 * j < k_.payload_bytes) v[j] = load_arrived(row + 16 * lane + 512 * j);
    if (!await_places(k_, s_)) return false;
    const bool blank = kRounds && slot_row < k_.showing_rows, of_node = far && has_relays(k_);
    for (std::uint32_t i = 0; i < run.rows; ++i) {
      RowEnd its_end = end;
      if (of_node && end.route.w != k_.c.rank) its_end.route.x = kNowhere;  // a mate's choice
      const char* next = nullptr;
      if (i + 1 < run.rows) next = kFar ? of_lane(mine, static_cast<int>(i + 1)) : row + row_bytes;
      if (next != nullptr) end = load_end(next);
      const std::uint32_t number = run.first + i;
      if (!carry_row(run.source, number, its_end, row, next, v, kRounds ? blank : !far && number < k_.showing_rows)) return false;
      row = next;
    }
    mark_stage(k_, step_, Stage::RowPlaced);
    return true;
  }

  // v: the first of the row's vectors; then those of the next one, unless that is null. blank: a later step of few tokens has a row there that
  // shows by itself.
  __device__ bool carry_row(std::uint32_t source, std::uint32_t number, const RowEnd& end, const char* row, const char* next,
                            uint4 (&v)[kVectors], bool blank) const {
    const SpanTimer places(k_, Span::Placing);
    ArrivedRow r;
    r.source = source;
    r.at = s_.rows_begin[source] + number;
    if (!read_route(a_, step_, end.route, e_, r)) return false;
    const std::uint32_t copies = copies_of(k_, r);
    char* const mine = r.out_row != kNone ? a_.out.x + std::uint64_t{r.out_row} * k_.payload_bytes : nullptr;
#pragma unroll 1
    for (std::uint32_t begin = 0; begin < k_.payload_bytes; begin += kPartBytes) {
      const bool ends = k_.payload_bytes - begin <= kPartBytes;
      const char* const from = ends ? next : row;
      if (k_.payload_bytes % kPartBytes == 0)
        carry_part<true>(mine, copies, begin, from, ends ? 0 : begin + kPartBytes, v);
      else
        carry_part<false>(mine, copies, begin, from, ends ? 0 : begin + kPartBytes, v);
      if (blank) make_part_blank(row, begin);
    }
    if (quantised(k_.c.wire)) place_scales(r, copies, end.scales, row, blank);
    place_words(a_, r);
    if constexpr (kHooks) HookWords<kHooks>::count_placed(a_, r.out_row, a_.hooks.row_units);
    return true;
  }

  // To each place. Each vector is asked for that comes after one, of the row `from` from `next` on, as that is stored for the last time. kWhole:
  // every lane has all vectors, of every part.
  template <bool kWhole>
  __device__ void carry_part(char* mine, std::uint32_t copies, std::uint32_t begin, const char* from, std::uint32_t next, uint4 (&v)[kVectors]) const {
    const std::uint32_t lane_at = lane_anew() * 16, bytes = k_.payload_bytes;
    const auto is_in = [&](std::uint32_t at, std::uint32_t j) { return kWhole || at + lane_at + 512 * j < bytes; };
#pragma unroll 1
    for (; (copies & (copies - 1)) != 0; copies &= copies - 1) {
      char* const to = known_global(of_lane(mine, __ffs(static_cast<int>(copies)) - 1)) + begin + lane_at;
#pragma unroll
      for (std::uint32_t j = 0; j < kVectors; ++j)
        if (is_in(begin, j)) store16(to + 512 * j, v[j]);
    }
    char* const to = known_global(of_lane(mine, copies != 0 ? __ffs(static_cast<int>(copies)) - 1 : 0)) + begin + lane_at;
    const auto carry = [&](bool asks) {
#pragma unroll
      for (std::uint32_t j = 0; j < kVectors; ++j) {
        if (copies != 0 && is_in(begin, j)) store16(to + 512 * j, v[j]);
        if (asks && is_in(next, j)) v[j] = load_arrived(from + next + lane_at + 512 * j);
      }
    };
    if (from != nullptr)
      carry(true);
    else
      carry(false);
  }

  // This lane has read all of it.
  __device__ void make_part_blank(const char* row, std::uint32_t begin) const {
    const std::uint32_t at = begin + lane_anew() * 16;
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if (at + 512 * j < k_.payload_bytes) make_blank(const_cast<char*>(row) + at + 512 * j);
  }

  // vec16: this lane's. Few rows have more than a warp has lanes.
  __device__ void place_scales(const ArrivedRow& r, std::uint32_t copies, const uint4& vec16, const char* row, bool blank) const {
    const std::uint32_t lane = lane_anew();
    char* const mine = r.out_row != kNone ? scale_place(a_, r.out_row, r.expert) : nullptr;
    const char* const scales = row + k_.dispatch.scales_at;
#pragma unroll 1
    for (; copies != 0; copies &= copies - 1) {
      char* const to = of_lane(mine, __ffs(static_cast<int>(copies)) - 1);
      place_scale(a_, to, vec16, lane);
#pragma unroll 1
      for (std::uint32_t nth = 32 + lane; nth < k_.scale_vec16s; nth += 32)
        place_scale(a_, to, load_arrived(scales + 16 * nth), nth);
    }
#pragma unroll 1
    for (std::uint32_t nth = lane; blank && nth < k_.scale_vec16s; nth += 32) make_blank(const_cast<char*>(scales) + 16 * nth);
  }

  const DispatchArguments& a_;
  const Common& k_;
  const std::uint32_t step_;
  ReceiveShared& s_;
  CarriedRuns* const runs_;  // null in rounds
  const Experts& e_;
};

}  // namespace pplx::cuda
