// The receivers of a dispatch of many tokens in pieces. A worker takes a run of rows, of one source and round. A bulk copy brings a row to shared
// memory, and others take it to each of its places.
#pragma once

#include "../decode/dispatch_recv.cuh"
#include "../extras/hooks.cuh"
#include "../plan/chunk_plan.cuh"
#include "rounds.cuh"

namespace pplx::cuda {

// Behind a row's payload: scales and route.
constexpr std::uint32_t row_end_bytes(const BlockLayout& row, std::uint32_t top_k) { return row.route_at + 16 * top_k - row.scales_at; }
inline constexpr std::uint32_t kMostRowEndBytes = 1088;
inline constexpr std::uint32_t kRowInBytes = kRowPartBytes + kMostRowEndBytes;
inline constexpr std::uint32_t kReceiverBytes = kRowsIn * kRowInBytes;

// Keeps what sources tell of their rounds, by the warp that has counted rows, in one thread block: peers tell of the set's next step while
// this rank still sends.
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
      uint4 vec16;
      if (!await_round_begin(k, a.pieces, Phase::DispatchRecv, step, source, round, vec16)) return;
      if (round == 0) rounds = min(vec16.y, a.pieces.most);
      kept[1 + round] = vec16.x;
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
  for (std::uint32_t expert; s.placed_all && (expert = take_next(&s.next) * gridDim.x + blockIdx.x) < k.experts;)
    zero_padding<kHooks>(a, e, expert, s.ragged_rows);
}

template <bool kHooks>
class RoundReceiver {
 public:
  // memory: its own, kReceiverBytes. parities: of the turns so far of `loaded`, a bit each.
  __device__ RoundReceiver(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, const Experts& e, char* memory, std::uint64_t* loaded,
                          std::uint32_t parities)
      : a_(a), k_(a.common), step_(step), s_(s), e_(e), memory_(memory), loaded_(loaded), parities_(parities),
        parts_((k_.payload_bytes + kRowPartBytes - 1) / kRowPartBytes),
        part_bytes_(static_cast<std::uint32_t>(align_up((k_.payload_bytes + parts_ - 1) / parts_, 16))),
        end_bytes_(row_end_bytes(k_.dispatch, k_.c.top_k)) {}

  // rows: of this warp.
  __device__ void receive_rounds(RoundRows& rows) {
    s_.rows_known.wait();
    if (!s_.good) return;
    const SpanTimer all(k_, Span::Receiving);
    Rounds rounds(k_, a_.pieces, step_, s_.rows_begin, Phase::DispatchRecv, kRowsOfRun, parts_, rows);
    bool good = rounds.open(0, kNone);
    for (RoundRun run; good && rounds.find(claim(k_, a_.pieces, step_, Claim::DispatchRecv), run);) {
      round_ = run.round;
      if (run.rows != 0) {
        // A piece that the proxy carries has its own header in front.
        const std::uint64_t piece_at = is_remote(k_, run.source) ? k_.heap.piece_at(Op::Dispatch, run.round) : 0;
        rows_ = own_slot(k_, set_of(k_.c, step_), Op::Dispatch, run.source) + piece_at + k_.dispatch.row_at(run.slot_row);
        good = receive_run(run.source, run.first, run.rows, run.part);
      }
      if (good) finish_unit(k_, a_.pieces, step_, Op::Dispatch, run.round, rounds.units(), run.is_first, rounds.all());
    }
    if (good && !rounds.failed()) clear_padding<kHooks>(a_, s_, e_);
    bulk_await_stored<0>();
  }

 private:
  __device__ bool has_come(const char* word, std::uint32_t source) const {
    return is_remote(k_, source) || row_has_come(k_, word, Phase::DispatchRecv, step_, source, round_);
  }

  __device__ char* in(std::uint32_t nth) const { return memory_ + nth % kRowsIn * kRowInBytes; }

  // Asks for the nth row of a run. Its place is not read any more.
  __device__ void ask(const char* row, std::uint32_t begin, std::uint32_t bytes, std::uint32_t nth) {
    if (threadIdx.x % 32 != 0) return;
    std::uint64_t* const turns = loaded_ + nth % kRowsIn;
    mbarrier_expect(turns, bytes + end_bytes_);
    bulk_load(in(nth), row + begin, bytes, turns);
    bulk_load(in(nth) + kRowPartBytes, row + k_.dispatch.scales_at, end_bytes_, turns);
  }

