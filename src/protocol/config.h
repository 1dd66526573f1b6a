// The configuration of one AllToAll: the plain struct that crosses from Python to C++ to the kernels, and the arithmetic on it:
// sizes, experts and ranks, steps, slices. Every function here is constexpr, so host and device share it.
#pragma once

#include <cstddef>
#include <cstdint>

// Marks a function that is no constexpr and runs on both sides, such as a template on the atomics of host or device.
#ifdef __CUDACC__
#define PPLX_BOTH __host__ __device__
#else
#define PPLX_BOTH
#endif

namespace pplx {

enum class Dtype : std::uint8_t { BFloat16, Float16, Float32 };
enum class Wire : std::uint8_t { Native, FP8, FP8_UE8M0, MXFP8 };
enum class LayoutKind : std::uint8_t { Ragged, Padded, Compact };

inline constexpr std::uint32_t kMaxRanks = 1024;        // 10 bits of the immediate
inline constexpr std::uint32_t kMaxObjects = 8;         // 3 bits of the immediate
inline constexpr std::uint32_t kMaxTopK = 16;           // one bit a choice in a row's route
inline constexpr std::uint32_t kMaxLocalExperts = 4096; // 12 bits of a route entry
inline constexpr std::uint32_t kMaxNodeRanks = 32;      // one bit a rank in a row's mask
inline constexpr std::uint32_t kMaxChoices = 1u << 20;  // a rank's in a step, all of which may name one expert: 20 bits of a route entry
inline constexpr std::uint32_t kMaxInFlight = 8;

struct Config {
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  std::uint32_t num_experts = 1;
  std::uint32_t top_k = 1;
  std::uint32_t hidden = 16;           // elements
  std::uint32_t max_tokens = 1;        // per rank and step
  std::uint32_t replicas = 1;          // ranks in a row that hold the same tokens
  std::uint32_t in_flight = 1;         // a power of two, so that the set of a step survives the wrap of step numbers
  std::uint32_t align = 1;             // Ragged: every expert's segment starts at a multiple of it
  std::uint32_t max_rows = 0;          // Ragged, Compact: rows of the output
  std::uint32_t max_per_expert = 0;    // Padded: rows of one expert in the output
  std::uint64_t slot_bytes = 0;        // the most for dispatch and combine blocks of a set; beyond it blocks go in pieces. 0: no limit
  std::uint32_t whole_tokens = 256;    // steps of up to this number of tokens a rank never go in pieces
  std::uint32_t part_bytes = 0;        // on GPUs: blocks for other nodes leave in parts that are not smaller, but for the last. 0: whole
  std::uint32_t remote_peers = 0;      // how many peers the proxy carries to (sizes the send area only)
  std::uint32_t mapped_first = 0, mapped_slots = 0;   // on GPUs: ranks of one node, and some between. 0 slots: all ranks
  std::uint32_t remote_slots = 0;      // on GPUs: the most peers of any rank that have slots there, as remote_peers. 0: all ranks
  bool combine_fp8 = false;            // with node_ranks: what relays answer travels as e4m3, a float scale per 128 elements
  std::uint32_t node_ranks = 0;        // rows for other nodes go once to each: the most ranks of a node. 0: to each rank
  bool on_gpu = false;                 // kernels write rows before all are counted, and routes in pieces that show whose they are
  std::uint32_t first_step = 1;
  std::uint32_t object = 0;            // number among the Communicator's AllToAlls, for the immediate
  Dtype dtype = Dtype::BFloat16;
  Wire wire = Wire::Native;
  LayoutKind layout = LayoutKind::Ragged;
  bool zero_pad = false;               // Ragged: zero the rows between segments
  bool scale_tma = false;              // scales column-major, columns 16-byte aligned
};

constexpr std::uint32_t ceil_div(std::uint32_t a, std::uint32_t b) { return (a + b - 1) / b; }
constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t to) { return (value + to - 1) / to * to; }

// The most rows of a block: replicas send a part of their tokens each.
constexpr std::uint32_t max_rows_of_block(const Config& c) { return ceil_div(c.max_tokens, c.replicas); }

