// dispatch_send: sends headers first, then every peer's rows, peers from rank + 1 on. Each block is published when it is complete,
// or with each piece that is.
#include <cstring>

#include "exchange.h"
#include "scales.h"
#include "vector/kernels.h"

namespace pplx::cpu {
namespace {

// Writes the headers and rows of this rank's tokens.
class DispatchWriter {
 public:
  DispatchWriter(Blocks& blocks, std::uint32_t step, const OpenStep& open)
      : b_(blocks), c_(blocks.config()), k_(kernels()), step_(step), set_(set_of(c_, step)), in_(open.input),
        plan_(*open.input.plan), own_rows_in_x_(open.own_rows_in_x), block_(dispatch_block(c_)),
        quantises_(quantised(c_.wire) && in_.scales == nullptr) {}

  const Plan& plan() const { return plan_; }
  bool quantises() const { return quantises_; }

  void write_header(std::uint32_t peer, char* block, std::uint32_t piece = 0) const {
    BlockHeader header = b_.header(step_, plan_.rows(peer));
    header.tokens = plan_.tokens;
    header.ids_digest = plan_.ids_digest;
    header.piece = piece;
    header.pieces = shape_of(b_.heap(), header.rows).pieces;
    if (b_.relayed(peer)) header.masks = plan_.slice.tokens(plan_.tokens);
    std::memcpy(block, &header, sizeof header);
    if (piece != 0) return;
    const auto write_counts = [&](std::uint32_t rank) {
      std::memcpy(block + sizeof header + 4ull * first_of_block(peer, rank), plan_.counts.data() + first_expert(c_, rank),
                  4ull * local_experts(c_, rank));
    };
    if (!b_.relayed(peer)) return write_counts(peer);
    for (std::uint32_t rank : b_.peers())
      if (b_.rails().rep[rank] == peer) write_counts(rank);
    for (std::uint32_t i = 0; i < header.masks; ++i) {
      const std::uint32_t mask = mask_of(peer, plan_.slice.token(i));
      std::memcpy(block + masks_at(c_) + 4ull * i, &mask, sizeof mask);
    }
  }

  // Tokens of this rank's slice.
  void quantise(std::uint32_t begin, std::uint32_t end) const {
    for (std::uint32_t i = begin; i < end; ++i) {
      const std::uint32_t t = plan_.slice.token(i);
      char* row = b_.staging(set_) + std::uint64_t{t} * block_.route_at;
      k_.quantise(c_.wire, c_.dtype, in_.x.data + t * in_.x.stride, c_.hidden, reinterpret_cast<std::uint8_t*>(row),
                  row + block_.scales_at);
    }
  }

  // Rows begin to end - 1 of the block for a peer, one behind the other from `to` on.
  void write_rows(std::uint32_t peer, std::uint32_t begin, std::uint32_t end, char* to) const {
    const bool payload = peer != c_.rank || !own_rows_in_x_;
    // Past the caches, since a peer's core reads it; the proxy reads from the caches
    const bool streams = payload && b_.mapped(peer);
    for (std::uint32_t row = begin; row < end; ++row, to += block_.row_bytes) {
      const std::uint32_t token = plan_.row_token[plan_.rows_begin[peer] + row];
      if (payload) write_payload(streams ? k_.stream : k_.copy, to, token);
      write_route(to + block_.route_at, peer, token);
    }
    if (streams) streamed();
  }

 private:
  void write_payload(decltype(Kernels::copy) copy, char* to, std::uint32_t token) const {
    if (quantises_) {
      copy(to, b_.staging(set_) + std::uint64_t{token} * block_.route_at, block_.route_at);
      return;
    }
    copy(to, in_.x.data + token * in_.x.stride, payload_bytes(c_));
    if (in_.scales == nullptr) return;
    const std::uint32_t each = scale_bytes_each(c_.wire);
    copy_scales(to + block_.scales_at, each, in_.scales + token * in_.scale.row, in_.scale.scale, scales_per_row(c_), each);
  }

