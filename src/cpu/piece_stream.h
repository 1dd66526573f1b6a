// The rows of one block, piece by piece: claimed by threads in units, in order, and finished in any order. A unit lies in one
// piece.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "../protocol/pieces.h"

namespace pplx::cpu {

class PieceStream {
 public:
  struct Unit {
    std::uint32_t piece = 0, begin = 0, end = 0;   // rows of the block; none where it has none
  };

  PieceStream(const BlockShape& shape, std::uint32_t rows_per_unit)
      : shape_(shape), rows_per_unit_(rows_per_unit), units_left_(shape.pieces) {
    for (std::uint32_t p = 0; p < shape.pieces; ++p)
      units_left_[p] = std::max(1u, ceil_div(shape.end(p) - shape.begin(p), rows_per_unit_));
  }

  const BlockShape& shape() const { return shape_; }
  std::uint32_t finished() const { return finished_.load(std::memory_order_acquire); }   // leading pieces
  // The piece whose rows are claimed next; behind the last one when all are.
  std::uint32_t next() const { return piece_.load(std::memory_order_acquire); }

  // Claims all that is below `most` pieces and that `may(piece)` allows, and gives it to `work(unit)`. `finished(pieces)` is called
  // with how many leading pieces are done, each time that there are more; one call at a time. True if there was anything to do.
  template <typename May, typename Work, typename Finished>
  bool advance(std::uint32_t most, May&& may, Work&& work, Finished&& finished) {
    bool progress = false;
    for (Unit unit; claim(std::min(most, shape_.pieces), may, &unit); progress = true) {
      work(unit);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--units_left_[unit.piece] > 0) continue;
      std::uint32_t done = finished_.load(std::memory_order_relaxed);
      if (unit.piece != done) continue;
      while (done < shape_.pieces && units_left_[done] == 0) ++done;
      finished(done);
      finished_.store(done, std::memory_order_release);
    }
    return progress;
  }

 private:
  template <typename May>
  bool claim(std::uint32_t most, May&& may, Unit* unit) {
    if (next() >= most) return false;   // nothing to take a lock for
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::uint32_t piece = piece_.load(std::memory_order_relaxed);
    if (piece >= most) return false;
    if (piece == allowed_) {
      if (!may(piece)) return false;
      ++allowed_;
    }
    *unit = {piece, row_, std::min(row_ + rows_per_unit_, shape_.end(piece))};
    row_ = unit->end;
    if (row_ == shape_.end(piece)) piece_.store(piece + 1, std::memory_order_release);
    return true;
  }

  const BlockShape shape_;
  const std::uint32_t rows_per_unit_;
  std::mutex mutex_;
  std::uint32_t row_ = 0, allowed_ = 0;          // rows claimed; pieces that may be
  std::atomic<std::uint32_t> piece_{0}, finished_{0};
  std::vector<std::uint32_t> units_left_;        // indexed by piece
};

}  // namespace pplx::cpu
