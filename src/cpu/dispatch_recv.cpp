// dispatch_recv: computes the experts' offsets from all headers; then places each peer's rows as its block, or a piece of it,
// arrives.
#include <algorithm>
#include <cstring>
#include <deque>

#include "exchange.h"
#include "piece_arrivals.h"
#include "piece_run.h"
#include "scales.h"
#include "vector/kernels.h"

namespace pplx::cpu {
namespace {

class DispatchRecv final : public StagedRun {
 public:
  DispatchRecv(Blocks& blocks, std::uint32_t step, const OpenStep& open, const DispatchOutput& output,
               std::shared_ptr<Received> received)
      : b_(blocks), c_(blocks.config()), k_(kernels()), step_(step), set_(set_of(c_, step)), open_(open), out_(output),
        received_(std::move(received)), block_(dispatch_block(c_)), experts_(local_experts(c_, c_.rank)) {}

  // Headers of the living peers, in their order, once all have been read. Only in an AllToAll in pieces, whose rows place_rows()
  // places.
  const std::vector<BlockHeader>& headers() const { return headers_; }

  // Rows begin to end - 1 of those that a peer sends this rank. They lie one behind the other from `from` on, or, in a node's
  // block, among others that begin there.
  void place_rows(std::uint32_t peer, std::uint32_t begin, std::uint32_t end, const char* from) {
    for (std::uint32_t row = begin; row < end; ++row) {
      const std::uint32_t at = b_.relayed(peer) ? received_->row_of_node[received_->rows_begin[peer] + row] : row - begin;
      place_row(peer, row, from + std::uint64_t{at} * block_.row_bytes);
    }
    streamed();
    if (out_.hooks != nullptr) count_placed(received_->rows_begin[peer] + begin, received_->rows_begin[peer] + end);
  }

 private:
  enum Stages { kHeaders, kRows };

  bool begin(int stage, std::vector<std::uint32_t>& units) override {
    switch (stage) {
      case kHeaders:
        rows_.assign(c_.world, 0);
        if (c_.node_ranks != 0) masks_.resize(c_.world);
        base_.assign(std::size_t{c_.world} * experts_, 0);
        units.assign(b_.peers().size(), 1);
        if (b_.heap().in_pieces) headers_.resize(units.size());
        return true;
      case kRows:
        place_experts();
        if (b_.heap().in_pieces) return false;
        for (std::uint32_t peer : b_.peers()) units.push_back(units_of(rows_[peer], block_.row_bytes, &rows_per_unit_));
        return true;
      default: return false;
    }
  }

  bool ready(int stage, std::uint32_t group) override {
    const std::uint32_t peer = b_.peers()[group];
    // The proxy raises one word for a whole block.
    return b_.has_arrived(step_, stage == kHeaders && b_.mapped(peer) ? Signal::Header : Signal::Dispatch, peer);
  }

  Waiting waiting_of(int stage, std::uint32_t group) const override {
    const bool header = stage == kHeaders && b_.mapped(b_.peers()[group]);
    return b_.waiting_for(step_, header ? Signal::Header : Signal::Dispatch, b_.peers()[group],
                          header ? "the dispatch header" : "the dispatch block");
  }

  std::uint32_t awaited(int, std::uint32_t group) const override { return b_.peers()[group]; }

  void run(int stage, std::uint32_t group, std::uint32_t unit) override {
    const std::uint32_t peer = b_.peers()[group];
    if (stage == kHeaders) {
      const BlockHeader header = read_header(peer);
      if (b_.heap().in_pieces) headers_[group] = header;
      return;
    }
    const std::uint32_t begin = unit * rows_per_unit_;
    place_rows(peer, begin, std::min(rows_[peer], begin + rows_per_unit_),
               b_.incoming(set_, Op::Dispatch, peer) + block_.row_at(b_.relayed(peer) ? 0 : begin));
  }

  void finished(int stage, std::uint32_t group) override {
    if (stage != kRows) return;
    const std::uint32_t peer = b_.peers()[group];
    b_.count_block(peer, rows_[peer], block_.bytes(rows_[peer]), false);
  }

