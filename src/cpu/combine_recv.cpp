// combine_recv: waits for every peer's block, which also says that the peer has read this rank's dispatch; then adds each token's
// partial sums, ranks ascending, with several nodes each node's first. A replica does so for the tokens that it sent, and gives the
// rows to the others.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "exchange.h"
#include "piece_arrivals.h"
#include "piece_run.h"
#include "relay_sums.h"
#include "vector/kernels.h"

namespace pplx::cpu {
namespace {

class CombineRecv final : public StagedRun {
 public:
  enum Stages { kBlocks, kTokens, kSlices };

  // Only stages `first` to `last`: in pieces, add_tokens() does what comes between kBlocks and kSlices.
  CombineRecv(Blocks& blocks, std::uint32_t step, const OpenStep& open, const Result& output, Stages first = kBlocks,
              Stages last = kSlices)
      : b_(blocks), c_(blocks.config()), k_(kernels()), step_(step), set_(set_of(c_, step)), plan_(*open.input.plan),
        own_(plan_.slice.tokens(plan_.tokens)), released_(open.released), has_tail_(open.has_tail), out_(output),
        block_(combine_block(c_)), answer_(answer_block(c_)), first_(first), last_(last) {}

  const Plan& plan() const { return plan_; }
  std::uint32_t own_tokens() const { return released_ ? 0 : own_; }
  // Headers of the living peers, in their order, once all have been read. Only in an AllToAll in pieces.
  const std::vector<BlockHeader>& headers() const { return headers_; }

  // Adds up the own tokens begin to end - 1. `row_of(ref)` is where the row of plan.token_rows[ref] lies.
  template <typename RowOf>
  void add_tokens(std::uint32_t begin, std::uint32_t end, const RowOf& row_of) const {
    std::vector<char> decoded(c_.combine_fp8 ? kMaxTopK * row_bytes() : 0);
    for (std::uint32_t own = begin; own < end; ++own) {
      const std::uint32_t t = plan_.slice.token(own), next = plan_.slice.token(own + 1);
      if (next < plan_.tokens)
        for (std::uint32_t i = plan_.token_begin[next]; i < plan_.token_begin[next + 1]; ++i) ask_for_start(row_of(i), row_bytes());
      const std::uint32_t first = plan_.token_begin[t], n = plan_.token_begin[t + 1] - first;
      std::uint32_t refs[kMaxTopK];
      std::iota(refs, refs + n, first);
      const std::uint32_t ends = b_.nodes().empty() ? 0 : order_by_node(refs, n);
      const void* rows[kMaxTopK];
      for (std::uint32_t i = 0; i < n; ++i) {
        rows[i] = row_of(refs[i]);
        if (!c_.combine_fp8 || !b_.relayed(plan_.token_rows[refs[i]].rank)) continue;
        const char* const codes = row_of(refs[i]);
        k_.decode(c_.dtype, decoded.data() + i * row_bytes(), reinterpret_cast<const std::uint8_t*>(codes),
                  reinterpret_cast<const float*>(codes + answer_.scales_at), c_.hidden);
        rows[i] = decoded.data() + i * row_bytes();
      }
      char* y = out_.y + t * out_.stride;
      k_.add_rows(c_.dtype, y, out_.accumulate ? y : nullptr, rows, nullptr, ends, n, c_.hidden);
      if (has_tail_ && out_.tail != nullptr) read_tail(t, row_of);
      for (std::uint32_t replica : b_.replicas()) {
        char* row = b_.slice_at_peer(set_, replica) + block_.row_at(own);
        k_.copy(row, y, row_bytes());
        if (has_tail_ && out_.tail != nullptr) std::memcpy(row + block_.tail_at, tail_of(t), tail_bytes());
      }
    }
  }

  // All own tokens are added up.
  void tell_replicas() const {
    const BlockHeader header = b_.header(step_, own_, slice_flags());
    for (std::uint32_t replica : b_.replicas()) {
      std::memcpy(b_.slice_at_peer(set_, replica), &header, sizeof header);
      b_.raise_at_peer(step_, Signal::Slice, replica);
      b_.count_block(replica, own_, block_.bytes(own_), true);
    }
  }