  void write_route(char* to, std::uint32_t peer, std::uint32_t token) const {
    RouteHead head;
    head.token = token;
    RouteEntry entries[kMaxTopK];
    std::uint32_t n = 0;
    for (std::uint32_t k = 0; k < c_.top_k; ++k) {
      const std::size_t at = std::size_t{token} * c_.top_k + k;
      const std::uint32_t rank = owner(at);
      if (rank == kNoRank || b_.rails().rep[rank] != peer) continue;
      const std::uint32_t expert = first_of_block(peer, rank) + static_cast<std::uint32_t>(plan_.ids[at]) - first_expert(c_, rank);
      head.choices = static_cast<std::uint16_t>(head.choices | 1u << k);
      entries[n++] = {route_place(expert, plan_.index[at]), in_.weights != nullptr ? in_.weights[at] : 1.0f};
    }
    std::memcpy(to, &head, sizeof head);
    std::memcpy(to + sizeof head, entries, n * sizeof(RouteEntry));
  }

  // The number of a rank's first expert in the block for it.
  std::uint32_t first_of_block(std::uint32_t peer, std::uint32_t rank) const {
    return b_.relayed(peer) ? b_.rails().number[rank] * experts_per_rank(c_) : 0;
  }
  std::uint32_t owner(std::size_t choice) const {
    return plan_.ids[choice] < 0 ? kNoRank : rank_of_expert(c_, static_cast<std::uint32_t>(plan_.ids[choice]));
  }
  std::uint32_t mask_of(std::uint32_t peer, std::uint32_t token) const {
    const Rails& rails = b_.rails();
    std::uint32_t mask = 0;
    for (std::size_t at = std::size_t{token} * c_.top_k; at < (std::size_t{token} + 1) * c_.top_k; ++at)
      if (const std::uint32_t rank = owner(at); rank != kNoRank && rails.rep[rank] == peer) mask |= 1u << rails.number[rank];
    return mask;
  }

  Blocks& b_;
  const Config& c_;
  const Kernels& k_;
  const std::uint32_t step_, set_;
  const Tokens& in_;
  const Plan& plan_;
  const bool own_rows_in_x_;
  const BlockLayout block_;
  const bool quantises_;
};

class DispatchSend final : public StagedRun {
 public:
  DispatchSend(Blocks& blocks, std::uint32_t step, const OpenStep& open)
      : b_(blocks), c_(blocks.config()), step_(step), set_(set_of(c_, step)), writer_(blocks, step, open), plan_(writer_.plan()),
        own_(plan_.slice.tokens(plan_.tokens)), block_(dispatch_block(c_)) {}

 private:
  enum Stages { kQuantise, kRows };

  bool begin(int stage, std::vector<std::uint32_t>& units) override {
    switch (stage) {
      case kQuantise:
        for (std::uint32_t peer : b_.targets()) {
          if (!b_.mapped(peer)) continue;
          writer_.write_header(peer, b_.slot_at_peer(set_, Op::Dispatch, peer));
          b_.raise_at_peer(step_, Signal::Header, peer);
        }
        if (writer_.quantises() && own_ > 0)
          units.push_back(units_of(own_, std::uint64_t{c_.hidden} * dtype_bytes(c_.dtype), &tokens_per_unit_));
        return true;
      case kRows: {
        if (b_.heap().in_pieces) return false;   // DispatchSending writes them
        std::uint64_t packed = 0;   // remote blocks lie back to back
        before_ = b_.announced(set_, Op::Dispatch);
        for (std::uint32_t peer : b_.targets()) {
          const std::uint32_t rows = plan_.rows(peer);
          char* block = b_.send_area(set_, Op::Dispatch) + packed;
          if (b_.mapped(peer))
            block = b_.slot_at_peer(set_, Op::Dispatch, peer);
          else
            packed += align_up(block_.bytes(rows), 64);
          blocks_.push_back(block);
          units.push_back(units_of(rows, block_.row_bytes, &rows_per_unit_));
        }
        return true;
      }
      default: return false;
    }
  }

  bool ready(int stage, std::uint32_t group) override {
    return stage == kQuantise || b_.mapped(b_.targets()[group]) || Blocks::have_left(before_);
  }

  Waiting waiting_of(int, std::uint32_t group) const override {
    Waiting w = b_.waiting_for(step_, Signal::Dispatch, b_.targets()[group], "the network to take the last dispatch block");
    w.by = kNoRank;
    return w;
  }

