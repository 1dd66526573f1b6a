// combine_send: returns one row per row received, the weighted sum over the row's local experts. With weights= a rank first sends
// its tokens' weights to the ranks that have the rows, and waits for its peers' weights.
#include <cstring>

#include "exchange.h"
#include "vector/kernels.h"

namespace pplx::cpu {
namespace {

// Writes headers and rows of this rank's answers, and weights blocks.
class CombineWriter {
 public:
  CombineWriter(Blocks& blocks, std::uint32_t step, const ExpertOutputs& input, std::uint32_t flags)
      : b_(blocks), c_(blocks.config()), k_(kernels()), step_(step), set_(set_of(c_, step)), in_(input), flags_(flags),
        block_(combine_block(c_)), weights_block_(weights_block(c_)) {}

  const ExpertOutputs& input() const { return in_; }
  std::uint32_t rows(std::uint32_t peer) const { return in_.release ? 0 : in_.received->rows(peer); }

  // True if the weights of a peer's tokens are here, where it sends any.
  bool has_weights(std::uint32_t peer) const {
    if (!in_.uses_weights) return true;
    if (b_.has_arrived(step_, Signal::Weights, peer)) return true;
    const std::uint32_t answers = b_.rails().rep[peer];   // all ranks of a node have the same flags
    if (b_.has_arrived(step_, Signal::Combine, answers)) {
      BlockHeader header;
      std::memcpy(&header, b_.own_slot(set_, Op::Combine, answers), sizeof header);
      if ((header.flags & kUsesWeights) == 0)
        b_.protocol_error(Phase::Weights, step_, answers, difference_text(kUsesWeights, 0));
    }
    return false;
  }
  Waiting waiting_for_weights(std::uint32_t peer) const {
    if (!in_.uses_weights || b_.has_arrived(step_, Signal::Weights, peer)) return {};
    return b_.waiting_for(step_, Signal::Weights, peer, "the weights= of combine");
  }

  void write_header(std::uint32_t rows, char* block, std::uint32_t piece = 0, std::uint32_t pieces = 1) const {
    BlockHeader header = b_.header(step_, rows, flags_);
    header.piece = piece;
    header.pieces = pieces;
    std::memcpy(block, &header, sizeof header);
  }

  // Rows begin to end - 1 of the block for a peer, one behind the other from `to` on.
  void write_rows(std::uint32_t peer, std::uint32_t begin, std::uint32_t end, char* to) const {
    for (std::uint32_t row = begin; row < end; ++row, to += block_.row_bytes) {
      if (row + 1 < rows(peer)) ask_for_row(peer, row + 1);
      write_row(peer, row, to);
      if (in_.has_tail) write_tail(peer, row, to + block_.tail_at);
    }
  }

  void write_weights(std::uint32_t peer, char* block) const {
    const Plan& plan = *in_.plan;
    for (std::uint32_t row = 0; row < plan.rows(peer); ++row) {
      const std::size_t token = plan.row_token[plan.rows_begin[peer] + row];
      std::memcpy(block + weights_block_.row_at(row), in_.weights + token * c_.top_k, c_.top_k * sizeof(float));
    }
  }

  void check_weights(std::uint32_t peer) const {
    BlockHeader header;
    std::memcpy(&header, b_.incoming(set_, Op::Weights, peer), sizeof header);
    b_.check_header(header, Phase::Weights, step_, Op::Weights, peer);
    const std::uint32_t expected = b_.relayed(peer) ? in_.received->rows_of_block[peer] : rows(peer);
    if (header.rows != expected)
      b_.protocol_error(Phase::Weights, step_, peer,
                        "weights for " + std::to_string(header.rows) + " rows of " + std::to_string(expected));
  }

 private:
  void write_row(std::uint32_t peer, std::uint32_t row, char* to) const {
    const Received& r = *in_.received;
    const std::size_t at = r.rows_begin[peer] + row;
    const std::uint64_t bytes = std::uint64_t{c_.hidden} * dtype_bytes(c_.dtype);
    if (c_.layout == LayoutKind::Compact) {
      if (r.place[at] == Received::kNowhere)
        std::memset(to, 0, bytes);
      else
        k_.copy(to, in_.expert_out.data + r.place[at] * in_.expert_out.stride, bytes);
      return;
    }
    const std::uint32_t choices = count_choices(r.choices[at]);
    const void* rows[kMaxTopK];
    float weights[kMaxTopK];
    float sent[kMaxTopK];
    const float* from = r.weight.data() + at * c_.top_k;
    if (in_.uses_weights) {
      const std::uint32_t number = b_.relayed(peer) ? r.row_of_node[at] : row;
      const char* const of_row = b_.incoming(set_, Op::Weights, peer) + weights_block_.row_at(number);
      for (std::uint32_t k = 0, i = 0; k < c_.top_k; ++k)
        if ((r.choices[at] >> k & 1) != 0) std::memcpy(sent + i++, of_row + k * sizeof(float), sizeof(float));
      from = sent;
    }
    std::uint32_t n = 0;
    for (std::uint32_t i = 0; i < choices; ++i) {
      const std::uint32_t place = r.place[at * c_.top_k + i];
      if (place == Received::kNowhere) continue;
      rows[n] = in_.expert_out.data + place * in_.expert_out.stride;
      weights[n++] = from[i];
    }
    k_.add_rows(c_.dtype, to, nullptr, rows, in_.weighted ? weights : nullptr, 0, n, c_.hidden);
  }

