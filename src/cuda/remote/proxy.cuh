// Peers of other nodes: a host thread, the proxy, moves their blocks. Both ends of a block lie in this rank's pinned host memory,
// which kernels write and read as they do a peer's. With a carrier that kernels drive (remote/carrier.cuh) blocks lie in its memory,
// and threads that would tell the proxy put them: each part with a signal of its own, since nothing orders two puts.
//
// docs/design.md has the parts of a block ("Parts"), and why it is there for a thread that sees its arrival word ("Arrival"). Host
// memory lies across PCIe: one thread for each peer looks there, and raises the same words in device memory for all others. Its warp
// claims the task, since only a thread block that runs can be waited for.
//
// A block is written again only after all of it has left, which the same thread looks for: a set's dispatch has left before its
// combine is complete, a combine and weights before the set's next dispatch. So a writer knows from device memory.
#pragma once

#include "../../protocol/mailbox.h"
#include "../../protocol/pieces.h"
#include "../common/relays.cuh"
#include "carrier.cuh"

namespace pplx::cuda {

// ---- arrival words and headers of blocks, for peers of other nodes, for replicas and for weights ----

__device__ inline const char* arrival(const Common& k, std::uint32_t step, Signal signal, std::uint32_t peer) {
  return k.peers[k.c.rank] + k.heap.arrival_at(k.c, set_of(k.c, step), signal, peer);
}
__device__ inline void raise_at_peer(const Common& k, std::uint32_t step, Signal signal, std::uint32_t peer) {
  fuzz_delay(k, arrival_word(k.generation, step));
  raise_arrival<Atomics>(k.peers[peer], k.heap, k.c, signal, k.c.rank, k.generation, step);
}

__device__ inline BlockHeader load_header(const char* block) {
  const uint4 first = load_arrived(block), piece = load_arrived(block + 2 * kVec16Bytes);
  const std::uint32_t source = load_arrived(block + kVec16Bytes).x;
  return {first.x, first.y, first.z, first.w, source, 0, 0, piece.x, piece.y, piece.z, piece.w};
}

// Returns true if a header is what this step's block of that peer must have; fails otherwise.
__device__ inline bool check_header(const Common& k, const BlockHeader& h, Phase phase, std::uint32_t step, std::uint32_t peer) {
  if (h.step == step && h.generation == k.generation && h.source == peer && h.rows <= k.most_rows) return true;
  return blame(k, phase, step, peer, arrival_word(k.generation, step), arrival_word(h.generation, h.step));
}

// Writes a header: the threads of a group together, before the peer is told. overflowed: of a node's answer; masks: of a block for a node.
__device__ inline void write_header(const Common& k, char* block, std::uint32_t step, std::uint32_t rows, std::uint32_t flags,
                                    std::uint32_t thread, std::uint32_t overflowed = 0, std::uint32_t masks = 0) {
  if (thread >= sizeof(BlockHeader) / kVec16Bytes) return;
  const uint4 behind = make_uint4(thread == 1 ? k.c.rank : thread == 3 ? overflowed : 0, thread == 3 ? masks : 0, 0, 0);
  store16(block + kVec16Bytes * thread, thread == 0 ? make_uint4(step, k.generation, rows, flags) : behind);
}

// ---- parts of blocks ----

// In the word of a block's parts, beside a bit for each that is complete: a thread tells the proxy of them.
inline constexpr std::uint32_t kTelling = 1u << kMostParts;
__device__ inline std::uint32_t leading_parts(std::uint32_t word) { return __ffs(static_cast<int>(~(word & (kTelling - 1)))) - 1; }

__device__ inline MailboxEntry mailbox_of(const Common& k, std::uint32_t step, Op op, std::uint32_t peer) {
  return mailbox_entry(k.heap, k.c, k.host, step, op, peer);
}
__device__ inline std::uint64_t* announced(const Common& k, std::uint32_t step, Op op, std::uint32_t peer) {
  return &k.control->announced[set_of(k.c, step)][static_cast<int>(op)][peer];
}

// The proxy's word for that lies in host memory; this is the last that was seen of it.
__device__ inline std::uint64_t* seen_to_leave(const Common& k, std::uint32_t step, Op op, std::uint32_t peer) {
  return &k.control->left[set_of(k.c, step)][static_cast<int>(op)][peer];
}

// True if the last block of that set is known to have left.
__device__ inline bool is_seen_to_leave(const Common& k, std::uint64_t last, std::uint32_t step, Op op, std::uint32_t peer) {
  return has_left(*seen_to_leave(k, step, op, peer), last);
}

// True if the peer's block of this step may be written. False: something failed, and the proxy may still read the last one. A thread block
// that begins late may find this step's announced: others have asked before they wrote it.
__device__ inline bool may_write(const Common& k, std::uint32_t step, Op op, std::uint32_t peer) {
  const std::uint64_t last = load_relaxed(announced(k, step, op, peer));
  return last == arrival_word(k.generation, step) || is_seen_to_leave(k, last, step, op, peer);
}

// Waits until the last block of that set has left.
__device__ inline void see_it_leave(const Common& k, std::uint32_t step, Op op, Phase phase, std::uint32_t peer) {
  const std::uint64_t last = *announced(k, step, op, peer);
  if (is_seen_to_leave(k, last, step, op, peer)) return;
  if (kCarrier) {
    if (wait_until_left(k, step, op, phase, peer)) *seen_to_leave(k, step, op, peer) = last;
    return;
  }
  if (wait<Match::Reached>(k, mailbox_of(k, step, op, peer).sent, phase, static_cast<std::uint32_t>(last), peer))
    *seen_to_leave(k, step, op, peer) = last;
}

__device__ inline const PartSizes& parts_of(const Common& k, Op op) { return op == Op::Dispatch ? k.dispatch_parts : k.combine_parts; }

// Puts the parts [first, end) of a block of `rows` rows, by a carrier that kernels drive.
__device__ inline void put_parts(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows, std::uint32_t first, std::uint32_t end) {
  const BlockLayout& layout = op == Op::Dispatch ? k.dispatch : op == Op::Combine ? k.combine : k.weights;
  for (std::uint32_t part = first; part < end; ++part) {
    const std::uint32_t before = op == Op::Weights || part == 0 ? 0 : parts_of(k, op).begin(part);
    const std::uint32_t behind = op == Op::Weights ? rows : min(rows, parts_of(k, op).begin(part + 1));
    put_part(k, step, op, peer, part, part == 0 ? 0 : layout.row_at(before), layout.bytes(behind));
  }
}

// Hands over the first `complete` parts of the block. told: how many the proxy or the carrier has already.
__device__ inline void hand_over(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows, std::uint32_t told = 0,
                                 std::uint32_t parts = 1) {
  if (kCarrier) {
    *announced(k, step, op, peer) = arrival_word(k.generation, step);
    put_parts(k, step, op, peer, rows, told, parts);
    return;
  }
  fuzz_delay(k, rows + parts);
  announce<Atomics>(mailbox_of(k, step, op, peer), k.generation, {step, rows, false, parts}, *announced(k, step, op, peer));
  mark_told(k, step, op);
}

// How many rows a block has: known, or to be read once its header is there.
struct RowsOfBlock {
  const std::uint32_t* at;  // written by the writer of the header
  std::uint32_t known;

