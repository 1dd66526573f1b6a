// The inputs and outputs of the four phases.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../host/output_layout.h"
#include "../protocol/hooks.h"
#include "../protocol/plan.h"
#include "../protocol/scale_strides.h"

namespace pplx::cpu {

// Rows of a caller's tensor.
struct Rows {
  const char* data = nullptr;
  std::uint64_t stride = 0;    // bytes
};

struct Tokens {
  std::shared_ptr<const Plan> plan;
  Rows x;                               // dtype, or e4m3 when scales are given
  const char* scales = nullptr;         // scales of x, when the caller quantised: floats, or e8m0 bytes on MXFP8
  ScaleStrides scale;
  const float* weights = nullptr;       // [tokens, top_k], contiguous; null: ones
  bool keep_own_rows = false;           // x stays unchanged until dispatch_recv has returned: own rows need no copy
};

// The outputs of dispatch_recv. Sizes follow from the configuration.
struct DispatchOutput {
  char* x = nullptr;
  char* scales = nullptr;
  ScaleStrides scale;
  std::int32_t* counts = nullptr;        // [local experts]
  std::int32_t* offsets = nullptr;       // [local experts + 1]; Ragged
  float* weights = nullptr;              // [rows]; Ragged, Padded
  std::int32_t* src_rank = nullptr;      // [rows]
  std::int32_t* src_token = nullptr;     // [rows]
  std::int32_t* topk_ids = nullptr;      // [rows, top_k]; Compact
  float* topk_weights = nullptr;         // [rows, top_k]; Compact
  std::int32_t* num_rows = nullptr;      // [1]; Compact
  std::uint32_t* hooks = nullptr;        // see protocol/hooks.h; none: without
};

// The memory that the caller gives for it: see cpu_output_layout().
struct Outputs {
  char* x = nullptr;
  char* scales = nullptr;                // none on the native wire
  char* small = nullptr;                 // all the rest
  std::uint32_t* hooks = nullptr;        // zeroes: see protocol/hooks.h; none: without
};

inline DispatchOutput dispatch_output(const OutputLayout& layout, ScaleStrides scale, const Outputs& outputs) {
  const auto at = [&](const OutputPart& part) { return part.exists() ? outputs.small + part.at : nullptr; };
  const auto integers = [&](const OutputPart& part) { return reinterpret_cast<std::int32_t*>(at(part)); };
  const auto floats = [&](const OutputPart& part) { return reinterpret_cast<float*>(at(part)); };
  DispatchOutput out;
  out.x = outputs.x;
  out.scales = outputs.scales;
  out.scale = scale;
  out.counts = integers(layout.counts);
  out.offsets = integers(layout.offsets);
  out.weights = floats(layout.weights);
  out.src_rank = integers(layout.src_rank);
  out.src_token = integers(layout.src_token);
  out.topk_ids = integers(layout.topk_ids);
  out.topk_weights = floats(layout.topk_weights);
  out.num_rows = integers(layout.num_rows);
  out.hooks = outputs.hooks;
  return out;
}

// The place of every choice of every received row. The handle keeps it for the combine.
struct Received {
  static constexpr std::uint32_t kNowhere = 0xffffffffu;   // the output buffer was too small for it

  std::uint32_t generation = 0;
  std::uint32_t top_k = 0;
  std::vector<std::uint32_t> rows_begin;    // [world + 1], by source
  std::vector<std::uint16_t> choices;       // [rows]: a bit per k, as in the route
  std::vector<std::uint32_t> place;         // [rows, top_k]: output row of each choice; Compact: one a row
  std::vector<float> weight;                // [rows, top_k]
  std::vector<std::uint32_t> row_of_node;   // [rows], with node_ranks: their numbers in the block for this node
  std::vector<std::uint32_t> rows_of_block;   // [world], with node_ranks: rows of another node's rank in its block for this node
  std::vector<std::vector<std::uint32_t>> masks;   // row masks of each source that this rank relays
  std::uint64_t needed_rows = 0;            // the rows that the output had to hold
  bool overflowed = false;

  std::uint32_t rows(std::uint32_t source) const { return rows_begin[source + 1] - rows_begin[source]; }
};

struct ExpertOutputs {
  std::shared_ptr<const Received> received;
  Rows expert_out;
  bool weighted = true;
  bool uses_weights = false;                      // `weights` overrides the dispatch's; the same on every rank of a step
  const float* weights = nullptr;                 // [tokens, top_k] of this rank's own tokens; null when there are none
  std::shared_ptr<const Plan> plan;               // the dispatch of the same step, for weights
  bool has_tail = false;                          // the same on every rank of a step
  const float* tail = nullptr;                    // [output rows], Compact [output rows, top_k]; contiguous
  bool release = false;
};

struct Result {
  char* y = nullptr;
  std::uint64_t stride = 0;    // bytes
  bool accumulate = false;
  float* tail = nullptr;       // [tokens, top_k]: the numbers behind the rows; 0 for a choice that went nowhere
};

}  // namespace pplx::cpu
