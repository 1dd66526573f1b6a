// Storers and the teller of a large dispatch (large/load.cuh): how rows leave a thread block, and how peers hear of them.
#pragma once

#include "../decode/dispatch_send.cuh"
#include "../plan/output_rows.cuh"
#include "../common/rows.cuh"
#include "load.cuh"

namespace pplx::cuda {

// A storer. Storers take places of the ring that rows leave from by turns: of rows, or of parts of tokens as they are.
template <typename Mode>
class RowStorer {
  using Shape = SendShape<Mode>;

 public:
  // ring: of rows, or of tokens.
  __device__ RowStorer(const DispatchArguments& a, SendRings& rings, const char* ring, std::uint32_t number)
      : a_(a), k_(a.common), rings_(rings), ring_(ring), number_(number), shape_(k_), place_(shape_.places_out) {}

  __device__ void store() {
    const SpanTimer all(k_, Span::Sending);
    if (number_ >= shape_.storers) return;
    for (Ring at(kBatches);; at.next()) {
      // Stores of one batch are on their way while the next one's begin.
      if (!is_over(rings_.dealt + at.at, at.turn)) finish(0);
      await_turn(k_, Span::AwaitingPlan, rings_.dealt + at.at, at.turn);
      const Batch& batch = rings_.batches[at.at];
      const std::uint32_t tokens = batch.tokens;
      groups_ = 0;
      for (std::uint32_t i = 0; i < tokens; ++i)
        if constexpr (kQuantises<Mode>)
          store_next(batch, i, 0, shape_.row_bytes);
        else
          for (std::uint32_t part = 0; part < shape_.parts; ++part) store_next(batch, i, part * shape_.part_bytes, shape_.bytes(k_, part));
      finish(groups_);
      leaving_ = at.at;
      if (tokens == 0) return finish(0);
    }
  }

 private:
  static constexpr std::uint32_t kVectors = 8;  // sixteen bytes each, of a lane: a row of 7168 codes takes two passes
  static constexpr std::uint32_t kMostGroups = kTokensTogether;

  __device__ std::uint64_t* filled() const { return kQuantises<Mode> ? rings_.quantised : rings_.loaded; }
  __device__ std::uint64_t* emptied() const { return kQuantises<Mode> ? rings_.stored : rings_.used; }

  // The next place, if it is this storer's: `bytes` of the batch's nth token's row, from `first` on.
  __device__ void store_next(const Batch& batch, std::uint32_t nth, std::uint32_t first, std::uint32_t bytes) {
    if (place_.at % shape_.storers == number_) store_place(batch, nth, first, bytes);
    place_.next();
  }

  __device__ void store_place(const Batch& batch, std::uint32_t nth, std::uint32_t first, std::uint32_t bytes) {
    const std::uint32_t lane = threadIdx.x % 32;
    SentRow sent;
    if (lane >> k_.group_shift == 0) sent = batch.rows[(nth << k_.group_shift) + lane];
    const std::uint32_t copies = __ballot_sync(~0u, sent.place != nullptr);
    const char* const from = ring_ + place_.at * shape_.pitch;
    if constexpr (!kQuantises<Mode>)
      if (a_.scales != nullptr && first == 0) store_given_scales(sent, copies, batch.first + nth);
    {
      const SpanTimer waits(k_, Span::AwaitingTile);
      if (!is_over(filled() + place_.at, place_.turn)) release<0>();
      await_turn(filled() + place_.at, place_.turn);
    }
    fuzz_delay(k_, place_.at);
    const SpanTimer stores(k_, Span::StoringTiles);
    // In bulk: ordinary stores stand in one queue with loads and barriers of their multiprocessor, which a link that takes nothing would stop.
    if (sent.row != nullptr) bulk_store(sent.row + first, from, bytes);
    bulk_end_group();
    ++groups_;
    if (sent.place != nullptr) sent.place += first;
#pragma unroll 1
    for (std::uint32_t begin = 0; copies != 0 && begin < bytes; begin += kVectors * 512) {
      const std::uint32_t at = begin + 16 * lane;
      uint4 v[kVectors];
#pragma unroll
      for (std::uint32_t j = 0; j < kVectors; ++j)
        if (at + 512 * j < bytes) v[j] = *reinterpret_cast<const uint4*>(from + at + 512 * j);
      store_part(sent.place, copies, at, kQuantises<Mode> ? k_.payload_bytes : bytes, v);
    }
    if constexpr (kQuantises<Mode>)
      for (std::uint32_t nth_vec16 = lane; copies != 0 && nth_vec16 - lane < k_.scale_vec16s; nth_vec16 += 32) {
        uint4 vec16 = make_uint4(0, 0, 0, 0);
        if (nth_vec16 < k_.scale_vec16s) vec16 = *reinterpret_cast<const uint4*>(from + k_.dispatch.scales_at + 16 * nth_vec16);
        place_scales(sent.scales, copies, vec16, nth_vec16);
      }
    release<1>();
    unread_ = place_.at;
  }

