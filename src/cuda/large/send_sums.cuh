// The send half of a large combine whose rows are sums. The dealer asks for the inputs of each row. The adders leave parts of its
// sum in shared memory. The teller copies each part to the row's source, and raises a run's words once its rows have arrived. An
// idle teller tells of all that was dealt, so the dealer may wait: in rounds for room, and for a source's weights.
#pragma once

#include "../rounds/combine.cuh"
#include "adders.cuh"
#include "combine_kernel.cuh"

namespace pplx::cuda {

inline constexpr std::uint32_t kOutBytes = kPartsOut * kDealtPart;
inline constexpr std::uint16_t kOfAnswer = 0xffff;  // in place of a round: a run of a relay's answer

// A part of a sum, or of a row as it is, on its way out.
struct PartOut {
  char* to = nullptr;  // null: there are no more
  const char* from = nullptr;
  std::uint64_t* used = nullptr;  // turns of the place that it has come to, if it stayed there
  std::uint32_t at = 0, bytes = 0;  // where in the row, and how many
  RunEnd run;  // the run that ends with this part
};

struct PartsOut {
  std::uint64_t filled[kPartsOut], sent[kPartsOut];  // turns
  PartOut parts[kPartsOut];

  // Initialises the ring, by one thread, before the first `__syncthreads`. `adders`: producer warps.
  __device__ void init(std::uint32_t adders) {
    for (std::uint64_t& turns : filled) mbarrier_init(&turns, adders);
    for (std::uint64_t& turns : sent) mbarrier_init(&turns, 1);
    fence_mbarriers();
  }
};

// The dealer: one warp. kExtras: handles every combine.
template <bool kExtras>
class SendDealer : RowDealer {
 public:
  using RowDealer::RowDealer;

  // Deals the block's own share of the runs, if it still has it, and those that no block has begun; in rounds what it claims.
  __device__ void deal(RoundRows& rounds) {
    const SpanTimer all(k_, Span::SendingSums);
    const std::uint32_t most = min(told_together(s_.rows_begin[k_.c.world], gridDim.x), together());
    if (kExtras && k_.heap.in_pieces) {
      deal_rounds(most, rounds);
    } else if (!kExtras || k_.remote == 0 || has_relays(k_) || may_write_all(k_, step_, Op::Combine)) {
      deal_blocks(most);
    }
    tell(0, kNoMore);
  }

 private:
  // A run, and a lane's choice of one of its rows.
  struct Looked {
    RowRun run;
    std::uint32_t choices = 0;  // the row's choices, a bit each
    std::uint32_t place = kNone;
    float weight = 1.0f;
  };

  // With relays rows for them come first, then this relay's answers: the network waits for those.
  __device__ void deal_blocks(std::uint32_t most) {
    const bool relays = kExtras && has_relays(k_);
    const std::uint32_t all = k_.living - (a_.sums_own ? 1 : 0), far = relays ? remote_peers(k_) : all;
    for (bool near = false;; near = true) {
      if (!kExtras || a_.send) {
        const Op op = near ? kNearSums : Op::Combine;
        const RowRuns runs(k_, s_.rows_begin, near ? all - far : far, most, 1, near ? far : 0);
        const bool mine = near ? of_first_lane([&] { return take_share(k_, op, blockIdx.x, step_); }) != 0 : s_.mine;
        send_shares(k_, op, step_, mine, runs, [&](std::uint32_t n) { return look_up(n < runs.all() ? runs.at(n) : RowRun{0, 0, 0}); },
                    [&](std::uint32_t, const Looked& looked) { deal_run(looked, looked.run.first, 0); });
      }
      if (!relays || near) return;
      if (a_.recv && a_.relays.sources != 0) deal_answers();
    }
  }

  __device__ bool compact() const { return kExtras && k_.c.layout == LayoutKind::Compact; }