constexpr std::uint32_t dtype_bytes(Dtype dtype) { return dtype == Dtype::Float32 ? 4 : 2; }

// Experts are dealt in equal runs; the last ranks may own fewer, or none.
constexpr std::uint32_t experts_per_rank(const Config& c) { return ceil_div(c.num_experts, c.world); }
constexpr std::uint32_t rank_of_expert(const Config& c, std::uint32_t expert) { return expert / experts_per_rank(c); }
constexpr std::uint32_t first_expert(const Config& c, std::uint32_t rank) { return rank * experts_per_rank(c); }
constexpr std::uint32_t local_experts(const Config& c, std::uint32_t rank) {
  const std::uint32_t first = first_expert(c, rank);
  if (first >= c.num_experts) return 0;
  const std::uint32_t left = c.num_experts - first;
  return left < experts_per_rank(c) ? left : experts_per_rank(c);
}

// A rank's experts stand in a block for its node at its number there; in others at 0.
constexpr std::uint32_t experts_of_block(const Config& c) { return experts_per_rank(c) * (c.node_ranks == 0 ? 1 : c.node_ranks); }

// Blocks for and of other nodes lie apart from the heap: nodes.h. The heap then has slots for ranks of the node, by number there.
constexpr bool rails_apart(const Config& c) { return c.node_ranks != 0 && !c.on_gpu; }

// ---- steps: 32 bits that wrap, compared by signed difference ----

constexpr std::int32_t step_difference(std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b); }
constexpr bool step_reached(std::uint32_t seen, std::uint32_t wanted) { return step_difference(seen, wanted) >= 0; }

// in_flight is a power of two, so consecutive steps take the sets in turn, across the wrap too.
constexpr std::uint32_t set_of(const Config& c, std::uint32_t step) { return step & (c.in_flight - 1); }

// The first step that uses `set`.
constexpr std::uint32_t first_step_of_set(const Config& c, std::uint32_t set) {
  return c.first_step + ((set - set_of(c, c.first_step)) & (c.in_flight - 1));
}

// ---- slices: each of several replicas sends those tokens t for which t mod `of` is `number` ----

struct Slice {
  std::uint32_t number = 0, of = 1;

  constexpr bool has(std::uint32_t token) const { return token % of == number; }
  constexpr std::uint32_t tokens(std::uint32_t all) const { return (all + of - 1 - number) / of; }
  constexpr std::uint32_t token(std::uint32_t i) const { return number + i * of; }
};

// Null if the configuration can work, else what is wrong with it. Python checks first and says more; this is the last line.
constexpr const char* invalid(const Config& c) {
  if (c.world < 1 || c.world > kMaxRanks) return "world size must be 1 to 1024";
  if (c.rank >= c.world) return "rank must be below the world size";
  if (c.num_experts < 1) return "num_experts must be at least 1";
  if (experts_per_rank(c) > kMaxLocalExperts) return "at most 4096 experts per rank";
  if (c.top_k < 1 || c.top_k > kMaxTopK) return "top_k must be 1 to 16";
  if (c.hidden < 1 || (std::uint64_t{c.hidden} * dtype_bytes(c.dtype)) % 16 != 0)
    return "hidden must be a multiple of 16 bytes";
  if (c.max_tokens < 1 || std::uint64_t{c.max_tokens} * c.top_k > kMaxChoices)
    return "max_tokens_per_rank * top_k must be 1 to 1048576";
  if (c.replicas < 1 || c.world % c.replicas != 0) return "replicas must divide the world size";
  if (c.node_ranks > kMaxNodeRanks) return "at most 32 ranks of a node";
  if (experts_of_block(c) > kMaxLocalExperts) return "at most 4096 experts per node";
  if (c.in_flight < 1 || c.in_flight > kMaxInFlight || (c.in_flight & (c.in_flight - 1)) != 0)
    return "in_flight must be 1, 2, 4 or 8";
  if (c.align < 1) return "align must be at least 1";
  if (c.object >= kMaxObjects) return "at most 8 live AllToAlls per Communicator";
  return nullptr;
}

}  // namespace pplx
