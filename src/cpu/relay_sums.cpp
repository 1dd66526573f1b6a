#include "relay_sums.h"

#include <cstring>

#include "vector/kernels.h"

namespace pplx::cpu {
namespace {

class RelaySums final : public StagedRun {
 public:
  RelaySums(Blocks& blocks, const OpenStep& open)
      : b_(blocks), c_(blocks.config()), k_(kernels()), step_(open.step), set_(set_of(c_, step_)), flags_(open.flags),
        received_(open.received), mates_(blocks.rails().mates), sources_(blocks.rails().sources), block_(combine_block(c_)),
        answer_(answer_block(c_)) {}

 private:
  enum Stages { kHeaders, kRows };

  // A group for each source.
  bool begin(int stage, std::vector<std::uint32_t>& units) override {
    switch (stage) {
      case kHeaders:
        overflowed_.assign(sources_.size(), 0);
        units.assign(sources_.size(), 1);
        return true;
      case kRows: {
        std::uint64_t packed = 0;
        before_ = b_.announced(set_, Op::Combine);
        for (std::uint32_t nth = 0; nth < sources_.size(); ++nth) {
          answers_.push_back(b_.send_area(set_, Op::Combine) + packed);
          packed += align_up(answer_.bytes(rows(nth)), 64);
          units.push_back(units_of(rows(nth), block_.row_bytes, &rows_per_unit_));
        }
        return true;
      }
      default: return false;
    }
  }

  bool ready(int stage, std::uint32_t nth) override {
    if (stage == kRows) return Blocks::have_left(before_);
    for (std::uint32_t mate : mates_)
      if (!b_.has_returned(step_, sources_[nth], mate)) return false;
    return true;
  }

  Waiting waiting_of(int stage, std::uint32_t nth) const override {
    const std::uint32_t source = sources_[nth];
    if (stage == kRows) return b_.waiting_for(step_, Signal::Combine, source, "the network to take the last answer");
    for (std::uint32_t mate : mates_)
      if (!b_.has_returned(step_, source, mate)) return b_.waiting_for_return(step_, source, mate);
    return {};
  }

  void run(int stage, std::uint32_t nth, std::uint32_t unit) override {
    if (stage == kHeaders) {
      for (std::uint32_t mate : mates_) read_header(nth, mate);
      return;
    }
    std::vector<Returned> returned;   // each mate's next row
    std::vector<char> sum(c_.combine_fp8 ? std::size_t{c_.hidden} * dtype_bytes(c_.dtype) : 0);
    const std::uint32_t begin = unit * rows_per_unit_, end = std::min(rows(nth), begin + rows_per_unit_);
    for (std::uint32_t mate : mates_) {
      const std::uint32_t bit = 1u << b_.rails().number[mate];
      std::uint32_t before = 0;
      for (std::uint32_t row = 0; row < begin; ++row) before += (mask(nth, row) & bit) != 0;
      returned.push_back({bit, b_.relay_slot(set_, sources_[nth], mate) + block_.row_at(before)});
    }
    for (std::uint32_t row = begin; row < end; ++row) add_row(nth, row, returned, sum.data());
  }

  void finished(int stage, std::uint32_t nth) override {
    if (stage != kRows) return;
    BlockHeader header = b_.header(step_, rows(nth), flags_ & ~kOverflowed);
    header.overflowed = overflowed_[nth];
    std::memcpy(answers_[nth], &header, sizeof header);
    b_.publish(step_, Op::Combine, sources_[nth], rows(nth), answers_[nth]);
  }

  struct Returned {
    std::uint32_t bit;
    const char* row;
  };

