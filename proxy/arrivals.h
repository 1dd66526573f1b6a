// The one completion primitive: which shards of a peer's block, or of a piece of it, have landed. It is complete when its mask is
// full. A duplicate changes nothing, and an immediate of an unexpected step is not counted.
#pragma once

#include "../src/protocol/immediate.h"

namespace pplx {

class ShardMask {
 public:
  enum class Outcome : std::uint8_t { Pending, Complete, Duplicate, Inconsistent };

  // `step` and `piece` are the full numbers of what the immediate was found to belong to.
  Outcome add(std::uint32_t step, std::uint32_t shard, std::uint32_t shards, std::uint32_t piece = 0) {
    if (!begun_ || step != step_ || piece != piece_) {
      begun_ = true;
      step_ = step;
      piece_ = piece;
      mask_ = 0;
      complete_ = false;
      shards_ = shards;
    }
    if (shards != shards_ || shard >= shards) return Outcome::Inconsistent;
    const std::uint32_t bit = 1u << shard;
    if ((mask_ & bit) != 0) return Outcome::Duplicate;
    mask_ |= bit;
    complete_ = mask_ == full_mask(shards_);
    return complete_ ? Outcome::Complete : Outcome::Pending;
  }

  bool complete(std::uint32_t step, std::uint32_t piece = 0) const {
    return begun_ && step_ == step && piece_ == piece && complete_;
  }

 private:
  bool begun_ = false, complete_ = false;
  std::uint32_t step_ = 0, piece_ = 0, mask_ = 0, shards_ = 1;
};

}  // namespace pplx