  // Deals the rounds of this launch, in the order in which all thread blocks claim their runs.
  __device__ void deal_rounds(std::uint32_t most, RoundRows& rows) {
    const PieceArguments& p = a_.pieces;
    Rounds rounds(k_, p, step_, s_.rows_begin, Phase::CombineSend, most, rows);
    bool good = rounds.open(p.begin, p.end, s_.many);
    // A receive half does not wait with what its send half has claimed.
    const Claim what = p.begins ? Claim::CombineSend : Claim::CombineRest;
    for (RoundRun run; good && rounds.find(claim(k_, p, step_, what), run);) {
      if (run.is_header ? run.round >= *kept_rounds(p, run.source) : run.rows == 0 || a_.release) continue;
      const Looked looked = look_up({run.source, run.first, run.rows});
      good = make_room(k_, p, step_, run) && (run.is_header || deal_run(looked, run.slot_row, run.round));
      if (good && run.is_header) send_header_of_round(a_, step_, run, s_);
    }
  }

  __device__ Looked look_up(const RowRun& run) const {
    Looked looked;
    looked.run = run;
    const std::uint32_t nth = lane() >> k_.group_shift;
    if (nth >= run.rows || choice() >= (compact() ? 1 : k_.c.top_k)) return looked;
    const std::uint32_t row = s_.rows_begin[run.source] + run.first + nth;
    looked.choices = a_.received.choices[row];
    looked.place = a_.received.out_row[compact() ? row : std::uint64_t{row} * k_.c.top_k + choice()];
    if (!compact() && a_.weighted) looked.weight = a_.received.weight[std::uint64_t{row} * k_.c.top_k + choice()];
    return looked;
  }

  // slot_row: the run's first, in the slot. False: the source's weights will not come.
  __device__ bool deal_run(const Looked& looked, std::uint32_t slot_row, std::uint32_t round) {
    const RowRun& run = looked.run;
    const std::uint32_t place = checked(choice() < __popc(looked.choices) ? looked.place : kNone);
    const std::uint32_t placed = __ballot_sync(~0u, place != kNone);
    const char* const from = expert_row(place);
    char* rows = block_of_sums<!kExtras>(a_, step_, run.source) + k_.combine.row_at(slot_row);
    const bool carried = kExtras && is_carried(k_, run.source), by_word = carried || has_words<!kExtras>(a_, s_, run.source);
    if (carried) rows += k_.heap.piece_at(Op::Combine, round);
    mark_stage(k_, step_, Stage::Found);
    const RunEnd end{static_cast<std::uint16_t>(round), static_cast<std::uint8_t>(run.source), static_cast<std::uint8_t>(run.rows)};
    DealtRow dealt;
    dealt.weight = looked.weight;
    const std::uint32_t nth = lane() >> k_.group_shift;
    const bool here = nth < run.rows && choice() < k_.c.top_k;
    if (kExtras && a_.uses_weights)
      if (!load_sent_weight(a_, step_, run.source, run.first + nth, here ? choice() : kNone, dealt.weight)) return false;
    for (std::uint32_t i = 0; i < run.rows; ++i) {
      const std::uint32_t inputs = placed & lanes_of(i);
      if (kExtras && a_.has_tail) send_tail(i, looked.choices, place, rows + std::uint64_t{i} * k_.combine.row_bytes, by_word);
      dealt.own = static_cast<std::uint8_t>(__popc(inputs));
      for (dealt.at = 0; dealt.at < k_.row_bytes; dealt.at += part_) {
        const std::uint32_t bytes = min(part_, k_.row_bytes - dealt.at);
        const bool ends = i + 1 == run.rows && dealt.at + part_ >= k_.row_bytes;
        dealt.to = rows + std::uint64_t{i} * k_.combine.row_bytes + dealt.at;
        dealt.what = !by_word ? kRowsShow : compact() && inputs != 0 ? kLeavesAsIs : 0;
        if (ends) dealt.run = end;
        if (inputs == 0) add(0, dealt, nullptr, 0);
        for (std::uint32_t bits = inputs; bits != 0; bits &= bits - 1) add(__ffs(static_cast<int>(bits)) - 1, dealt, from + dealt.at, bytes);
      }
    }
    return true;
  }

