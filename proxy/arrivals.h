// The one completion primitive: which shards of a peer's block have landed. A block is complete when its mask is full. A duplicate
// changes nothing, and an immediate of an unexpected step is not counted.
#pragma once

#include "../src/protocol/immediate.h"

namespace pplx {

class ShardMask {
 public:
  enum class Outcome : std::uint8_t { Pending, Complete, Duplicate, Inconsistent };

  // `step` is the full number of the step that the immediate was found to belong to.
  Outcome add(std::uint32_t step, std::uint32_t shard, std::uint32_t shards) {
    if (!begun_ || step != step_) {
      begun_ = true;
      step_ = step;
      mask_ = 0;
      shards_ = shards;
    }
    if (shards != shards_ || shard >= shards) return Outcome::Inconsistent;
    const std::uint32_t bit = 1u << shard;
    if ((mask_ & bit) != 0) return Outcome::Duplicate;
    mask_ |= bit;
    return mask_ == full_mask(shards_) ? Outcome::Complete : Outcome::Pending;
  }

  bool complete(std::uint32_t step) const { return begun_ && step_ == step && mask_ == full_mask(shards_); }

 private:
  bool begun_ = false;
  std::uint32_t step_ = 0, mask_ = 0, shards_ = 1;
};

}  // namespace pplx
