// The send side of one operation of a step in pieces. Both halves of the operation share it: the send half sends what needs no
// credit, the receive half the rest, beside what it receives.
#pragma once

#include <deque>
#include <functional>

#include "blocks.h"
#include "piece_run.h"
#include "piece_stream.h"

namespace pplx::cpu {

class PieceSending {
 public:
  // rows_of: rows of the block for a living peer.
  PieceSending(Blocks& blocks, std::uint32_t step, Op op, const std::function<std::uint32_t(std::uint32_t peer)>& rows_of);
  virtual ~PieceSending() = default;

  // Any number of threads. True when all pieces are written, or with `first` all that need no credit.
  bool poll(bool first);
  Waiting waiting(bool first) const;

 protected:
  // True if the block for a peer may be begun; called again until then.
  virtual bool may_begin(std::uint32_t /*peer*/) { return true; }
  virtual Waiting waiting_to_begin(std::uint32_t /*peer*/) const { return {}; }
  // At `to`, in its place.
  virtual void write_header(std::uint32_t peer, const BlockShape& shape, std::uint32_t piece, char* to) = 0;
  // Rows begin to end - 1, one behind the other from `to` on.
  virtual void write_rows(std::uint32_t peer, std::uint32_t begin, std::uint32_t end, char* to) = 0;

 private:
  struct Out {
    Out(std::uint32_t peer, char* slot, std::uint64_t before, const BlockShape& shape, std::uint32_t rows_per_unit)
        : peer(peer), slot(slot), before(before), stream(shape, rows_per_unit) {}
    const std::uint32_t peer;
    char* const slot;
    const std::uint64_t before;   // contents of the send area from the set's last step
    PieceStream stream;
  };

  bool may_write(const Out& out, std::uint32_t piece);
  bool place_has_left(const Out& out, std::uint32_t piece) const;
  static std::uint32_t most(const Out& out, bool first) {
    return first ? std::min(kPlaces, out.stream.shape().pieces) : out.stream.shape().pieces;
  }

  Blocks& b_;
  const std::uint32_t step_, set_;
  const Op op_;
  const BlockLayout block_;
  std::deque<Out> outs_;          // indexed by peer, in their order
};

// The send half: what comes before the rows, then all rows that need no credit.
class SendInPieces final : public PieceRun {
 public:
  SendInPieces(std::unique_ptr<PhaseRun> before, std::shared_ptr<PieceSending> sending)
      : before_(std::move(before)), sending_(std::move(sending)) {}

  Waiting waiting() override {
    const Waiting w = before_->waiting();
    return w.peer != kNoRank ? w : sending_->waiting(true);
  }

 private:
  bool work() override { return before_->poll() && sending_->poll(true); }

  const std::unique_ptr<PhaseRun> before_;
  const std::shared_ptr<PieceSending> sending_;
};

}  // namespace pplx::cpu