  void run(int stage, std::uint32_t group, std::uint32_t unit) override {
    if (stage == kQuantise) {
      writer_.quantise(unit * tokens_per_unit_, std::min(own_, (unit + 1) * tokens_per_unit_));
      return;
    }
    const std::uint32_t peer = b_.targets()[group], begin = unit * rows_per_unit_;
    writer_.write_rows(peer, begin, std::min(plan_.rows(peer), begin + rows_per_unit_), blocks_[group] + block_.row_at(begin));
  }

  void finished(int stage, std::uint32_t group) override {
    if (stage != kRows) return;
    const std::uint32_t peer = b_.targets()[group];
    if (!b_.mapped(peer)) writer_.write_header(peer, blocks_[group]);
    b_.publish(step_, Op::Dispatch, peer, plan_.rows(peer), blocks_[group]);
  }

  Blocks& b_;
  const Config& c_;
  const std::uint32_t step_, set_;
  const DispatchWriter writer_;
  const Plan& plan_;
  const std::uint32_t own_;   // tokens that this rank sends
  const BlockLayout block_;
  std::uint32_t tokens_per_unit_ = 1, rows_per_unit_ = 1;
  std::vector<char*> blocks_;
  std::vector<Blocks::Announced> before_;   // contents of the send area from the set's last step
};

// ---- in pieces -----------------------------------------------------------------------------------------------------------

class DispatchSending final : public PieceSending {
 public:
  DispatchSending(Blocks& blocks, std::uint32_t step, const OpenStep& open)
      : PieceSending(blocks, step, Op::Dispatch, [&](std::uint32_t peer) { return open.input.plan->rows(peer); }), b_(blocks),
        writer_(blocks, step, open) {}

 private:
  void write_header(std::uint32_t peer, const BlockShape&, std::uint32_t piece, char* to) override {
    if (piece > 0 || !b_.mapped(peer)) writer_.write_header(peer, to, piece);   // else it is there, and may be read already
  }
  void write_rows(std::uint32_t peer, std::uint32_t begin, std::uint32_t end, char* to) override {
    writer_.write_rows(peer, begin, end, to);
  }

  const Blocks& b_;
  const DispatchWriter writer_;
};

// A reader that unpacks only the exponents of such scales would misread anything but a power of two. Zero is allowed, beside rows
// that hold nothing.
void check_scales(const Config& c, const Tokens& input) {
  for (std::uint32_t t = 0; t < input.plan->tokens; ++t)
    for (std::uint32_t i = 0; i < scales_per_row(c); ++i) {
      float scale;
      std::memcpy(&scale, input.scales + t * input.scale.row + i * input.scale.scale, sizeof scale);
      if (bits_of(scale) != 0 && !is_e8m0(scale))
        throw Misuse("dispatch: x_scale[" + std::to_string(t) + ", " + std::to_string(i) + "] is " + std::to_string(scale) +
                     ": scales of wire 'fp8_ue8m0' are powers of two, 2^-127 to 2^127, or NaN, or zero");
    }
}

}  // namespace

std::unique_ptr<PhaseRun> Exchange::start_dispatch_send(const Tokens& input, std::uint32_t* step) {
  if (!input.plan || input.plan->tokens > config().max_tokens || input.plan->top_k != config().top_k)
    throw Misuse("dispatch: the plan does not fit this AllToAll");
  if (input.plan->slice.tokens(input.plan->tokens) > max_rows_of_block(config()))
    throw Misuse(too_many_tokens_text(input.plan->tokens, input.plan->slice.of, max_rows_of_block(config())));
  if (input.scales != nullptr && !quantised(config().wire)) throw Misuse("dispatch: x_scale needs a quantised wire");
  if (input.scales != nullptr && config().wire == Wire::FP8_UE8M0) check_scales(config(), input);
  std::lock_guard<std::mutex> lock(mutex_);
  OpenStep& open = steps_.open(input, now_());
  *step = open.step;
  // The quantised rows are not in the caller's memory, so own rows can always be read from there.
  open.own_rows_in_x = input.scales == nullptr && (quantised(config().wire) || input.keep_own_rows || blocks_.heap().in_pieces);
  if (!blocks_.heap().in_pieces) return std::make_unique<DispatchSend>(blocks_, *step, open);
  open.sending = std::make_shared<DispatchSending>(blocks_, *step, open);
  return std::make_unique<SendInPieces>(std::make_unique<DispatchSend>(blocks_, *step, open), open.sending);
}

}  // namespace pplx::cpu
