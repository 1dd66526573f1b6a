// combine_recv: waits for every peer's block, which also says that the peer has read this rank's dispatch; then adds each
// token's partial sums, ranks ascending.
#include <cstring>

#include "exchange.h"

namespace pplx::cpu {
namespace {

class CombineRecv final : public PhaseRun {
 public:
  CombineRecv(Exchange& exchange, std::uint32_t step, const Exchange::Open& open, const CombineOutput& output)
      : e_(exchange), c_(exchange.config()), k_(kernels()), step_(step), set_(set_of(c_, step)), plan_(*open.input.plan),
        released_(open.released), has_tail_(open.has_tail), out_(output), block_(combine_block(c_)) {}

 private:
  enum Stages { kBlocks, kTokens };

  bool begin(int stage, std::vector<std::uint32_t>& units) override {
    switch (stage) {
      case kBlocks: units.assign(e_.peers().size(), 1); return true;
      case kTokens:
        if (!released_ && plan_.tokens > 0) units.push_back(e_.units_of(plan_.tokens, block_.row_bytes, &tokens_per_unit_));
        return true;
      default: return false;
    }
  }

  bool ready(int stage, std::uint32_t group) override {
    return stage == kTokens || e_.has_arrived(step_, Signal::Combine, e_.peers()[group]);
  }

  Waiting waiting(int, std::uint32_t group) const override {
    return e_.waiting_for(step_, Signal::Combine, e_.peers()[group], "the combine block");
  }

  void run(int stage, std::uint32_t group, std::uint32_t unit) override {
    if (stage == kBlocks)
      read_header(e_.peers()[group]);
    else
      add_tokens(unit);
  }

  void read_header(std::uint32_t peer) const {
    BlockHeader header;
    std::memcpy(&header, e_.own_slot(set_, Op::Combine, peer), sizeof header);
    e_.check_header(header, Phase::CombineRecv, step_, Op::Combine, peer);
    const bool theirs = (header.flags & kReleased) != 0;
    if (theirs != released_)
      e_.protocol_error(Phase::CombineRecv, step_, peer,
                        theirs ? "a release() of a step that this rank combines" : "a combine of a step that this rank released");
    if (((header.flags & kHasTail) != 0) != has_tail_)
      e_.protocol_error(Phase::CombineRecv, step_, peer,
                        has_tail_ ? "a combine without tail=, which this rank passed"
                                  : "a combine with tail=, which this rank did not pass");
    const std::uint32_t expected = released_ ? 0 : plan_.rows(peer);
    if (header.rows != expected)
      e_.protocol_error(Phase::CombineRecv, step_, peer,
                        std::to_string(header.rows) + " rows for the " + std::to_string(expected) + " it was sent");
    if ((header.flags & kOverflowed) != 0) e_.note_overflow(peer);
    e_.count_block(peer, header.rows, block_.bytes(header.rows), false);
  }

  void add_tokens(std::uint32_t unit) const {
    const std::uint32_t end = std::min(plan_.tokens, (unit + 1) * tokens_per_unit_);
    const std::size_t bytes = std::size_t{c_.hidden} * dtype_bytes(c_.dtype);
    for (std::uint32_t t = unit * tokens_per_unit_; t < end; ++t) {
      if (t + 1 < plan_.tokens)
        for (std::uint32_t i = plan_.token_begin[t + 1]; i < plan_.token_begin[t + 2]; ++i) ask_for_start(row_of(i), bytes);
      const void* rows[kMaxTopK];
      std::uint32_t n = 0;
      for (std::uint32_t i = plan_.token_begin[t]; i < plan_.token_begin[t + 1]; ++i) rows[n++] = row_of(i);
      char* y = out_.y + t * out_.stride;
      k_.add_rows(c_.dtype, y, out_.accumulate ? y : nullptr, rows, nullptr, n, c_.hidden);
      if (has_tail_ && out_.tail != nullptr) read_tail(t);
    }
  }

  const char* row_of(std::uint32_t ref) const {
    return e_.own_slot(set_, Op::Combine, plan_.token_rows[ref].rank) + block_.row_at(plan_.token_rows[ref].row);
  }

  void read_tail(std::uint32_t token) const {
    char* to = reinterpret_cast<char*>(out_.tail + std::size_t{token} * c_.top_k);
    std::memset(to, 0, c_.top_k * sizeof(float));
    for (std::uint32_t i = plan_.token_begin[token]; i < plan_.token_begin[token + 1]; ++i) {
      const RowRef& from = plan_.token_rows[i];
      const char* tail = e_.own_slot(set_, Op::Combine, from.rank) + block_.row_at(from.row) + block_.tail_at;
      for (std::uint32_t k = 0; k < c_.top_k; ++k) {
        const std::int32_t id = plan_.ids[std::size_t{token} * c_.top_k + k];
        if (id >= 0 && rank_of_expert(c_, static_cast<std::uint32_t>(id)) == from.rank)
          std::memcpy(to + k * sizeof(float), tail + k * sizeof(float), sizeof(float));
      }
    }
  }

  Exchange& e_;
  const Config& c_;
  const Kernels& k_;
  const std::uint32_t step_, set_;
  const Plan& plan_;
  const bool released_, has_tail_;
  const CombineOutput out_;
  const BlockLayout block_;
  std::uint32_t tokens_per_unit_ = 1;
};

}  // namespace

std::unique_ptr<PhaseRun> Exchange::start_combine_recv(std::uint32_t step, const CombineOutput& output) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Open& open = open_step(step, Progress::Combining, "combine_recv");
  return std::make_unique<CombineRecv>(*this, step, open, output);
}

}  // namespace pplx::cpu