  BlockHeader read_header(std::uint32_t peer) {
    const char* block = b_.incoming(set_, Op::Dispatch, peer);
    BlockHeader header;
    std::memcpy(&header, block, sizeof header);
    b_.check_header(header, Phase::DispatchRecv, step_, Op::Dispatch, peer);
    b_.check_pieces(header, Phase::DispatchRecv, Op::Dispatch, peer);
    const std::vector<std::uint32_t>& replicas = b_.replicas();
    if (std::find(replicas.begin(), replicas.end(), peer) != replicas.end())
      b_.check_replica(header, *open_.input.plan, step_, peer);
    std::uint32_t* counts = base_.data() + std::size_t{peer} * experts_;
    if (experts_ > 0) std::memcpy(counts, block + sizeof header + 4ull * first_of_block(peer), 4ull * experts_);
    rows_[peer] = b_.relayed(peer) ? read_masks(peer, block, header) : header.rows;
    const std::uint64_t most = std::uint64_t{rows_[peer]} * c_.top_k;
    std::uint64_t sum = 0;
    for (std::uint32_t e = 0; e < experts_; ++e) sum += counts[e];
    if (sum < rows_[peer] || sum > most)
      b_.protocol_error(Phase::DispatchRecv, step_, peer,
                        "counts that add up to " + std::to_string(sum) + " for " + std::to_string(rows_[peer]) + " rows");
    return header;
  }

  std::uint32_t first_of_block(std::uint32_t peer) const {
    return b_.relayed(peer) ? b_.rails().number[c_.rank] * experts_per_rank(c_) : 0;
  }

  // Reads them once, into memory of this rank: the source may still write there. Keeps those of rows, returns the number of this rank's.
  std::uint32_t read_masks(std::uint32_t peer, const char* block, const BlockHeader& header) {
    std::uint32_t living = 0, mine = 0;
    for (std::uint32_t mate : b_.rails().mates) living |= 1u << b_.rails().number[mate];
    std::vector<std::uint32_t>& masks = masks_[peer];
    masks.resize(std::min(header.masks, max_rows_of_block(c_)));
    if (!masks.empty()) std::memcpy(masks.data(), block + masks_at(c_), 4 * masks.size());
    for (std::size_t token = 0; token < masks.size(); ++token) {
      if ((masks[token] & ~living) != 0)
        b_.protocol_error(Phase::DispatchRecv, step_, peer,
                          "a mask of " + std::to_string(masks[token]) + " for token " + std::to_string(token));
      mine += is_mine(masks[token]);
    }
    masks.erase(std::remove(masks.begin(), masks.end(), 0u), masks.end());
    if (masks.size() != header.rows)
      b_.protocol_error(Phase::DispatchRecv, step_, peer,
                        "masks of " + std::to_string(masks.size()) + " rows for " + std::to_string(header.rows));
    return mine;
  }
  bool is_mine(std::uint32_t mask) const { return (mask >> b_.rails().number[c_.rank] & 1) != 0; }

  // Turns counts by (source, expert) into the output row of each source's first row for each expert.
  void place_experts() {
    counts_ = base_;
    Received& r = *received_;
    r.generation = b_.generation();
    r.top_k = c_.top_k;
    r.rows_begin.assign(c_.world + 1, 0);
    for (std::uint32_t s = 0; s < c_.world; ++s) r.rows_begin[s + 1] = r.rows_begin[s] + rows_[s];
    const std::uint32_t total = r.rows_begin[c_.world];
    if (c_.node_ranks != 0) {
      r.row_of_node.resize(total);
      for (std::uint32_t s = 0; s < c_.world; ++s) {
        r.rows_of_block.push_back(static_cast<std::uint32_t>(masks_[s].size()));
        for (std::uint32_t row = 0, at = r.rows_begin[s]; row < masks_[s].size(); ++row)
          if (is_mine(masks_[s][row])) r.row_of_node[at++] = row;
      }
      for (std::uint32_t s : b_.rails().sources) r.masks.push_back(std::move(masks_[s]));
    }
    r.choices.resize(total);
    const std::size_t per_row = c_.layout == LayoutKind::Compact ? 1 : c_.top_k;
    r.place.resize(total * per_row);
    r.weight.resize(c_.layout == LayoutKind::Compact ? 0 : total * per_row);

    std::uint64_t offset = 0, largest = 0;
    std::vector<std::uint64_t> counts(experts_);
    for (std::uint32_t e = 0; e < experts_; ++e) {
      const std::uint64_t start = c_.layout == LayoutKind::Padded ? std::uint64_t{e} * c_.max_per_expert : offset;
      std::uint64_t count = 0;
      for (std::uint32_t s = 0; s < c_.world; ++s) {
        std::uint32_t& cell = base_[std::size_t{s} * experts_ + e];
        const std::uint32_t n = cell;
        cell = static_cast<std::uint32_t>(start + count);
        count += n;
      }
      counts[e] = count;
      if (out_.counts != nullptr) out_.counts[e] = static_cast<std::int32_t>(count);
      if (out_.offsets != nullptr) out_.offsets[e] = static_cast<std::int32_t>(offset);
      if (c_.layout == LayoutKind::Ragged && c_.zero_pad) zero_rows(start + count, align_up(start + count, c_.align));
      offset = align_up(offset + count, c_.align);
      largest = std::max(largest, count);
    }
    if (out_.offsets != nullptr) out_.offsets[experts_] = static_cast<std::int32_t>(offset);
    if (out_.num_rows != nullptr) *out_.num_rows = static_cast<std::int32_t>(total);
    switch (c_.layout) {
      case LayoutKind::Ragged: r.needed_rows = offset; r.overflowed = offset > c_.max_rows; break;
      case LayoutKind::Padded: r.needed_rows = largest; r.overflowed = largest > c_.max_per_expert; break;
      case LayoutKind::Compact: r.needed_rows = total; r.overflowed = total > c_.max_rows; break;
    }
    if (r.overflowed) b_.note_overflow(c_.rank);
    b_.tally().count([&](Counters& counters) {
      for (std::uint32_t e = 0; e < experts_; ++e) counters.expert_rows[e] += counts[e];
    });
    if (out_.hooks != nullptr) raise_planned(total);
  }