  // Deals what this relay answers: for each row of a node block the sum of what mates return.
  __device__ void deal_answers() {
    const auto most = [](std::uint32_t rows) { return told_together(rows, gridDim.x); };
    answer_sources(a_, step_, 1, [&](std::uint32_t rows) { return (rows + most(rows) - 1) / most(rows); },
                   [&](std::uint32_t source, std::uint32_t rows, std::uint32_t unit) {
                     const std::uint32_t first = unit * most(rows);
                     return deal_answer(source, first, min(most(rows), rows - first));
                   });
  }

  // Rows [first, first + rows) of the node block. A lane looks after a row and a mate. False: something failed.
  __device__ bool deal_answer(std::uint32_t source, std::uint32_t first, std::uint32_t rows) {
    const Relays& r = a_.relays;
    const std::uint32_t set = set_of(k_.c, step_);
    std::uint32_t width = 1;
    while (width < k_.c.node_ranks) width *= 2;
    for (std::uint32_t begin = 0; begin < rows; begin += 32 / width) {
      const std::uint32_t nth = lane() / width, mate = lane() % width, n = min(32 / width, rows - begin);
      const bool is_there = nth < n && (r.mates >> mate & 1) != 0;
      const std::uint32_t number = is_there ? NumbersOfNode(k_, r, set, source).of_row(first + begin + nth, mate) : kNone;
      const bool comes = number != kNone;
      const std::uint32_t returned = __ballot_sync(~0u, comes);
      char* const from = comes ? block_of_mate(k_, r, set, source, mate) + k_.combine.row_at(number) : nullptr;
      const bool good = !comes || wait<Match::Exact>(k_, from + k_.combine.arrival_at, Phase::CombineRecv, step_, r.rank[mate]);
      if (!all_of_warp(good)) return false;
      fence_copies();
      for (std::uint32_t i = 0; i < n; ++i) {
        const std::uint32_t row = first + begin + i, lanes = returned & (~0u >> (32 - width)) << (i * width);
        char* const to = block_for(k_, set, Op::Combine, source) + r.answer.row_at(row);
        if (a_.has_tail && !answer_tail(a_, step_, source, row, lanes, from, r.rank[mate], to)) return false;
        DealtRow dealt;
        dealt.what = kMakeBlank;
        dealt.own = static_cast<std::uint8_t>(__popc(lanes));
        for (dealt.at = 0; dealt.at < k_.row_bytes; dealt.at += part_) {
          dealt.row = from + dealt.at;
          dealt.to = to + (k_.c.combine_fp8 ? dealt.at / dtype_bytes(k_.c.dtype) : dealt.at);
          if (begin + i + 1 == rows && dealt.at + part_ >= k_.row_bytes)
            dealt.run = {kOfAnswer, static_cast<std::uint8_t>(source), static_cast<std::uint8_t>(rows)};
          for (std::uint32_t bits = lanes; bits != 0; bits &= bits - 1)
            add(__ffs(static_cast<int>(bits)) - 1, dealt, dealt.row, min(part_, k_.row_bytes - dealt.at));
        }
      }
    }
    return true;
  }

