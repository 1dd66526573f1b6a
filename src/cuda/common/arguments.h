// The arguments of kernels: one plain struct per launch, and the memory of an AllToAll that only its kernels and its host touch.
//
// One launch is one dispatch or one combine (or a half of one). Every thread block has a share of two lists of units. Send units
// (common/step.cuh) never wait for one that receives, nor behind one: a thread block has warps for each. Receive units wait only for
// what a peer sends. What a replica finishes for others is claimed, and comes before all that waits for replicas.
//
// So one resident thread block suffices (docs/design.md, "Progress"). The step's number is in device memory: a launch that carried
// one would be wrong when a captured graph replays.
#pragma once

#include "../../host/counters.h"
#include "../../protocol/heap.h"
#include "../../protocol/notices.h"
#include "../../protocol/relay_layout.h"
#include "../../protocol/scale_strides.h"
#include "tuning.h"

namespace pplx::cuda {

inline constexpr std::uint32_t kMaxPeers = 64;  // a bit each in a token's mask of ranks
inline constexpr std::uint32_t kMostBlocks = 512;  // a launch's
inline constexpr std::uint32_t kMostExperts = 8192;  // all ranks': shared memory counts each
inline constexpr std::uint32_t kNone = 0xffffffffu;

// In place of an Op: shares of a large combine's rows for this node, where those for relays come first.
inline constexpr Op kNearSums = static_cast<Op>(kOps);

// Device memory, one per generation. That of an earlier generation stays as it was retired, for graphs that were captured then:
// their launches find a failure, so they send nothing and wait for nothing.
struct Control {
  unsigned long long step;  // number of the next dispatch (32) | its thread blocks that know it (32): see common/step.cuh
  std::uint32_t shares[kOps + 1][kMostBlocks];  // the step that took each share of send units last; the last ones are kNearSums
  std::uint32_t slices[kMaxInFlight];  // units claimed of what this replica finishes
  std::uint32_t reserved;
  unsigned long long failure;  // abort_word of the first failure: all stop waiting
  unsigned long long closed[kMaxInFlight];  // see closed_word
  // Blocks of remote peers, see remote/proxy.cuh. By set and op.
  unsigned long long looked_after[kMaxInFlight][kOps];  // 1 << 32 | the last step in which a thread block had taken its words over
  std::uint32_t stored[kMaxInFlight][kPieceOps][kMaxPeers][kMostParts];  // rows of each part of the block that is being written
  std::uint32_t parts[kMaxInFlight][kPieceOps][kMaxPeers];  // complete ones, a bit each, and kTelling
  std::uint64_t announced[kMaxInFlight][kOps][kMaxPeers];  // arrival_word of the last one that the proxy was told of
  std::uint64_t left[kMaxInFlight][kOps][kMaxPeers];  // that of the last one that was seen to have left
};
// The step that last took a set (32) | its combine has begun to receive (1) | thread blocks of it that have yet to end (31).
inline constexpr std::uint64_t kClosing = 1ull << 31;
constexpr std::uint64_t closed_word(std::uint32_t step) { return std::uint64_t{step} << 32; }
constexpr std::uint64_t taken_word(std::uint32_t step, std::uint32_t blocks) { return closed_word(step) | blocks; }
constexpr bool is_step_of(std::uint64_t word, std::uint32_t step) { return static_cast<std::uint32_t>(word >> 32) == step; }
constexpr bool is_open(std::uint64_t word, std::uint32_t step) { return is_step_of(word, step) && (word & (kClosing - 1)) != 0; }
// True if a thread block of this step's dispatch may take the set: another one may have been here before.
constexpr bool may_take(const Config& c, std::uint64_t word, std::uint32_t step) {
  return is_step_of(word, step) || (is_step_of(word, step - c.in_flight) && !is_open(word, step - c.in_flight));
}
constexpr bool is_closing(const Config& c, std::uint64_t word, std::uint32_t step) {
  return is_step_of(word, step - c.in_flight) && (word & kClosing) != 0;
}

// Pinned host memory: how kernels and host tell each other what went wrong, without a call that could synchronise.
struct Report {
  std::uint64_t abort;  // host to kernels, abort_word
  std::uint64_t left;  // host to kernels: peers that closed their Communicator, a bit each; what they sent is there
  std::uint64_t busy;  // host to kernels: peers that say that they come later, a bit each; no peer is blamed meanwhile
  std::uint64_t failure;  // kernels to host, abort_word; written last
  std::uint64_t expected, seen;  // that failure's
  Notices notices;  // kernels to host
};

// In a Report's `expected`, beside the flags that a combine's header must have: `seen` are those that it has.
inline constexpr std::uint64_t kFlags = 1ull << 63;
inline constexpr std::uint32_t kFlagsAlike = kReleased | kUsesWeights | kHasTail;  // on all ranks of a step
// The same for how many tokens replicas passed; where that is equal, their ids differ.
inline constexpr std::uint64_t kTokens = 1ull << 62;

// Bits of `expected` for blocks in pieces: it has the round; kToBeRead: the peer must read it, else send it.
inline constexpr std::uint64_t kRound = 1ull << 60, kToBeRead = 1ull << 59;

// Division by a number that stays the same, for small dividends: dividend * divisor below 2^32.
struct Divider {
  std::uint64_t magic = 0;
  constexpr Divider() = default;
  constexpr explicit Divider(std::uint32_t divisor) : magic(((1ull << 32) + divisor - 1) / divisor) {}
  constexpr std::uint32_t divide(std::uint32_t dividend) const { return static_cast<std::uint32_t>(dividend * magic >> 32); }
};

// A thread block's shared memory: an object comes first, and what the launch asked for begins at a line behind it.
template <typename T>
inline constexpr std::size_t kBytesOfObject = align_up(sizeof(T), kLine);

// Puts of a carrier that kernels drive (remote/carrier.cuh), in device memory: by set, op, part and peer, anew in each generation.
struct PutCounts {
  std::uint64_t base[kMaxInFlight][kOps][kMostParts][kMaxPeers];    // this rank's signals at that time
  std::uint64_t turns[kMaxInFlight][kOps][kMostParts][kMaxPeers];   // that were heard of since
  std::uint64_t posted[kMaxInFlight][kOps][kMostParts][kMaxPeers];  // puts for the peer
};

// When the halves of a step began and ended in the first thread block, by the GPU's clock. The latest steps are kept, by number: a half
// that began before the first one is an older step's, and one that ended before it began has not ended.
inline constexpr std::uint32_t kHalves = 4, kKeptSteps = 4096;
constexpr std::uint32_t half_of(Op op, bool sends) { return (op == Op::Dispatch ? 0 : 2) + (sends ? 0 : 1); }
struct KeptStep {
  std::uint64_t number, begun[kHalves], ended[kHalves];
  bool has_begun(std::uint32_t half) const { return begun[0] != 0 && begun[half] >= begun[0]; }
  bool has_ended(std::uint32_t half) const { return has_begun(half) && ended[half] >= begun[half]; }
};

// The counts of kernels, replays among them: device memory, one of an AllToAll. Rows of each local expert follow.
struct DeviceCounters {
  struct Rows {
    unsigned long long sent, received;
  };
  unsigned long long steps, tokens;
  Rows dispatched[kMaxPeers], combined[kMaxPeers];
  unsigned long long waited[kAwaited][kMaxPeers];                 // nanoseconds: sums over steps
  unsigned long long times[kTimed][kTimeBuckets], nanoseconds[kTimed];
  unsigned long long large[kAwaited];                             // launches, halves too
  std::uint64_t made;                                             // when the AllToAll was, by the GPU's clock
};

// Common to all launches of an AllToAll.
struct Common {
  Config c;
  Heap heap;
  BlockLayout dispatch, combine, weights;
  Divider per_rank;  // experts_per_rank
  Divider top_k;
  std::uint32_t experts = 0, experts_per_rank = 0;  // local ones; of any rank but the last that has some
  std::uint32_t expert_vec16s = 0;  // a source's counts, in vec16s
  std::uint32_t align_mask = 0;  // Ragged: align - 1 if that is a power of two, else kNone
  std::uint32_t group_shift = 0;  // log2 of the lanes that have a token's choices
  std::uint32_t showing_rows = 0;  // the first rows of a dispatch block, which show that they came
  std::uint32_t payload_bytes = 0, parts = 0, part_bytes = 0;  // a dispatch row's; a warp takes a part
  Divider by_parts;
  std::uint32_t scale_vec16s = 0;  // a dispatch row's
  bool scales_in_pieces = false;  // they lie in the output as they came
  std::uint32_t row_bytes = 0;  // a combine row's
  std::uint32_t most_rows = 0;  // a block's
  std::uint32_t word_rows = kNone;  // combine: rows for a rank of at least that number of tokens have arrival words
  Slice slice;  // the tokens that this rank sends, and finishes
  std::uint64_t replicas = 0;  // the others that live and hold the same tokens, a bit each
  std::uint32_t living = 0;
  std::uint32_t combine_blocks = 0;  // thread blocks of each combine
  std::uint8_t order[kMaxPeers] = {};  // the living: remote ones, then those of the node; of each, rank + 1 first, oneself last
  std::uint64_t dead = 0;  // the others, a bit each: left out at a reset
  std::uint64_t remote = 0;  // peers of other nodes, dead ones included, a bit each
  char* host = nullptr;  // pinned memory, laid out like `heap`: the words of what the proxy moves
  char* arrivals = nullptr;  // the same for the words that the proxy raises: there, or in this GPU's memory
  char* blocks = nullptr;  // the same for its blocks: there, or in this GPU's memory
#ifdef PPLX_CARRIER
  std::uint32_t pe[kMaxPeers] = {};  // as the carrier numbers the ranks
  std::uint8_t slot_at[kMaxPeers] = {};  // number of this rank's slots at remote peers, by rank
  PutCounts* puts = nullptr;
#endif
  std::uint32_t generation = 1;
  std::uint64_t timeout_ns = 0;
  char* peers[kMaxPeers] = {};  // heaps by rank; those of the dead are not touched, of remote ones there is none
  Control* control = nullptr;
  Report* report = nullptr;
  PartSizes dispatch_parts, combine_parts;  // blocks for other nodes have them
  DeviceCounters* counters = nullptr;  // none: nothing is counted
  KeptStep* kept = nullptr;  // [step mod kKeptSteps], where it is counted
  std::uint64_t rails = 0;  // remote peers that have slots here: with relays not all have
#ifdef PPLX_CUDA_STAGES
  std::uint64_t* stages = nullptr;  // [stage_steps][kStagesOfStep][stage_warps], then [kSpanNames][stage_warps]
  std::uint32_t stage_steps = 1, stage_warps = 0;
#endif
#ifdef PPLX_CUDA_FUZZ
  std::uint64_t fuzz_seed = 1;
#endif
};

// A step's plan, kept by the handle. In this order in one allocation. `own`: the tokens of this rank's slice, without replicas all.
struct PlanView {
  std::uint32_t* counts = nullptr;  // [num_experts]
  std::uint32_t* rows = nullptr;  // [world]
  std::uint64_t* ids_digest = nullptr;  // with replicas
  float* weights = nullptr;  // [tokens, top_k], where the dispatch was given any: for further ones
  std::int32_t* ids = nullptr;  // [own, top_k], -1 where the choice goes nowhere
  std::uint32_t* index = nullptr;  // [own, top_k]: of this choice among those that go to its expert
  std::uint32_t* token_rows = nullptr;  // [own, top_k]: rank << 20 | row, ranks ascending, then kNone
};

// How thread blocks plan a dispatch of many tokens together. Device memory; launches that send run one after the other. The last
// thread block to leave makes all of the first five 0 again.
struct ChunkCounts {
  std::uint32_t* next = nullptr;  // stretch that is sent next
  std::uint32_t* counted = nullptr;  // chunks
  std::uint32_t* left = nullptr;  // thread blocks
  std::uint32_t* received = nullptr;  // units of what comes that some warp has begun; in rounds chunks that are sent
  std::uint32_t* totals = nullptr;  // [kTotals][columns], of all tokens together
  std::uint32_t* taken = nullptr;  // [chunks]: the step in which a warp last counted it
  std::uint64_t* ready = nullptr;  // [chunks]: arrival_word of the last step whose counts are there
  std::uint16_t* counts = nullptr;  // [chunks][columns]
};
// Choices by expert, then rows by rank, in vec16s.
constexpr std::uint32_t chunk_columns(const Config& c) { return static_cast<std::uint32_t>(align_up(c.num_experts + c.world, 8)); }

// Counts of an AllToAll in pieces, by set, in device memory: work that warps have claimed, of all thread blocks in one order, and
// done units of each round. The receive half of a dispatch zeroes those of combines, a combine those of the dispatch.
enum class Claim : std::uint32_t { DispatchRecv, CombineSend, CombineRest, CombineRecv };
inline constexpr std::uint32_t kClaims = 4;
constexpr std::uint32_t round_counts(std::uint32_t most) { return kClaims + kPieceOps * most; }

// Words of an AllToAll in pieces for peers of other nodes (rounds/remote.cuh), each a pieces_word(): device memory.
enum class RemoteWord : std::uint32_t { Told, Landed, Room };
inline constexpr std::uint32_t kRemoteWords = 3;
struct RemoteRounds {
  std::uint64_t* words = nullptr;  // [kRemoteWords][in_flight][kPieceOps][world]
  std::uint32_t* stored = nullptr;  // [in_flight][kPieceOps][kPlaces][world]: rows stored of the round in that place
};
constexpr std::uint64_t remote_rounds_words(const Config& c) { return std::uint64_t{c.in_flight} * kPieceOps * c.world; }

// The arguments of an AllToAll in pieces: protocol/pieces.h.
struct PieceArguments {
  std::uint32_t tokens = 0;  // each rank's, in a round
  std::uint32_t most = 0;  // rounds
  std::uint32_t begin = 0, end = kNone;  // rounds that this launch sends
  bool begins = true;  // the step, or its combine: plans and tells counts, or sends headers and weights
  std::uint32_t chunks = 0, end_chunk = 0;  // dispatch: of a round; how many are sent, by this launch and the one before it
  std::uint32_t* begin_rows = nullptr;  // [most][world], of the plan: rows of earlier rounds
  std::uint32_t* counts = nullptr;  // [in_flight][round_counts]
  std::uint32_t* kept = nullptr;  // [world][1 + most], of the handle: rounds of each source, and its rows before each
  RemoteRounds remote;  // none where all peers are of this node
};

// The rows that a rank received, those of all sources back to back, and where each choice went. The handle keeps them.
struct ReceivedView {
  std::uint32_t* step = nullptr;
  std::uint32_t* overflowed = nullptr;
  std::uint32_t* rows_begin = nullptr;  // [world + 1], by source
  std::uint64_t* many = nullptr;  // sources whose rows of combine have arrival words (word_rows), a bit each
  std::uint32_t* choices = nullptr;  // [rows]: a bit per k, as in the route
  std::uint32_t* out_row = nullptr;  // [rows, top_k]: each choice's, or kNone; Compact: [rows]
  float* weight = nullptr;  // [rows, top_k]; not Compact
};

struct Output {
  char* x = nullptr;
  char* scales = nullptr;
  ScaleStrides scale;
  std::int32_t* counts = nullptr;
  std::int32_t* offsets = nullptr;
  float* weights = nullptr;
  std::int32_t* src_rank = nullptr;
  std::int32_t* src_token = nullptr;
  std::int32_t* topk_ids = nullptr;
  float* topk_weights = nullptr;
  std::int32_t* num_rows = nullptr;
};

// The words of a dispatch's hooks, where the caller has any. A row counts as row_units, each of its parts as one.
struct DispatchHooks {
  std::uint32_t* planned = nullptr;
  std::uint32_t* arrived = nullptr;  // [words]
  std::uint32_t words = 0;
  std::uint32_t row_units = 1;
};

// Inputs of a dispatch from its caller.
struct Tokens {
  const char* x = nullptr;
  std::uint64_t x_stride = 0;  // bytes; rows start at multiples of 16
  const char* scales = nullptr;  // x's, when the caller quantised
  ScaleStrides scale;
  const void* ids = nullptr;  // null: the plan is given
  bool wide_ids = false;  // int64
  bool unread = false;  // the rows are not read on any rank: of each only a beginning travels
  std::uint32_t tokens = 0;
  const float* weights = nullptr;  // [tokens, top_k]; null: ones
  std::int32_t* totals = nullptr;  // [local experts]: their counts are added, where the caller has any
};

// With node_ranks: the ranks to which rows go, and where relays are. Mates are known by their numbers on the node.
struct Relays {
  std::uint8_t rep[kMaxPeers] = {};  // where rows for a rank go: without relays to itself
  std::uint8_t number[kMaxPeers] = {};  // a rank's, on its node
  std::uint8_t holder[kMaxPeers] = {};  // a source's relay on this node
  std::uint8_t nth[kMaxPeers] = {};  // a source's number among those of its relay
  std::uint8_t slot[kMaxPeers] = {};  // and among all peers that have slots there
  std::uint8_t rank[kMaxNodeRanks] = {};  // a mate's
  std::uint32_t mates = 0;  // the living, a bit each
  std::uint64_t sources = 0;  // ranks whose relay this one is, a bit each
  std::uint64_t skipped = 0;  // living remote ranks to which this one sends nothing, a bit each
  char* blocks[kMaxNodeRanks] = {};  // a mate's Common::blocks
  char* areas[kMaxNodeRanks] = {};  // a mate's
  BlockLayout answer;  // answers have it; without combine_fp8 it is Common::combine
  RelayLayout layout;  // this rank's; all have the rows and blocks at the same place
};

// First in all arguments.
struct LaunchArguments {
  Common common;
};

struct DispatchArguments : LaunchArguments, Tokens {
  bool send = true, recv = true;
  std::uint32_t own = 0;  // tokens that this rank sends
  std::uint32_t tokens_per_unit = 1, units = 1;  // that send
  PlanView plan;
  ReceivedView received;
  Output out;
  std::uint32_t tokens_per_chunk = 0, chunks = 0;
  std::uint32_t stretches = 0;  // runs of chunks, one for each thread block that sends
  std::uint32_t under_way = 0;  // tokens of such a thread block that peers need not have been told of
  ChunkCounts chunk_counts;
  DispatchHooks hooks;
  PieceArguments pieces;
  Relays relays;
};

// How a combine row is sent, or received by a warp: in strips, and in large steps sent in runs of them.
struct Strips {
  int vectors = kSentVectors;  // a lane's, in a strip
  std::uint32_t together = 0, strips = 0, runs = 0;  // strips of a run, and of a row
  Divider by_strips, by_runs;