  // ---- hooks ----

  void add(std::uint32_t at, std::uint32_t more) { __atomic_fetch_add(out_.hooks + at, more, __ATOMIC_RELEASE); }

  // Rows of all sources, which are placed.
  void count_placed(std::uint32_t begin, std::uint32_t end) {
    const bool compact = c_.layout == LayoutKind::Compact;
    for (std::uint32_t at = begin; at < end; ++at)
      for (std::uint32_t i = 0, n = compact ? 1 : count_choices(received_->choices[at]); i < n; ++i)
        if (const std::uint32_t place = received_->place[compact ? at : std::size_t{at} * c_.top_k + i];
            place != Received::kNowhere)
          add(hook_arrived_at(c_) + hook_word_of(c_, place), 1);
  }

  // Rows between segments that are to be zero are so already.
  void raise_planned(std::uint32_t total) {
    std::vector<std::uint32_t> rows(hook_words(c_));
    const auto note = [&](std::uint32_t begin, std::uint32_t end) {
      for (std::uint32_t place = begin; place < end; ++place) ++rows[hook_word_of(c_, place)];
    };
    if (c_.layout == LayoutKind::Compact) note(0, std::min(total, c_.max_rows));
    for (std::uint32_t e = 0; c_.layout != LayoutKind::Compact && e < experts_; ++e) {
      const std::uint32_t begin = base_[e], last = c_.world - 1;
      const std::uint32_t end = base_[std::size_t{last} * experts_ + e] + counts_[std::size_t{last} * experts_ + e];
      const bool padded = c_.layout == LayoutKind::Padded;
      note(std::min(begin, padded ? begin : c_.max_rows), std::min(end, padded ? begin + c_.max_per_expert : c_.max_rows));
    }
    for (std::uint32_t word = 0; word < rows.size(); ++word) add(hook_arrived_at(c_) + word, kRaised - rows[word]);
    add(0, kRaised);
  }

  void zero_rows(std::uint64_t begin, std::uint64_t end) {
    end = std::min<std::uint64_t>(end, c_.max_rows);
    for (std::uint64_t row = begin; row < end; ++row) {
      std::memset(out_.x + row * payload_bytes(c_), 0, payload_bytes(c_));
      const char zero[4] = {};
      for (std::uint32_t i = 0; i < scales_per_row(c_); ++i)
        std::memcpy(out_.scales + row * out_.scale.row + i * out_.scale.scale, zero, scale_bytes_each(c_.wire));
      out_.weights[row] = 0.0f;
      out_.src_rank[row] = out_.src_token[row] = -1;
    }
  }