  __device__ bool receive_run(std::uint32_t source, std::uint32_t first, std::uint32_t n, std::uint32_t part) {
    const std::uint32_t lane = threadIdx.x % 32, row_bytes = k_.dispatch.row_bytes;
    {
      const SpanTimer waits(k_, Span::AwaitingRow);
      const bool good = lane >= n || has_come(rows_ + std::uint64_t{lane} * row_bytes + k_.dispatch.arrival_at, source);
      if (!all_of_warp(good)) return false;
    }
    mark_stage(k_, Stage::RowThere);
    const std::uint32_t begin = part * part_bytes_, bytes = min(part_bytes_, k_.payload_bytes - begin);
    fence_copies();
    await_places();
    for (std::uint32_t i = 0; i < min(n, kRowsIn); ++i) ask(rows_ + std::uint64_t{i} * row_bytes, begin, bytes, i);
    s_.placed.wait();
    bool placed = s_.placed_all;
    for (std::uint32_t i = 0; i < n; ++i) {
      const std::uint32_t turn = i % kRowsIn;
      {
        const SpanTimer waits(k_, Span::AwaitingLoad);
        await_turn(loaded_ + turn, parities_ >> turn);
      }
      parities_ ^= 1u << turn;
      char* const row = rows_ + std::uint64_t{i} * row_bytes;
      placed = placed && place_row(source, first + i, part, begin, bytes, in(i));
      if (kHooks) count_row_before();
      if (i + kRowsIn >= n) continue;
      await_places();
      ask(row + std::uint64_t{kRowsIn} * row_bytes, begin, bytes, i + kRowsIn);
    }
    if (kHooks) count_rows_left();
    mark_stage(k_, Stage::RowPlaced);
    return placed;
  }

  // Each row is a group of stores. It is counted when the one behind it has been given away, and so had its time to arrive.
  __device__ void count_row_before() {
    bulk_await_stored<1>();
    count(before_);
    before_ = last_;
    last_ = kNone;
  }
  __device__ void count_rows_left() {
    bulk_await_stored<0>();
    count(before_);
    before_ = kNone;
  }
  __device__ void count(std::uint32_t place) const {
    fence_copies();
    if (__any_sync(~0u, place != kNone)) HookWords<true>::count_placed(a_, place, a_.hooks.large_part_units);
  }

  // All that was stored has been read.
  __device__ void await_places() const {
    const SpanTimer waits(k_, Span::AwaitingPlaceIn);
    bulk_await_read<0>();
    __syncwarp();
  }

  // A part of a row that is in shared memory, to each of its places.
  __device__ bool place_row(std::uint32_t source, std::uint32_t number, std::uint32_t part, std::uint32_t begin, std::uint32_t bytes,
                            const char* from) {
    const SpanTimer places(k_, Span::Placing);
    const std::uint32_t lane = threadIdx.x % 32;
    const char* const end = from + kRowPartBytes;
    ArrivedRow r;
    r.source = source;
    r.at = s_.rows_begin[source] + number;
    uint4 vec16 = make_uint4(kNowhere, 0, 0, 0);
    if (lane < k_.c.top_k) vec16 = *reinterpret_cast<const uint4*>(end + k_.dispatch.route_at - k_.dispatch.scales_at + 16 * lane);
    if (!read_route(a_, step_, vec16, e_, r)) return false;
    const std::uint32_t copies = copies_of(k_, r);
    const bool with_scales = quantised(k_.c.wire) && part == parts_ - 1;
    if ((copies >> lane & 1) != 0) {
      bulk_store(a_.out.x + std::uint64_t{r.out_row} * k_.payload_bytes + begin, from, bytes);
      if (with_scales && k_.scales_in_pieces) bulk_store(scale_place(a_, r.out_row, r.expert), end, scale_bytes(k_.c));
    }
    bulk_end_group();
    if (with_scales && !k_.scales_in_pieces) place_scales(r, copies, end);
    if (part == 0) place_words(a_, r);
    if (kHooks) last_ = r.out_row;
    __syncwarp();
    return true;
  }

  __device__ void place_scales(const ArrivedRow& r, std::uint32_t copies, const char* scales) const {
    char* const mine = r.out_row != kNone ? scale_place(a_, r.out_row, r.expert) : nullptr;
    for (; copies != 0; copies &= copies - 1) {
      char* const to = of_lane(mine, __ffs(static_cast<int>(copies)) - 1);
      for (std::uint32_t nth = threadIdx.x % 32; nth < k_.scale_vec16s; nth += 32)
        place_scale(a_, to, *reinterpret_cast<const uint4*>(scales + 16 * nth), nth);
    }
  }

  const DispatchArguments& a_;
  const Common& k_;
  const std::uint32_t step_;
  ReceiveShared& s_;
  const Experts& e_;
  char* const memory_;
  std::uint64_t* const loaded_;
  std::uint32_t parities_;
  std::uint32_t before_ = kNone, last_ = kNone;  // where this lane's choice of the last rows went, before it is counted
  const std::uint32_t parts_, part_bytes_, end_bytes_;  // parts and bytes of a row
  // The present run.
  std::uint32_t round_ = 0;
  char* rows_ = nullptr;  // where it begins
};

}  // namespace pplx::cuda