  // Sends the tail of the nth row that was looked up. A row that shows by itself has a word for it: a tail is any bits.
  __device__ void send_tail(std::uint32_t nth, std::uint32_t choices, std::uint32_t place, char* row, bool by_word) const {
    const int first = static_cast<int>(nth << k_.group_shift);
    const std::uint32_t its_place = __shfl_sync(~0u, place, (first + static_cast<int>(lane())) & 31);
    write_tail(a_, __shfl_sync(~0u, choices, first), its_place, row + k_.combine.tail_at);
    __syncwarp();
    if (!by_word && lane() == 0) publish(k_, row + k_.combine.arrival_at, arrival_word(k_.generation, step_));
  }
};

// An adder: one of several warps.
template <typename T, typename Adders, bool kExtras>
class SendAdder : RowAdder<Adders> {
  using Base = RowAdder<Adders>;
  using Base::a_, Base::k_, Base::step_, Base::ring_, Base::memory_, Base::number_, Base::part_, Base::place_, Base::kVectors;
  using Base::at, Base::kApart, Base::lane, Base::leave, Base::look;

 public:
  // out: kOutBytes.
  __device__ SendAdder(const CombineArguments& a, std::uint32_t step, DealtRows& ring, const RingMemory& memory, std::uint32_t number, PartsOut& parts,
                       char* out)
      : Base(a, step, ring, memory, number), parts_(parts), out_(out) {}

  __device__ void add_up() {
    const SpanTimer all(k_, Span::SendingSums);
    for (;;) {
      const DealtRow first = look();
      if ((first.what & kNoMore) != 0) break;
      if (kExtras && (first.what & kLeavesAsIs) != 0)
        pass_on(first);
      else
        add_part(first);
    }
    await_place();
    fill({});
  }

 private:
  // The teller gives the place back, for the first adder.
  __device__ void pass_on(const DealtRow& row) {
    await_place();
    fill({row.to, memory_ + place_.at * part_, ring_.used + place_.at, row.at, min(part_, k_.row_bytes - row.at), row.run});
    if (number_ == 0)
      place_.next();
    else
      leave();
  }

  __device__ void add_part(const DealtRow& first) {
    const std::uint32_t bytes = min(part_, k_.row_bytes - first.at);
    if (first.own == 0) leave();
    Sums<T, kVectors> sums;
    const bool of_mates = (first.what & kMakeBlank) != 0;  // rows that are sums already
    if (kExtras && first.own != 0 && (of_mates || k_.c.layout == LayoutKind::Compact)) sums.start(-0.0f);  // keeps the sign of zero
    Base::add_rows(first.own, bytes, sums);
    fuzz_delay(k_, std::uint64_t{step_} << 32 | first.at);
    const bool shows = (first.what & kRowsShow) != 0;
    if (!shows) await_place();
    char* const to = shows ? first.to : out_ + place_out() * part_;
    if (kExtras && of_mates && k_.c.combine_fp8) {
      const std::uint32_t element = first.at * T::kPerVector / 16;
      auto* const scales = reinterpret_cast<float*>(first.to - element + a_.relays.answer.scales_at) + element / scale_block(Wire::FP8);
      store_codes(sums, [&](int j) { return at(j); }, bytes, to, scales);
      return fill({first.to, to, nullptr, first.at, bytes_of_codes(bytes * T::kPerVector / 16), first.run});
    }
    const auto put = [&](char* place, const uint4& v) { shows ? store_vec16(place, v) : store16(place, v); };
    sums.store(to, at(0), bytes, put, kApart);
    if (!shows) fill({first.to, to, nullptr, first.at, bytes, first.run});
    mark_stage(k_, step_, Stage::Sent);
  }

  __device__ std::uint32_t place_out() const { return filled_ % kPartsOut; }

  __device__ void await_place() {
    if (filled_ >= kPartsOut) await_turn(k_, Span::AwaitingPlaceOfSum, parts_.sent + place_out(), filled_ / kPartsOut - 1);
  }

  // The next place has this warp's part of it.
  __device__ void fill(const PartOut& part) {
    fence_shared_copies();
    if (number_ == 0 && lane() == 0) parts_.parts[place_out()] = part;
    mbarrier_arrive_of_warp(parts_.filled + place_out());
    ++filled_;
  }

