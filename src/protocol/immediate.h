// The 32 bits that ride on a write, all that EFA has: op 3 | object 3 | source rank 10 | step 5 | piece 3 | shard 4 |
// shards-1 4. A credit has no shards; in their place it names the op, and `piece` is the one that has been read.
#pragma once

#include "block.h"

namespace pplx {

inline constexpr std::uint32_t kMaxShards = 16;

struct Immediate {
  Op op = Op::Dispatch;
  std::uint32_t object = 0;
  std::uint32_t source = 0;
  std::uint32_t step = 0;        // its low 5 bits travel
  std::uint32_t shard = 0;
  std::uint32_t shards = 1;
  std::uint32_t piece = 0;       // its low 3 bits travel
};

// True if a step may be the one that an immediate names.
constexpr bool same_step(std::uint32_t step, const Immediate& i) { return ((step ^ i.step) & 0x1fu) == 0; }

constexpr std::uint32_t pack(const Immediate& i) {
  return static_cast<std::uint32_t>(i.op) << 29 | (i.object & 7u) << 26 | (i.source & 0x3ffu) << 16 | (i.step & 0x1fu) << 11 |
        
         (i.piece & 7u) << 8 | (i.shard & 15u) << 4 | ((i.shards - 1) & 15u);
}

constexpr Immediate unpack(std::uint32_t bits) {
  Immediate i;
  i.op = static_cast<Op>(bits >> 29);
  i.object = bits >> 26 & 7u;
  i.source = bits >> 16 & 0x3ffu;
  i.step = bits >> 11 & 0x1fu;
  i.piece = bits >> 8 & 7u;
  i.shard = bits >> 4 & 15u;
  i.shards = (bits & 15u) + 1;
  return i;
}

// A block is complete when every shard's bit is set, so a duplicate changes nothing.
constexpr std::uint32_t full_mask(std::uint32_t shards) { return shards >= 32 ? ~0u : (1u << shards) - 1; }

}  // namespace pplx