  void ask_for_row(std::uint32_t peer, std::uint32_t row) const {
    const Received& r = *in_.received;
    const std::size_t per_row = c_.layout == LayoutKind::Compact ? 1 : c_.top_k, at = (r.rows_begin[peer] + row) * per_row;
    const std::uint32_t n = c_.layout == LayoutKind::Compact ? 1 : count_choices(r.choices[r.rows_begin[peer] + row]);
    const std::size_t bytes = std::size_t{c_.hidden} * dtype_bytes(c_.dtype);
    for (std::uint32_t i = 0; i < n; ++i)
      if (r.place[at + i] != Received::kNowhere)
        ask_for_start(in_.expert_out.data + r.place[at + i] * in_.expert_out.stride, bytes);
  }

  // Each float stands at its choice's k, so the token's rank need not know which experts live here.
  void write_tail(std::uint32_t peer, std::uint32_t row, char* to) const {
    const Received& r = *in_.received;
    const std::size_t at = r.rows_begin[peer] + row;
    for (std::uint32_t k = 0, i = 0; k < c_.top_k; ++k) {
      if ((r.choices[at] >> k & 1) == 0) continue;
      const bool compact = c_.layout == LayoutKind::Compact;
      const std::size_t place = r.place[compact ? at : at * c_.top_k + i++];
      if (place == Received::kNowhere)
        std::memset(to + k * sizeof(float), 0, sizeof(float));
      else
        std::memcpy(to + k * sizeof(float), in_.tail + (compact ? place * c_.top_k + k : place), sizeof(float));
    }
  }

  Blocks& b_;
  const Config& c_;
  const Kernels& k_;
  const std::uint32_t step_, set_;
  const ExpertOutputs in_;
  const std::uint32_t flags_;
  const BlockLayout block_, weights_block_;
};

class CombineSend final : public StagedRun {
 public:
  CombineSend(Blocks& blocks, std::uint32_t step, const ExpertOutputs& input, std::uint32_t flags)
      : b_(blocks), c_(blocks.config()), step_(step), set_(set_of(c_, step)), writer_(blocks, step, input, flags),
        in_(writer_.input()), block_(combine_block(c_)), weights_block_(weights_block(c_)) {}

 private:
  enum Stages { kWeights, kRows };

  bool begin(int stage, std::vector<std::uint32_t>& units) override {
    blocks_.clear();
    std::uint64_t packed = 0;
    const auto place = [&](Op op, const BlockLayout& layout, std::uint32_t peer, std::uint32_t rows) {
      char* block = b_.send_area(set_, op) + packed;
      if (b_.mapped(peer))
        block = b_.slot_at_peer(set_, op, peer);
      else if (op == Op::Combine && b_.relayed(peer))
        block = b_.relay_slot(set_, peer, c_.rank);
      else
        packed += align_up(layout.bytes(rows), 64);
      blocks_.push_back(block);
    };
    switch (stage) {
      case kWeights:
        if (!in_.uses_weights) return true;
        before_[stage] = b_.announced(set_, Op::Weights);
        for (std::uint32_t peer : b_.targets()) {
          place(Op::Weights, weights_block_, peer, in_.plan->rows(peer));
          units.push_back(1);
        }
        return true;
      case kRows:
        if (b_.heap().in_pieces) return false;   // CombineSending writes them
        if (c_.node_ranks == 0) before_[stage] = b_.announced(set_, Op::Combine);
        for (std::uint32_t peer : b_.peers()) {
          place(Op::Combine, block_, peer, writer_.rows(peer));
          units.push_back(units_of(writer_.rows(peer), block_.row_bytes, &rows_per_unit_));
        }
        return true;
      default: return false;
    }
  }