 private:
  bool begin(int stage, std::vector<std::uint32_t>& units) override {
    if (stage < first_) return true;
    if (stage > last_) return false;
    switch (stage) {
      case kBlocks:
        units.assign(b_.targets().size(), 1);
        if (b_.heap().in_pieces) headers_.resize(units.size());
        return true;
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
      case kBlocks: return b_.has_arrived(step_, Signal::Combine, b_.targets()[group]);
      case kSlices: return b_.has_arrived(step_, Signal::Slice, b_.replicas()[group]);
      default: return true;
    }
  }

  Waiting waiting_of(int stage, std::uint32_t group) const override {
    if (stage == kSlices)
      return b_.waiting_for(step_, Signal::Slice, b_.replicas()[group], "the finished rows");
    return b_.waiting_for(step_, Signal::Combine, b_.targets()[group],
                          b_.relayed(b_.targets()[group]) ? "the sums of the node" : "the combine block");
  }

  std::uint32_t awaited(int stage, std::uint32_t group) const override {
    return stage == kBlocks ? b_.targets()[group] : stage == kSlices ? b_.replicas()[group] : kNoRank;
  }

  void run(int stage, std::uint32_t group, std::uint32_t unit) override {
    switch (stage) {
      case kBlocks: read_header(group); break;
      case kTokens:
        add_tokens(unit * tokens_per_unit_, std::min(own_, (unit + 1) * tokens_per_unit_),
                   [this](std::uint32_t ref) { return row_of(ref); });
        break;
      default: read_slice(b_.replicas()[group], unit);
    }
  }

  void finished(int stage, std::uint32_t) override {
    if (stage == kTokens) tell_replicas();
  }

  void read_header(std::uint32_t group) {
    const std::uint32_t peer = b_.targets()[group];
    BlockHeader header;
    std::memcpy(&header, b_.own_slot(set_, Op::Combine, peer), sizeof header);
    b_.check_header(header, Phase::CombineRecv, step_, Op::Combine, peer);
    b_.check_pieces(header, Phase::CombineRecv, Op::Combine, peer);
    const std::uint32_t mine = (released_ ? kReleased : 0u) | (has_tail_ ? kHasTail : 0u);
    const std::uint32_t theirs = header.flags & (kReleased | kHasTail);
    if (theirs != mine) b_.protocol_error(Phase::CombineRecv, step_, peer, difference_text(mine, theirs));
    const std::uint32_t expected = released_ ? 0 : plan_.rows(peer);
    if (header.rows != expected)
      b_.protocol_error(Phase::CombineRecv, step_, peer,
                        std::to_string(header.rows) + " rows for the " + std::to_string(expected) + " it was sent");
    if ((header.flags & kOverflowed) != 0) b_.note_overflow(peer);
    if (header.overflowed != 0)   // the peer answers for a node
      for (std::uint32_t rank : b_.peers())
        if (b_.rails().rep[rank] == peer && (header.overflowed >> b_.rails().number[rank] & 1) != 0) b_.note_overflow(rank);
    const std::uint64_t more_headers = std::uint64_t{header.pieces - 1} * block_.header_bytes;
    b_.count_block(peer, header.rows, layout_of(peer).bytes(header.rows) + more_headers, false);
    if (b_.heap().in_pieces) headers_[group] = header;
  }

  std::uint16_t node_of(std::uint32_t ref) const { return b_.nodes()[plan_.token_rows[ref].rank]; }
  // Sorts a token's rows by node, then rank. Returns a bit for each that is the last of its node.
  std::uint32_t order_by_node(std::uint32_t* refs, std::uint32_t n) const {
    std::sort(refs, refs + n, [this](std::uint32_t a, std::uint32_t b) {
      return std::pair(node_of(a), a) < std::pair(node_of(b), b);
    });
    std::uint32_t ends = 0;
    for (std::uint32_t i = 0; i < n; ++i) ends |= (i + 1 == n || node_of(refs[i]) != node_of(refs[i + 1]) ? 1u : 0u) << i;
    return ends;
  }

