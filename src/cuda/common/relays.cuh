// dedup="node": places in the memory of relays (protocol/nodes.h), and waits of which one must end before the others.
#pragma once

#include "counters.cuh"

namespace pplx::cuda {

__device__ inline bool has_relays(const Common& k) { return k.c.node_ranks != 0; }
// True if what goes to a peer, or comes from it, goes by way of a relay.
__device__ inline bool is_relayed(const Common& k, std::uint32_t peer) { return is_remote(k, peer) && has_relays(k); }
__device__ inline std::uint32_t rank_of_holder(const Relays& r, std::uint32_t source) { return r.rank[r.holder[source]]; }

// Returns the source's block for this node, in the memory of its relay.
__device__ inline const char* node_block(const Common& k, const Relays& r, std::uint32_t set, Op op, std::uint32_t source) {
  return r.blocks[r.holder[source]] + k.heap.remote_slot_at(set, op, r.slot[source]);
}
// Returns the numbers of a mate's rows in that block.
__device__ inline std::uint32_t* rows_of_mate(const Common& k, const Relays& r, std::uint32_t set, std::uint32_t source,
                                              std::uint32_t mate) {
  return reinterpret_cast<std::uint32_t*>(r.areas[mate]) + (std::uint64_t{set} * k.c.world + source) * k.most_rows;
}
// Returns the block with a mate's sums for the source.
__device__ inline char* block_of_mate(const Common& k, const Relays& r, std::uint32_t set, std::uint32_t source, std::uint32_t mate) {
  const std::uint64_t block = (std::uint64_t{r.nth[source]} * k.c.in_flight + set) * k.c.node_ranks + mate;
  return r.areas[r.holder[source]] + r.layout.blocks + r.layout.block_bytes * block;
}
// Returns the numbers that this relay keeps.
struct NumbersOfNode {
  std::uint32_t* at;
  std::uint32_t ranks;

  __device__ NumbersOfNode(const Common& k, const Relays& r, std::uint32_t set, std::uint32_t source)
      : at(reinterpret_cast<std::uint32_t*>(r.areas[r.number[k.c.rank]] + r.layout.numbers) +
           r.layout.number_words * (std::uint64_t{r.nth[source]} * k.c.in_flight + set)),
        ranks(k.c.node_ranks) {}
  __device__ std::uint32_t& of_mate(std::uint32_t mate) const { return at[mate]; }
  __device__ std::uint32_t& all() const { return at[ranks]; }
  __device__ std::uint32_t& of_row(std::uint32_t row, std::uint32_t mate) const {
    return at[1 + ranks + std::uint64_t{row} * ranks + mate];
  }
};

// Waits last Common::timeout_ns. Those end sooner that know the rank to blame: for node blocks first, then for what relays pass on,
// for what mates return, and for other blocks.
inline constexpr auto kBlocksSooner = static_cast<std::uint64_t>(deadlines::kPassedOn.seconds * deadlines::kApart * 1e9);
inline constexpr auto kRelaysSooner = static_cast<std::uint64_t>(deadlines::kAnswered.seconds * deadlines::kApart * 1e9);
inline constexpr std::uint64_t kNodesSooner = kRelaysSooner + kBlocksSooner, kReturnsSooner = kNodesSooner / 2;
class Deadline {
 public:
  __device__ Deadline(const Common& k, std::uint32_t step, std::uint64_t begun, std::uint64_t sooner)
      : begun_(begun), limit_(k.timeout_ns * (step == k.c.first_step ? deadlines::kFirstStepFactor : 1) - sooner) {}
  // Fails once the time is up, unless some rank says that it comes later.
  __device__ void look(const Common& k, Phase phase, std::uint32_t step, std::uint32_t peer, std::uint64_t seen) {
    if (++looks_ % 256 != 0 || nanoseconds() - begun_ <= limit_) return;
    if (load_acquire(&k.report->busy) != 0)
      begun_ = nanoseconds();
    else
      fail(k, {AbortReason::Timeout, phase, k.c.rank, peer, step}, arrival_word(k.generation, step), seen);
  }

 private:
  std::uint64_t begun_;
  const std::uint64_t limit_;
  std::uint32_t looks_ = 0;
};

// Waits as wait() does, by one thread, and counts the wait. With `sooner` it gives up that much earlier, and counts waits of a combine
// alone.
[[maybe_unused]] static __device__ __noinline__ bool wait_and_count(const Common& k, const void* word, Phase phase, std::uint32_t step,
                                                                   std::uint32_t peer, std::uint64_t begun, std::uint64_t sooner) {
  Deadline deadline(k, step, begun, sooner);
  std::uint64_t seen = 0;
  WaitTimer timer;
  const bool good = keep_looking(k, word, phase, step, peer, [&] { return seen; }, [&] {
    timer.look();
    seen = load_relaxed(word);
    if (matches<Match::Reached>(k, seen, step)) {
      seen = load_acquire(word);
      return true;
    }
    if (sooner != 0) deadline.look(k, phase, step, peer, seen);
    return false;
  });
  const bool combines = phase == Phase::CombineRecv;
  if (combines || sooner == 0) timer.count(k, combines ? Op::Combine : Op::Dispatch, peer);
  fuzz_delay(k, seen);
  return good;
}

}  // namespace pplx::cuda