  bool ready(int stage, std::uint32_t group) override {
    const std::uint32_t peer = peer_of(stage, group);
    if (!b_.mapped(peer) && !Blocks::have_left(before_[stage])) return false;
    return stage == kWeights || writer_.has_weights(peer);
  }

  Waiting waiting_of(int stage, std::uint32_t group) const override {
    const std::uint32_t peer = peer_of(stage, group);
    if (stage == kRows)
      if (const Waiting w = writer_.waiting_for_weights(peer); w.peer != kNoRank) return w;
    return b_.waiting_for(step_, Signal::Combine, peer, "the network to take the last combine block");
  }

  void run(int stage, std::uint32_t group, std::uint32_t unit) override {
    const std::uint32_t peer = peer_of(stage, group);
    if (stage == kWeights) {
      writer_.write_weights(peer, blocks_[group]);
      return;
    }
    if (in_.uses_weights && unit == 0) writer_.check_weights(peer);
    const std::uint32_t begin = unit * rows_per_unit_;
    writer_.write_rows(peer, begin, std::min(writer_.rows(peer), begin + rows_per_unit_), blocks_[group] + block_.row_at(begin));
  }

  void finished(int stage, std::uint32_t group) override {
    const std::uint32_t peer = peer_of(stage, group);
    const bool weights = stage == kWeights;
    const std::uint32_t n = weights ? in_.plan->rows(peer) : writer_.rows(peer);
    writer_.write_header(n, blocks_[group]);
    if (!weights && b_.relayed(peer)) return b_.publish_return(step_, peer, n);
    b_.publish(step_, weights ? Op::Weights : Op::Combine, peer, n, blocks_[group]);
  }

  std::uint32_t peer_of(int stage, std::uint32_t group) const { return (stage == kWeights ? b_.targets() : b_.peers())[group]; }

  Blocks& b_;
  const Config& c_;
  const std::uint32_t step_, set_;
  const CombineWriter writer_;
  const ExpertOutputs& in_;
  const BlockLayout block_, weights_block_;
  std::uint32_t rows_per_unit_ = 1;
  std::vector<char*> blocks_;
  // Contents of the send area from the set's last step, indexed by stage: other threads may still ask about an earlier stage.
  std::vector<Blocks::Announced> before_[2];
};

// ---- in pieces -----------------------------------------------------------------------------------------------------------

class CombineSending final : public PieceSending {
 public:
  CombineSending(Blocks& blocks, std::uint32_t step, const ExpertOutputs& input, std::uint32_t flags)
      : PieceSending(blocks, step, Op::Combine,
                     [&](std::uint32_t peer) { return input.release ? 0 : input.received->rows(peer); }),
        writer_(blocks, step, input, flags) {}

 private:
  bool may_begin(std::uint32_t peer) override { return writer_.has_weights(peer); }
  Waiting waiting_to_begin(std::uint32_t peer) const override { return writer_.waiting_for_weights(peer); }
  void write_header(std::uint32_t peer, const BlockShape& shape, std::uint32_t piece, char* to) override {
    if (piece == 0 && writer_.input().uses_weights) writer_.check_weights(peer);
    writer_.write_header(shape.rows, to, piece, shape.pieces);
  }
  void write_rows(std::uint32_t peer, std::uint32_t begin, std::uint32_t end, char* to) override {
    writer_.write_rows(peer, begin, end, to);
  }

  const CombineWriter writer_;
};

}  // namespace

std::unique_ptr<PhaseRun> Exchange::start_combine_send(std::uint32_t step, const ExpertOutputs& input) {
  std::lock_guard<std::mutex> lock(mutex_);
  OpenStep& open = steps_.expect(step, OpenStep::Progress::Received, input.release ? "release" : "combine_send");
  if (!input.release && (!input.received || input.received->generation != generation()))
    throw Misuse("combine: this handle is from before reset(): dispatch again");
  if (input.uses_weights && !input.plan) throw Misuse("combine: weights= needs the plan of the dispatch");
  open.released = input.release;
  open.has_tail = input.has_tail;
  const std::uint32_t flags = open.flags = (input.release ? kReleased : 0u) | (input.uses_weights ? kUsesWeights : 0u) |
                                           (open.overflowed ? kOverflowed : 0u) | (input.has_tail ? kHasTail : 0u);
  if (!blocks_.heap().in_pieces) return std::make_unique<CombineSend>(blocks_, step, input, flags);
  open.sending = std::make_shared<CombineSending>(blocks_, step, input, flags);
  return std::make_unique<SendInPieces>(std::make_unique<CombineSend>(blocks_, step, input, flags), open.sending);
}

}  // namespace pplx::cpu