  const char* row_of(std::uint32_t ref) const {
    const RowRef& from = plan_.token_rows[ref];
    return b_.own_slot(set_, Op::Combine, from.rank) + layout_of(from.rank).row_at(from.row);
  }
  const BlockLayout& layout_of(std::uint32_t peer) const { return b_.relayed(peer) ? answer_ : block_; }

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

  template <typename RowOf>
  void read_tail(std::uint32_t token, const RowOf& row_of) const {
    char* to = tail_of(token);
    std::memset(to, 0, tail_bytes());
    for (std::uint32_t i = plan_.token_begin[token]; i < plan_.token_begin[token + 1]; ++i) {
      const RowRef& from = plan_.token_rows[i];
      const char* tail = row_of(i) + layout_of(from.rank).tail_at;
      for (std::uint32_t k = 0; k < c_.top_k; ++k) {
        const std::int32_t id = plan_.ids[std::size_t{token} * c_.top_k + k];
        if (id >= 0 && b_.rails().rep[rank_of_expert(c_, static_cast<std::uint32_t>(id))] == from.rank)
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
  const BlockLayout block_, answer_;
  const Stages first_, last_;
  std::uint32_t tokens_per_unit_ = 1;
  std::vector<BlockHeader> headers_;
};

// ---- with relays ---------------------------------------------------------------------------------------------------------

// Neither half waits for the other: a relay's answers are what other nodes' ranks wait for.
class CombineRecvWithRelays final : public PieceRun {
 public:
  CombineRecvWithRelays(Blocks& blocks, std::uint32_t step, const OpenStep& open, const Result& output)
      : relay_(relay_sums(blocks, open)), own_(blocks, step, open, output) {}

  Waiting waiting() override {
    const Waiting w = relay_->waiting();
    return w.peer != kNoRank ? w : own_.waiting();
  }

 private:
  bool work() override {
    const bool answered = relay_->poll();
    return own_.poll() && answered;
  }

  const std::unique_ptr<PhaseRun> relay_;
  CombineRecv own_;
};

// ---- in pieces -----------------------------------------------------------------------------------------------------------

// Adds up tokens in order, as soon as all rows of the next ones are there: rows of a block are in the order of tokens, so what has
// been added frees the pieces that the next tokens need. Sends the rest of this rank's pieces beside that.
class CombineRecvInPieces final : public PieceRun {
 public:
  CombineRecvInPieces(Blocks& blocks, std::uint32_t step, const OpenStep& open, const Result& output)
      : b_(blocks), blocks_(blocks, step, open, output, CombineRecv::kBlocks, CombineRecv::kBlocks),
        slices_(blocks, step, open, output, CombineRecv::kSlices, CombineRecv::kSlices), tells_replicas_(!open.released),
        plan_(blocks_.plan()), sending_(open.sending), own_(blocks_.own_tokens()), in_(blocks.config().world) {
    units_of(own_, combine_block(blocks.config()).row_bytes, &tokens_per_unit_);
  }

  Waiting waiting() override {
    if (const Waiting w = blocks_.waiting(); w.peer != kNoRank) return w;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (opened_ && next_ < own_ && ref_ < plan_.token_begin[plan_.tokens]) {
        const RowRef& row = plan_.token_rows[ref_];
        const In& in = *in_[row.rank];
        return in.arrivals.waiting(in.arrivals.shape().piece_of(row.row));
      }
    }
    if (const Waiting w = slices_.waiting(); w.peer != kNoRank) return w;
    return sending_->waiting(false);
  }

 private:
  struct In {
    In(Blocks& blocks, const BlockHeader& first) : arrivals(blocks, Phase::CombineRecv, Op::Combine, first) {
      for (std::uint32_t p = 0; p < arrivals.shape().pieces; ++p)
        rows_left.push_back(arrivals.shape().end(p) - arrivals.shape().begin(p));
    }
    PieceArrivals arrivals;
    std::vector<std::uint32_t> rows_left;   // indexed by piece
    std::uint32_t read = 0;                 // leading pieces
  };
  struct Chunk {
    std::uint32_t begin = 0, end = 0;       // own tokens
  };

  bool work() override {
    const bool sent = sending_->poll(false);
    return add() && slices_.poll() && sent;
  }

  bool add() {
    if (!blocks_.poll()) return false;
    open();
    for (Chunk chunk; claim(&chunk);) {
      blocks_.add_tokens(chunk.begin, chunk.end, [this](std::uint32_t ref) {
        const RowRef& row = plan_.token_rows[ref];
        return in_[row.rank]->arrivals.row(row.row);
      });
      finish(chunk);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    return added_ == own_;
  }

  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (opened_) return;
    opened_ = true;
    for (const BlockHeader& header : blocks_.headers()) in_[header.source] = std::make_unique<In>(b_, header);
    if (own_ == 0 && tells_replicas_) blocks_.tell_replicas();
  }

  // The next tokens of which all rows are here. Not more: a piece may have to be read before the row that is missing can come.
  bool claim(Chunk* chunk) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::uint32_t most = std::min(own_, next_ + tokens_per_unit_);
    *chunk = {next_, next_};
    while (chunk->end < most && rows_are_here(chunk->end)) ++chunk->end;
    next_ = chunk->end;
    return chunk->end > chunk->begin;
  }

  bool rows_are_here(std::uint32_t own) {
    for (const std::uint32_t refs = refs_until(own + 1); ref_ < refs; ++ref_) {
      PieceArrivals& arrivals = in_[plan_.token_rows[ref_].rank]->arrivals;
      if (!arrivals.has(arrivals.shape().piece_of(plan_.token_rows[ref_].row))) return false;
    }
    return true;
  }

  void finish(const Chunk& chunk) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (std::uint32_t ref = refs_until(chunk.begin); ref < refs_until(chunk.end); ++ref) {
      const RowRef& row = plan_.token_rows[ref];
      In& in = *in_[row.rank];
      const std::uint32_t pieces = in.arrivals.shape().pieces, before = in.read;
      --in.rows_left[in.arrivals.shape().piece_of(row.row)];
      while (in.read < pieces && in.rows_left[in.read] == 0) ++in.read;
      if (in.read > before) in.arrivals.have_read(in.read);
    }
    added_ += chunk.end - chunk.begin;
    if (added_ == own_ && tells_replicas_) blocks_.tell_replicas();
  }