  void add_row(std::uint32_t nth, std::uint32_t row, std::vector<Returned>& returned, char* sum) const {
    const void* rows[kMaxNodeRanks];
    const char* of_mate[kMaxNodeRanks] = {};   // indexed by number on the node
    std::uint32_t n = 0;
    for (std::uint32_t i = 0; i < mates_.size(); ++i) {
      if ((mask(nth, row) & returned[i].bit) == 0) continue;
      rows[n++] = of_mate[b_.rails().number[mates_[i]]] = returned[i].row;
      returned[i].row += block_.row_bytes;
    }
    char* const to = answers_[nth] + answer_.row_at(row);
    // From the first one on, not from 0, which would take the sign of a zero.
    k_.add_rows(c_.dtype, c_.combine_fp8 ? sum : to, rows[0], rows + 1, nullptr, 0, n - 1, c_.hidden);
    if (c_.combine_fp8)
      k_.quantise(Wire::FP8, c_.dtype, sum, c_.hidden, reinterpret_cast<std::uint8_t*>(to), to + answer_.scales_at);
    if ((flags_ & kHasTail) != 0) copy_tail(nth, row, of_mate, to + answer_.tail_at);
  }

  // Each choice's number is that of its rank.
  void copy_tail(std::uint32_t nth, std::uint32_t row, const char* const (&of_mate)[kMaxNodeRanks], char* to) const {
    const BlockLayout dispatched = dispatch_block(c_);
    const char* const route = b_.own_slot(set_, Op::Dispatch, sources_[nth]) + dispatched.row_at(row) + dispatched.route_at;
    RouteHead head;
    RouteEntry entries[kMaxTopK];
    std::memcpy(&head, route, sizeof head);
    std::memcpy(entries, route + sizeof head, sizeof(RouteEntry) * c_.top_k);
    for (std::uint32_t k = 0, i = 0; k < c_.top_k; ++k) {
      if ((head.choices >> k & 1) == 0) continue;
      const std::uint32_t number = route_expert(entries[i++].place) / experts_per_rank(c_);
      if (const char* from = number < kMaxNodeRanks ? of_mate[number] : nullptr; from != nullptr)
        std::memcpy(to + k * sizeof(float), from + block_.tail_at + k * sizeof(float), sizeof(float));
    }
  }

  void read_header(std::uint32_t nth, std::uint32_t mate) {
    BlockHeader header;
    std::memcpy(&header, b_.relay_slot(set_, sources_[nth], mate), sizeof header);
    b_.check_header(header, Phase::CombineRecv, step_, Op::Combine, mate);
    const std::uint32_t bit = 1u << b_.rails().number[mate];
    std::uint32_t expected = 0;
    for (std::uint32_t row = 0; row < rows(nth); ++row) expected += (mask(nth, row) & bit) != 0;
    if (((header.flags ^ flags_) & ~kOverflowed) != 0)
      b_.protocol_error(Phase::CombineRecv, step_, mate, difference_text(flags_ & ~kOverflowed, header.flags & ~kOverflowed));
    if (header.rows != expected)
      b_.protocol_error(Phase::CombineRecv, step_, mate,
                        std::to_string(header.rows) + " rows of the " + std::to_string(expected) + " that " +
                            rank_text(sources_[nth]) + " sent it");
    if ((header.flags & kOverflowed) != 0) overflowed_[nth] |= bit;
    b_.count_block(mate, header.rows, block_.bytes(header.rows), false);
  }

  bool released() const { return (flags_ & kReleased) != 0; }
  std::uint32_t rows(std::uint32_t nth) const { return released() ? 0 : static_cast<std::uint32_t>(received_->masks[nth].size()); }
  std::uint32_t mask(std::uint32_t nth, std::uint32_t row) const { return received_->masks[nth][row]; }

  Blocks& b_;
  const Config& c_;
  const Kernels& k_;
  const std::uint32_t step_, set_, flags_;
  const std::shared_ptr<const Received> received_;
  const std::vector<std::uint32_t>&mates_, &sources_;
  const BlockLayout block_, answer_;
  std::uint32_t rows_per_unit_ = 1;
  std::vector<std::uint32_t> overflowed_;    // indexed by source: its answer's
  std::vector<char*> answers_;
  std::vector<Blocks::Announced> before_;    // contents of the send area from the set's last step
};

}  // namespace

std::unique_ptr<PhaseRun> relay_sums(Blocks& blocks, const OpenStep& open) { return std::make_unique<RelaySums>(blocks, open); }

}  // namespace pplx::cpu
