// combine_recv: waits for every peer's block, which also says that the peer has read this rank's dispatch; then adds each token's
// partial sums, ranks ascending. A replica does so for the tokens that it sent, and gives the rows to the others.
#include <algorithm>
#include <cstring>

#include "exchange.h"
#include "vector/kernels.h"

namespace pplx::cpu {
namespace {

class CombineRecv final : public PhaseRun {
 public:
  CombineRecv(Blocks& blocks, std::uint32_t step, const OpenStep& open, const Result& output)
      : b_(blocks), c_(blocks.config()), k_(kernels()), step_(step), set_(set_of(c_, step)), plan_(*open.input.plan),
        own_(plan_.slice.tokens(plan_.tokens)), released_(open.released), has_tail_(open.has_tail), out_(output),
        block_(combine_block(c_)) {}

 private:
  enum Stages { kBlocks, kTokens, kSlices };

  bool begin(int stage, std::vector<std::uint32_t>& units) override {
    switch (stage) {
      case kBlocks: units.assign(b_.peers().size(), 1); return true;
      case kTokens:
        if (!released_ && (own_ > 0 || !b_.replicas().empty()))
          units.push_back(units_of(own_, block_.row_bytes, &tokens_per_unit_));
        return true;
      case kSlices:
        if (released_) return true;
        for (std::uint32_t replica : b_.replicas())   // there is a header to read even if there are no rows
          units.push_back(std::max(1u, units_of(slice(replica).tokens(plan_.tokens), block_.row_bytes, &tokens_per_unit_)));
        return true;
      default: return false;
    }
  }

  bool ready(int stage, std::uint32_t group) override {
    switch (stage) {
      case kBlocks: return b_.has_arrived(step_, Signal::Combine, b_.peers()[group]);
      case kSlices: return b_.has_arrived(step_, Signal::Slice, b_.replicas()[group]);
      default: return true;
    }
  }

  Waiting waiting(int stage, std::uint32_t group) const override {
    if (stage == kSlices)
      return b_.waiting_for(step_, Signal::Slice, b_.replicas()[group], "the finished rows");
    return b_.waiting_for(step_, Signal::Combine, b_.peers()[group], "the combine block");
  }

  void run(int stage, std::uint32_t group, std::uint32_t unit) override {
    switch (stage) {
      case kBlocks: read_header(b_.peers()[group]); break;
      case kTokens: add_tokens(unit); break;
      default: read_slice(b_.replicas()[group], unit);
    }
  }

  void finished(int stage, std::uint32_t) override {
    if (stage != kTokens) return;
    const BlockHeader header = b_.header(step_, own_, slice_flags());
    for (std::uint32_t replica : b_.replicas()) {
      std::memcpy(b_.slice_at_peer(set_, replica), &header, sizeof header);
      b_.raise_at_peer(step_, Signal::Slice, replica);
      b_.count_block(replica, own_, block_.bytes(own_), true);
    }
  }

  void read_header(std::uint32_t peer) const {
    BlockHeader header;
    std::memcpy(&header, b_.own_slot(set_, Op::Combine, peer), sizeof header);
    b_.check_header(header, Phase::CombineRecv, step_, Op::Combine, peer);
    const std::uint32_t mine = (released_ ? kReleased : 0u) | (has_tail_ ? kHasTail : 0u), theirs = header.flags & (kReleased | kHasTail);
    if (theirs != mine) b_.protocol_error(Phase::CombineRecv, step_, peer, difference_text(mine, theirs));
    const std::uint32_t expected = released_ ? 0 : plan_.rows(peer);
    if (header.rows != expected)
      b_.protocol_error(Phase::CombineRecv, step_, peer,
                        std::to_string(header.rows) + " rows for the " + std::to_string(expected) + " it was sent");
    if ((header.flags & kOverflowed) != 0) b_.note_overflow(peer);
    b_.count_block(peer, header.rows, block_.bytes(header.rows), false);
  }