  constexpr std::uint32_t bytes() const { return vectors * 512; }

  Strips() = default;
  Strips(std::uint32_t row_bytes, int vectors, std::uint32_t together = kStripsTogether)
      : vectors(vectors),
        together(together),
        strips(ceil_div(row_bytes, bytes())),
        runs(ceil_div(strips, together)),
        by_strips(strips),
        by_runs(runs) {}
};

// Inputs of a combine from its caller, and where the result goes.
struct ExpertOutputs {
  const char* expert_out = nullptr;
  std::uint64_t expert_stride = 0;  // bytes; rows start at multiples of 16
  std::uint64_t expert_rows = 0;
  bool weighted = true, uses_weights = false, release = false;
  const float* weights = nullptr;  // [tokens, top_k], when uses_weights
  const std::uint32_t* tail = nullptr;  // [tail_rows], Compact [tail_rows, top_k]
  std::uint64_t tail_rows = 0;
};
struct Result {
  std::uint32_t tokens = 0;
  bool accumulate = false;
  bool has_tail = false;  // tails are bits, not numbers: a NaN stays the one that it is
  char* y = nullptr;
  std::uint64_t y_stride = 0;  // bytes
  std::uint32_t* tail_out = nullptr;  // [tokens, top_k]
};

struct CombineArguments : LaunchArguments, ExpertOutputs, Result {
  Strips sent, received_in;
  bool sums_own = false;  // large steps: a warp that receives a token sums this rank's own rows of it
  bool send = true, recv = true;
  std::uint32_t own = 0;
  PlanView plan;
  ReceivedView received;
  const std::int32_t* counts = nullptr;  // rows of each local expert
  PieceArguments pieces;
  bool by_node = false;  // the rows of a node's ranks are added first: protocol/nodes.h
  std::uint16_t node_of[kMaxPeers] = {};  // then: by rank
  std::uint32_t rows_ahead = 0;  // rows so likely that they are loaded before it is known whether they are there
  Relays relays;
};

}  // namespace pplx::cuda