  PartsOut& parts_;
  char* const out_;
  std::uint32_t filled_ = 0;
};

// The teller: one warp.
template <bool kExtras>
class SendTeller {
 public:
  __device__ SendTeller(const CombineArguments& a, std::uint32_t step, const CombineShared& s, PartsOut& parts)
      : a_(a), k_(a.common), step_(step), s_(s), parts_(parts) {}

  __device__ void tell_all() {
    const SpanTimer all(k_, Span::SendingSums);
    const std::uint32_t on_their_way = senders_of(gridDim.x, min(k_.row_bytes, kDealtPart), kPartsOut - 1);
    for (Ring place(kPartsOut);; place.next()) {
      // Nothing to do meanwhile, so what is on its way may as well be told of.
      if (!is_over(parts_.filled + place.at, place.turn)) arrive(0);
      await_turn(k_, Span::AwaitingInputs, parts_.filled + place.at, place.turn);
      const PartOut& part = parts_.parts[place.at];
      if (part.to == nullptr) break;
      const SpanTimer stores(k_, Span::StoringSums);
      fuzz_delay(k_, std::uint64_t{step_} << 32 | part.at);
      if (threadIdx.x % 32 == 0) {
        bulk_store(part.to, part.from, part.bytes);
        bulk_end_group();
      }
      ++begun_;
      arrive(on_their_way - 1);
    }
    arrive(0);
  }

 private:
  // Tells of all parts that were begun but the last `but`.
  __device__ void arrive(std::uint32_t but) {
    if (begun_ <= arrived_ + but) return;
    if (threadIdx.x % 32 == 0) bulk_await_all_but<kPartsOut - 2>(but);
    __syncwarp();
    for (; arrived_ + but < begun_; ++arrived_) {
      const PartOut part = parts_.parts[arrived_ % kPartsOut];
      mbarrier_arrive_of_warp(parts_.sent + arrived_ % kPartsOut);
      if (kExtras && part.used != nullptr) mbarrier_arrive_of_warp(part.used);
      if (part.run.rows != 0) tell(part);
    }
  }

  __device__ void tell(const PartOut& part) {
    const SpanTimer tells(k_, Span::TellingOfSums);
    const std::uint32_t lane = threadIdx.x % 32, source = part.run.source;
    const bool answers = kExtras && part.run.round == kOfAnswer;
    if (answers || (kExtras && is_carried(k_, source))) {
      fence_system();
      std::uint32_t rows = s_.rows_begin[source + 1] - s_.rows_begin[source];
      if (answers) rows = NumbersOfNode(k_, a_.relays, set_of(k_.c, step_), source).all();
      if (k_.heap.in_pieces)
        count_sums_of_round(k_, a_.pieces, step_, source, part.run.round, rows, part.run.rows);
      else if (lane == 0)
        count_rows(k_, step_, Op::Combine, source, last_row(part) + 1 - part.run.rows, part.run.rows, RowsOfBlock(rows));
    } else if (lane < part.run.rows) {
      fence_system();
      fuzz_delay(k_, step_);
      store_relaxed(part.to - part.at - std::uint64_t{lane} * k_.combine.row_bytes + k_.combine.arrival_at,
                    kExtras && k_.heap.in_pieces ? word_of_round(k_, step_, part.run.round) : arrival_word(k_.generation, step_));
    }
    __syncwarp();
  }

  // The row of a remote peer's whole block that a part is of.
  __device__ std::uint32_t last_row(const PartOut& part) const {
    const BlockLayout& block = a_.relays.answer;
    const char* const rows = block_for(k_, set_of(k_.c, step_), Op::Combine, part.run.source) + block.row_at(0);
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(part.to - rows) / block.row_bytes);
  }

  const CombineArguments& a_;
  const Common& k_;
  const std::uint32_t step_;
  const CombineShared& s_;
  PartsOut& parts_;
  std::uint32_t begun_ = 0, arrived_ = 0;  // parts
};

}  // namespace pplx::cuda