  void add_tokens(std::uint32_t unit) const {
    const std::uint32_t end = std::min(own_, (unit + 1) * tokens_per_unit_);
    for (std::uint32_t own = unit * tokens_per_unit_; own < end; ++own) {
      const std::uint32_t t = plan_.slice.token(own), next = plan_.slice.token(own + 1);
      if (next < plan_.tokens)
        for (std::uint32_t i = plan_.token_begin[next]; i < plan_.token_begin[next + 1]; ++i) ask_for_start(row_of(i), row_bytes());
      const void* rows[kMaxTopK];
      std::uint32_t n = 0;
      for (std::uint32_t i = plan_.token_begin[t]; i < plan_.token_begin[t + 1]; ++i) rows[n++] = row_of(i);
      char* y = out_.y + t * out_.stride;
      k_.add_rows(c_.dtype, y, out_.accumulate ? y : nullptr, rows, nullptr, n, c_.hidden);
      if (has_tail_ && out_.tail != nullptr) read_tail(t);
      for (std::uint32_t replica : b_.replicas()) {
        char* row = b_.slice_at_peer(set_, replica) + block_.row_at(own);
        k_.copy(row, y, row_bytes());
        if (has_tail_ && out_.tail != nullptr) std::memcpy(row + block_.tail_at, tail_of(t), tail_bytes());
      }
    }
  }

  const char* row_of(std::uint32_t ref) const {
    return b_.own_slot(set_, Op::Combine, plan_.token_rows[ref].rank) + block_.row_at(plan_.token_rows[ref].row);
  }

  void read_slice(std::uint32_t replica, std::uint32_t unit) const {
    const Slice theirs = slice(replica);
    const std::uint32_t rows = theirs.tokens(plan_.tokens);
    const char* block = b_.own_slice(set_, replica);
    if (unit == 0) check_slice(replica, rows, block);
    const std::uint32_t end = std::min(rows, (unit + 1) * tokens_per_unit_);
    for (std::uint32_t i = unit * tokens_per_unit_; i < end; ++i) {
      const char* row = block + block_.row_at(i);
      k_.copy(out_.y + theirs.token(i) * out_.stride, row, row_bytes());
      if (has_tail_ && out_.tail != nullptr) std::memcpy(tail_of(theirs.token(i)), row + block_.tail_at, tail_bytes());
    }
  }

  void check_slice(std::uint32_t replica, std::uint32_t rows, const char* block) const {
    BlockHeader header;
    std::memcpy(&header, block, sizeof header);
    b_.check_header(header, Phase::CombineRecv, step_, Op::Combine, replica);
    if (header.rows != rows)
      b_.protocol_error(Phase::CombineRecv, step_, replica,
                        std::to_string(header.rows) + " finished rows, where its replicas wait for " + std::to_string(rows));
    if (header.flags != slice_flags())
      b_.protocol_error(Phase::CombineRecv, step_, replica, difference_text(slice_flags(), header.flags));
    b_.count_block(replica, rows, block_.bytes(rows), false);
  }

  void read_tail(std::uint32_t token) const {
    char* to = tail_of(token);
    std::memset(to, 0, tail_bytes());
    for (std::uint32_t i = plan_.token_begin[token]; i < plan_.token_begin[token + 1]; ++i) {
      const RowRef& from = plan_.token_rows[i];
      const char* tail = b_.own_slot(set_, Op::Combine, from.rank) + block_.row_at(from.row) + block_.tail_at;
      for (std::uint32_t k = 0; k < c_.top_k; ++k) {
        const std::int32_t id = plan_.ids[std::size_t{token} * c_.top_k + k];
        if (id >= 0 && rank_of_expert(c_, static_cast<std::uint32_t>(id)) == from.rank)
          std::memcpy(to + k * sizeof(float), tail + k * sizeof(float), sizeof(float));
      }
    }
  }

  Slice slice(std::uint32_t replica) const { return slice_of(c_, replica, &b_.alive()); }
  std::uint32_t slice_flags() const { return out_.accumulate ? kAccumulates : 0u; }
  std::uint64_t row_bytes() const { return std::uint64_t{c_.hidden} * dtype_bytes(c_.dtype); }
  std::uint64_t tail_bytes() const { return c_.top_k * sizeof(float); }
  char* tail_of(std::uint32_t token) const { return reinterpret_cast<char*>(out_.tail) + token * tail_bytes(); }

  Blocks& b_;
  const Config& c_;
  const Kernels& k_;
  const std::uint32_t step_, set_;
  const Plan& plan_;
  const std::uint32_t own_;   // tokens that this rank sent, and finishes
  const bool released_, has_tail_;
  const Result out_;
  const BlockLayout block_;
  std::uint32_t tokens_per_unit_ = 1;
};

}  // namespace

std::unique_ptr<PhaseRun> Exchange::start_combine_recv(std::uint32_t step, const Result& output) {
  std::lock_guard<std::mutex> lock(mutex_);
  const OpenStep& open = steps_.expect(step, OpenStep::Progress::Combining, "combine_recv");
  return std::make_unique<CombineRecv>(blocks_, step, open, output);
}

}  // namespace pplx::cpu