  __device__ explicit RowsOfBlock(std::uint32_t rows) : at(nullptr), known(rows) {}
  __device__ explicit RowsOfBlock(const std::uint32_t* rows) : at(rows), known(0) {}
  __device__ std::uint32_t read() const { return at != nullptr ? *at : known; }
};

// This part is complete.
static __device__ __noinline__ void complete_part(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t part, RowsOfBlock rows) {
  std::uint32_t* const word = &k.control->parts[set_of(k.c, step)][static_cast<int>(op)][peer];
  std::uint32_t seen = or_in_order(word, 1u << part | kTelling), told = leading_parts(seen);
  if ((seen & kTelling) != 0) return;
  seen |= 1u << part;
  for (;;) {
    const std::uint32_t complete = leading_parts(seen);
    if (complete > told) {
      const std::uint32_t all = rows.read();
      hand_over(k, step, op, peer, all, told, complete);
      if (complete == parts_of(k, op).count(all)) {
        *word = 0;
        return;
      }
      told = complete;
    }
    const std::uint32_t now = swap_in_order(word, seen | kTelling, seen);
    if (now == (seen | kTelling)) return;
    seen = now & ~kTelling;
  }
}

// This thread's group has stored so much of a part, and met at a barrier. A row counts as `each`.
static __device__ __noinline__ void count_part(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t part,
                                               std::uint32_t stored, std::uint32_t each, RowsOfBlock rows) {
  const PartSizes& sizes = parts_of(k, op);
  const std::uint32_t all = (sizes.begin(part + 1) - sizes.begin(part)) * each + (part == 0 ? 1 : 0);
  std::uint32_t* const count = &k.control->stored[set_of(k.c, step)][static_cast<int>(op)][peer][part];
  fuzz_delay(k, std::uint64_t{step} << 32 | part << 8 | peer);
  if (count_in_order(count, stored) + stored != all) return;
  *count = 0;
  complete_part(k, step, op, peer, part, rows);
}

// The rows [first, first + n) have been stored.
[[maybe_unused]] static __device__ __noinline__ void count_rows(const Common& k, std::uint32_t step, Op op, std::uint32_t peer,
                                                                std::uint32_t first, std::uint32_t n, RowsOfBlock rows) {
  const PartSizes& sizes = parts_of(k, op);
  while (n > 0) {
    const std::uint32_t part = sizes.part_of(first), here = min(n, sizes.begin(part + 1) - first);
    count_part(k, step, op, peer, part, here, 1, rows);
    first += here;
    n -= here;
  }
}

// Counts the header of a block of `rows` rows, which has been stored, in place of the rows that the last part lacks.
[[maybe_unused]] static __device__ __noinline__ void count_header(const Common& k, std::uint32_t step, Op op, std::uint32_t peer,
                                                                  std::uint32_t rows, std::uint32_t each) {
  const PartSizes& sizes = parts_of(k, op);
  const std::uint32_t last = sizes.count(rows) - 1, lacking = (sizes.begin(last + 1) - rows) * each;
  if (last > 0 && lacking > 0) count_part(k, step, op, peer, last, lacking, each, RowsOfBlock(rows));
  count_part(k, step, op, peer, 0, last > 0 ? 1 : lacking + 1, each, RowsOfBlock(rows));
}

// True if this thread's block is the first to ask in this step: then it looks after the words of host memory.
__device__ inline bool claim_words(const Common& k, std::uint32_t step, Op op) {
  const unsigned long long mine = 1ull << 32 | step;
  return atomicExch(&k.control->looked_after[set_of(k.c, step)][static_cast<int>(op)], mine) != mine;
}

// Until the header of the peer's block is there. kPieces: in an AllToAll in pieces.
template <bool kPieces = false>
__device__ inline bool wait_for_block(const Common& k, std::uint32_t step, Op op, Phase phase, std::uint32_t peer) {
  if (kCarrier) return wait_for_put<kPieces>(k, step, op, phase, peer);
  const char* const word = k.arrivals + k.heap.arrival_at(k.c, set_of(k.c, step), signal_of(op), peer);
  if (!has_relays(k) && op == Op::Weights) return wait<Match::Reached>(k, word, phase, step, peer);
  const std::uint64_t sooner = !has_relays(k) ? 0 : op == Op::Dispatch ? kNodesSooner : kBlocksSooner;
  return wait_and_count(k, word, phase, step, peer, nanoseconds(), sooner);
}

__device__ inline void pass_on(const Common& k, std::uint32_t step, Signal signal, std::uint32_t peer) {
  char* word = k.peers[k.c.rank] + k.heap.arrival_at(k.c, set_of(k.c, step), signal, peer);
  const std::uint64_t value = arrival_word(k.generation, step);
  fuzz_delay(k, value);
  store_release_here(word, value);
}

// The value that a failure says was seen: the step whose parts the word counts, or the one before if it is this one, of which some are missing.
__device__ inline std::uint64_t last_whole(const Common& k, std::uint64_t word, std::uint32_t step) {
  if (word == 0) return 0;
  const auto of = static_cast<std::uint32_t>(word);
  return arrival_word((k.generation & ~0xffffu) | static_cast<std::uint32_t>(word >> 48), of == step ? step - k.c.in_flight : of);
}

// The word of a peer's parts, in host memory or in this GPU's.
__device__ inline char* parts_word(const Common& k, char* memory, std::uint32_t step, Op op, std::uint32_t peer) {
  return memory + k.heap.count_at(k.c, k.heap.pieces, set_of(k.c, step), op, peer);
}

// Passes on what comes of the peer's block, after its header was checked, until all of it is there. tell(word) says how many leading parts
// are. One loop, in which the threads of a warp stay together: none waits for another one's peer.
template <typename Tell>
__device__ inline void pass_on_parts(const Common& k, std::uint32_t step, Op op, Phase phase, std::uint32_t peer, std::uint32_t rows,
                                     const Tell& tell) {
  const char* const word = kCarrier ? nullptr : parts_word(k, k.arrivals, step, op, peer);
  const std::uint32_t all = parts_of(k, op).count(rows);
  std::uint32_t there = 0;
  std::uint64_t now = 0;
  const auto seen = [&] { return kCarrier ? arrival_word(k.generation, step - k.c.in_flight) : last_whole(k, now, step); };
  keep_looking(k, word, phase, step, peer, seen, [&] {
    std::uint32_t came = there;
    if (kCarrier) {
      while (came < all && (came == 0 || later_part_landed(k, step, op, peer, came))) ++came;
      if (came < all) look_for_carrier_errors(k, step, phase);
    } else {
      now = load_acquire(word);
      came = pieces_in(now, k.generation, step);
    }
    if (came > there) {
      fuzz_delay(k, came);
      tell(pieces_word(k.generation, step, came));
      there = came;
    }
    return there >= all;
  });
}

[[maybe_unused]] static __device__ __noinline__ void pass_on_rows(const Common& k, std::uint32_t step, Op op, Phase phase,
                                                                 std::uint32_t peer, std::uint32_t rows) {
  char* const here = parts_word(k, k.peers[k.c.rank], step, op, peer);
  pass_on_parts(k, step, op, phase, peer, rows, [&](std::uint64_t word) { store_release_here(here, word); });
}

// Waits until the part of the peer's block that has a row was passed on. False: it will not come.
[[maybe_unused]] static __device__ __noinline__ bool row_was_passed_on(const Common& k, std::uint32_t step, Op op, Phase phase, std::uint32_t peer, std::uint32_t row) {
  const char* const word = parts_word(k, k.peers[k.c.rank], step, op, peer);
  const std::uint32_t wanted = parts_of(k, op).part_of(row) + 1;
  std::uint64_t now = 0;
  const bool good = keep_looking(k, word, phase, step, peer, [&] { return last_whole(k, now, step); }, [&] {
    now = load_acquire(word);
    return pieces_in(now, k.generation, step) >= wanted;
  });
  fuzz_delay(k, wanted);
  return good;
}

}  // namespace pplx::cuda