  // Gives back the place before, behind which there have been kBut others.
  template <std::uint32_t kBut>
  __device__ void release() {
    if (unread_ == kNone) return;
    bulk_await_read<kBut>();
    mbarrier_arrive_of_warp(emptied() + unread_);
    unread_ = kNone;
  }
  // Ends the batch before. All stores but those of the last `groups` places are its.
  __device__ void finish(std::uint32_t groups) {
    if (groups == 0) release<0>();
    if (leaving_ == kNone) return;
    bulk_await_all_but<kMostGroups>(groups);
    mbarrier_arrive_of_warp(rings_.there + leaving_);
    leaving_ = kNone;
  }

  // To the place that each of `lanes` has, as far as there is room.
  __device__ static void store_part(char* mine, std::uint32_t lanes, std::uint32_t at, std::uint32_t room, const uint4 (&v)[kVectors]) {
#pragma unroll 1
    for (; lanes != 0; lanes &= lanes - 1) {
      char* const to = known_global(of_lane(mine, __ffs(static_cast<int>(lanes)) - 1)) + at;
#pragma unroll
      for (std::uint32_t j = 0; j < kVectors; ++j)
        if (at + 512 * j < room) store16(to + 512 * j, v[j]);
    }
  }

  // Stores this lane's vec16, the nth of a row's if there is one, to each copy of the own row.
  __device__ void place_scales(char* mine, std::uint32_t copies, const uint4& vec16, std::uint32_t nth) const {
#pragma unroll 1
    for (; copies != 0; copies &= copies - 1) place_scale(a_, of_lane(mine, __ffs(static_cast<int>(copies)) - 1), vec16, nth);
  }

  // Those that the caller gave for a token.
  __device__ void store_given_scales(const SentRow& sent, std::uint32_t copies, std::uint32_t token) const {
    const std::uint32_t rows = __ballot_sync(~0u, sent.row != nullptr);
#pragma unroll 1
    for (std::uint32_t begin = 0; begin < k_.scale_vec16s; begin += 32) {
      const std::uint32_t at = begin + threadIdx.x % 32;
      const uint4 vec16 = given_vec16_of_scales(a_, token, at);
#pragma unroll 1
      for (std::uint32_t bits = rows; bits != 0; bits &= bits - 1) {
        char* const to = known_global(of_lane(sent.row, __ffs(static_cast<int>(bits)) - 1)) + k_.dispatch.scales_at + 16 * at;
        if (at < k_.scale_vec16s) store16(to, vec16);
      }
      place_scales(sent.scales, copies, vec16, at);
    }
  }

  const DispatchArguments& a_;
  const Common& k_;
  SendRings& rings_;
  const char* const ring_;
  const std::uint32_t number_;
  const Shape shape_;
  Ring place_;
  std::uint32_t unread_ = kNone;  // the place that was stored from last, if it may still be read
  std::uint32_t leaving_ = kNone, groups_ = 0;  // a batch of which stores are on their way; places stored from since
};

// Raises the words of all rows that are there, behind one fence. By the teller, and by storers that are done: so fences overlap.
template <bool kGeneral, bool kRounds>
__device__ inline void tell_of_rows(const DispatchArguments& a, std::uint32_t step, SendRings& rings) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  for (;;) {
    std::uint32_t told = of_first_lane([&] { return *const_cast<volatile std::uint32_t*>(&rings.next_told); });
    if (told == kNone) return;
    await_turn(k, Span::AwaitingTile, rings.there + told % kBatches, told / kBatches);
    std::uint32_t end = told;
    bool ends = false;
    do
      ends = rings.batches[end++ % kBatches].tokens == 0;
    while (!ends && end - told < kBatches && is_over(rings.there + end % kBatches, end / kBatches));
    if (of_first_lane([&] { return atomicCAS(&rings.next_told, told, ends ? kNone : end); }) != told) continue;
    const SpanTimer tells(k, Span::Telling);
    fence_system();
    for (; told != end; ++told) {
      const Batch& batch = rings.batches[told % kBatches];
      char* const row = batch.rows[lane].row;
      const std::uint32_t round = kRounds ? batch.first / a.pieces.tokens : 0;
      if (kGeneral ? (batch.words >> lane & 1) != 0 : row != nullptr) {
        fuzz_delay(k, std::uint64_t{step} << 32 | told);
        store_relaxed(row + k.dispatch.arrival_at, kRounds ? word_of_round(k, step, round) : arrival_word(k.generation, step));
      }
      if constexpr (kRounds)
        if (k.remote != 0 && batch.tokens != 0 && batch.sent) count_tokens_of_round(a, step, round, batch.tokens);
      if constexpr (kGeneral && !kRounds)
        if (k.remote != 0) count_far_rows(a, step, batch.far[lane]);
      mbarrier_arrive_of_warp(rings.told + told % kBatches);
    }
    mark_stage(k, step, Stage::Published);
  }
}

}  // namespace pplx::cuda