  // Tokens of other replicas have no rows, so those of own tokens follow each other.
  std::uint32_t refs_until(std::uint32_t own) const {
    return plan_.token_begin[own == 0 ? 0 : plan_.slice.token(own - 1) + 1];
  }

  Blocks& b_;
  CombineRecv blocks_, slices_;
  const bool tells_replicas_;
  const Plan& plan_;
  const std::shared_ptr<PieceSending> sending_;
  const std::uint32_t own_;               // tokens that this rank sent, and adds up
  std::uint32_t tokens_per_unit_ = 1;
  std::mutex mutex_;
  bool opened_ = false;
  std::uint32_t next_ = 0, added_ = 0;    // own tokens claimed, and added up
  std::uint32_t ref_ = 0;                 // the first row that is not known to be here
  std::vector<std::unique_ptr<In>> in_;   // indexed by rank
};

}  // namespace

std::unique_ptr<PhaseRun> Exchange::start_combine_recv(std::uint32_t step, const Result& output) {
  std::lock_guard<std::mutex> lock(mutex_);
  OpenStep& open = steps_.expect(step, OpenStep::Progress::Combining, "combine_recv");
  if (blocks_.heap().in_pieces || config().node_ranks != 0) steps_.check_order(step, &OpenStep::adding, "combine_recv");
  open.adding = true;
  if (config().node_ranks != 0) return std::make_unique<CombineRecvWithRelays>(blocks_, step, open, output);
  if (!blocks_.heap().in_pieces) return std::make_unique<CombineRecv>(blocks_, step, open, output);
  return std::make_unique<CombineRecvInPieces>(blocks_, step, open, output);
}

}  // namespace pplx::cpu