  void place_row(std::uint32_t peer, std::uint32_t row, const char* from) {
    RouteHead head;
    std::memcpy(&head, from + block_.route_at, sizeof head);
    std::uint32_t n = count_choices(head.choices);
    if (n == 0 || head.choices >> c_.top_k != 0)
      b_.protocol_error(Phase::DispatchRecv, step_, peer, "a route of choices " + std::to_string(head.choices));
    const char* payload = from;
    const char* scales = from + block_.scales_at;
    if (peer == c_.rank && open_.own_rows_in_x) {
      if (head.token >= open_.input.plan->tokens)
        b_.protocol_error(Phase::DispatchRecv, step_, peer, "a route of token " + std::to_string(head.token));
      payload = open_.input.x.data + head.token * open_.input.x.stride;
      if (quantised(c_.wire)) {
        payload = b_.staging(set_) + std::uint64_t{head.token} * block_.route_at;
        scales = payload + block_.scales_at;
      }
    }
    const std::uint32_t at = received_->rows_begin[peer] + row;
    RouteEntry entries[kMaxTopK];
    std::memcpy(entries, from + block_.route_at + sizeof head, n * sizeof(RouteEntry));
    if (b_.relayed(peer) && (n = keep_own(peer, &head, entries)) == 0)
      b_.protocol_error(Phase::DispatchRecv, step_, peer, "a route without a choice of this rank");
    received_->choices[at] = head.choices;
    for (std::uint32_t i = 0; i < n; ++i) {
      const std::uint32_t expert = route_expert(entries[i].place), index = route_index(entries[i].place);
      if (expert >= experts_ || index >= counts_[std::size_t{peer} * experts_ + expert])
        b_.protocol_error(Phase::DispatchRecv, step_, peer,
                          "a route to place " + std::to_string(index) + " of its local expert " + std::to_string(expert));
    }
    if (c_.layout == LayoutKind::Compact)
      place_compact(peer, at, head, entries, payload, scales);
    else
      place_by_expert(peer, at, head, entries, n, payload, scales);
  }

  // Leaves of a node's choices those of this rank.
  std::uint32_t keep_own(std::uint32_t peer, RouteHead* head, RouteEntry* entries) const {
    const std::uint32_t first = first_of_block(peer);
    std::uint32_t kept = 0;
    for (std::uint32_t k = 0, i = 0; k < c_.top_k; ++k) {
      if ((head->choices >> k & 1) == 0) continue;
      const std::uint32_t expert = route_expert(entries[i].place) - first;
      if (expert < experts_per_rank(c_))
        entries[kept++] = {route_place(expert, route_index(entries[i].place)), entries[i].weight};
      else
        head->choices = static_cast<std::uint16_t>(head->choices & ~(1u << k));
      ++i;
    }
    return kept;
  }

  void place_by_expert(std::uint32_t peer, std::uint32_t at, const RouteHead& head, const RouteEntry* entries, std::uint32_t n,
                       const char* payload, const char* scales) {
    for (std::uint32_t i = 0; i < n; ++i) {
      const std::uint32_t expert = route_expert(entries[i].place);
      const std::uint32_t place = base_[std::size_t{peer} * experts_ + expert] + route_index(entries[i].place);
      const bool fits =
          c_.layout == LayoutKind::Padded ? place - expert * c_.max_per_expert < c_.max_per_expert : place < c_.max_rows;
      received_->place[std::size_t{at} * c_.top_k + i] = fits ? place : Received::kNowhere;
      received_->weight[std::size_t{at} * c_.top_k + i] = entries[i].weight;
      if (!fits) continue;
      write_row(place, expert, payload, scales);
      out_.weights[place] = entries[i].weight;
      out_.src_rank[place] = static_cast<std::int32_t>(peer);
      out_.src_token[place] = static_cast<std::int32_t>(head.token);
    }
  }

  void place_compact(std::uint32_t peer, std::uint32_t at, const RouteHead& head, const RouteEntry* entries,
                     const char* payload, const char* scales) {
    const bool fits = at < c_.max_rows;
    received_->place[at] = fits ? at : Received::kNowhere;
    if (!fits) return;
    write_row(at, 0, payload, scales);
    out_.src_rank[at] = static_cast<std::int32_t>(peer);
    out_.src_token[at] = static_cast<std::int32_t>(head.token);
    for (std::uint32_t k = 0, i = 0; k < c_.top_k; ++k) {
      const bool here = (head.choices >> k & 1) != 0;
      out_.topk_ids[std::size_t{at} * c_.top_k + k] = here ? static_cast<std::int32_t>(route_expert(entries[i].place)) : -1;
      out_.topk_weights[std::size_t{at} * c_.top_k + k] = here ? entries[i].weight : 0.0f;
      i += here;
    }
  }

  void write_row(std::uint64_t place, std::uint32_t expert, const char* payload, const char* scales) const {
    k_.stream(out_.x + place * payload_bytes(c_), payload, payload_bytes(c_));
    const std::uint32_t each = scale_bytes_each(c_.wire), n = scales_per_row(c_);
    if (n == 0) return;
    const std::uint64_t group = c_.layout == LayoutKind::Padded ? expert : 0;
    char* to = out_.scales + group * out_.scale.group + (place - group * c_.max_per_expert) * out_.scale.row;
    copy_scales(to, out_.scale.scale, scales, each, n, each);
  }

  Blocks& b_;
  const Config& c_;
  const Kernels& k_;
  const std::uint32_t step_, set_;
  const OpenStep& open_;
  const DispatchOutput out_;
  const std::shared_ptr<Received> received_;
  const BlockLayout block_;
  const std::uint32_t experts_;
  std::uint32_t rows_per_unit_ = 1;
  std::vector<std::uint32_t> rows_;            // indexed by source
  std::vector<std::uint32_t> base_, counts_;   // [source, local expert]
  std::vector<std::vector<std::uint32_t>> masks_;   // indexed by source
  std::vector<BlockHeader> headers_;
};

// ---- in pieces -----------------------------------------------------------------------------------------------------------

// Sends the rest of this rank's pieces beside what it receives.
class DispatchRecvInPieces final : public PieceRun {
 public:
  DispatchRecvInPieces(Blocks& blocks, std::uint32_t step, const OpenStep& open, const DispatchOutput& output,
                       std::shared_ptr<Received> received)
      : b_(blocks), headers_(blocks, step, open, output, std::move(received)), sending_(open.sending) {}

  Waiting waiting() override {
    const Waiting w = headers_.waiting();
    if (w.peer != kNoRank) return w;
    if (opened_.load(std::memory_order_acquire))
      for (const In& in : ins_)
        if (const std::uint32_t piece = in.rows.next(); piece < in.rows.shape().pieces) return in.arrivals.waiting(piece);
    return sending_->waiting(false);
  }

 private:
  struct In {
    In(Blocks& blocks, const BlockHeader& first, std::uint32_t rows_per_unit)
        : arrivals(blocks, Phase::DispatchRecv, Op::Dispatch, first), rows(arrivals.shape(), rows_per_unit) {}
    PieceArrivals arrivals;
    PieceStream rows;
  };

  bool work() override {
    const bool sent = sending_->poll(false);
    return place() && sent;
  }

  bool place() {
    if (!headers_.poll()) return false;
    open();
    bool all = true, progress = true;
    while (progress) {
      progress = false;
      all = true;
      for (In& in : ins_) {
        const auto may = [&](std::uint32_t piece) { return in.arrivals.has(piece); };
        const auto place = [&](const PieceStream::Unit& unit) {
          headers_.place_rows(in.arrivals.peer(), unit.begin, unit.end, in.arrivals.row(unit.begin));
        };
        const auto placed = [&](std::uint32_t pieces) {
          in.arrivals.have_read(pieces);
          if (pieces == in.rows.shape().pieces)
            b_.count_block(in.arrivals.peer(), in.rows.shape().rows, in.arrivals.bytes(), false);
        };
        progress |= in.rows.advance(in.rows.shape().pieces, may, place, placed);
        all &= in.rows.finished() == in.rows.shape().pieces;
      }
    }
    return all;
  }

  void open() {
    if (opened_.load(std::memory_order_acquire)) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (opened_.load(std::memory_order_relaxed)) return;
    for (const BlockHeader& header : headers_.headers()) {
      std::uint32_t rows_per_unit = 1;
      units_of(header.rows, dispatch_block(b_.config()).row_bytes, &rows_per_unit);
      ins_.emplace_back(b_, header, rows_per_unit);
    }
    opened_.store(true, std::memory_order_release);
  }

  Blocks& b_;
  DispatchRecv headers_;
  const std::shared_ptr<PieceSending> sending_;
  std::mutex mutex_;
  std::atomic<bool> opened_{false};
  std::deque<In> ins_;             // indexed by peer, once all headers are here
};

}  // namespace

std::unique_ptr<PhaseRun> Exchange::start_dispatch_recv(std::uint32_t step, const DispatchOutput& output,
                                                        std::shared_ptr<Received> received) {
  std::lock_guard<std::mutex> lock(mutex_);
  OpenStep& open = steps_.expect(step, OpenStep::Progress::Sent, "dispatch_recv");
  if (blocks_.heap().in_pieces || config().node_ranks != 0) steps_.check_order(step, &OpenStep::receiving, "dispatch_recv");
  open.receiving = true;
  if (!blocks_.heap().in_pieces) return std::make_unique<DispatchRecv>(blocks_, step, open, output, std::move(received));
  return std::make_unique<DispatchRecvInPieces>(blocks_, step, open, output, std::move(received));
}

}  // namespace pplx::cpu
