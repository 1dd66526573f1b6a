// A step's script, drawn from the seed: tokens, routing, weights, and how the step is used. It includes the expected result, the
// receiver and the place of each choice, written as plain loops over all ranks, without the library's plan.
#pragma once

#include <memory>
#include <vector>

#include "formats.h"
#include "random.h"
#include "../../src/protocol/block.h"

namespace pplx::sim {

// The wires that are simulated; a new one joins here and in quantise() of script.cpp.
inline constexpr Wire kWires[] = {Wire::Native, Wire::FP8, Wire::FP8_UE8M0, Wire::MXFP8};

// One rank's role in a step.
struct Role {
  std::uint32_t tokens = 0;
  std::uint32_t slice = 0, slices = 1;       // replicas: this rank sends every token t = slice mod slices
  std::vector<std::int32_t> ids;             // [tokens, top_k]
  std::vector<float> weights, late_weights;  // [tokens, top_k]
  std::vector<float> tail;                   // [tokens, top_k]: the number that each choice's expert attaches to its row
  std::vector<char> x;                       // [tokens, hidden]: of the dtype, or e4m3 codes when the caller quantised
  std::vector<char> scales;                  // if the caller quantised
  std::vector<char> payload;                 // [tokens]: the expected row: payload, then scales
  std::vector<float> seen;                   // [tokens, hidden]: the values that the experts read
  std::vector<char> before;                  // [tokens, hidden]: y before, when the sum is added to it
  std::vector<std::uint8_t> fits;            // [tokens, top_k]: the choice goes somewhere where there is room
};

inline bool sends(const Role& role, std::uint32_t token) { return token % role.slices == role.slice; }

struct Choice {
  std::uint32_t source = 0, token = 0, k = 0;
};

struct Step {
  std::uint32_t number = 0;                  // in its generation, from 0
  bool released = false, weighted = true, late = false, accumulate = false, unit_weights = false, keep_own = false,
       quantised = false;
  bool has_tail = false;
  bool same_plan = false;                    // as the step before
  bool overflows = false;                    // some rank's output is too small
  std::vector<Role> roles;                   // indexed by rank
  std::vector<std::uint16_t> nodes;          // indexed by rank: whose rows are added first
  // Indexed by destination: choices by expert, then (source, token, k); Compact: rows by (source, token), their first choices.
  std::vector<std::vector<std::vector<Choice>>> arrivals;
  std::uint32_t closed = 0;                  // how many ranks have closed it
};

// `alive`: the dead send nothing, and choices of their experts count as dropped. `before`: the step before, if there is one.
std::unique_ptr<Step> make_step(const Config& config, const std::vector<bool>& alive, std::uint32_t number, const Step* before,
                                std::uint64_t seed);

// The simulated expert: rotates a row's elements by the expert's number, and multiplies them by a power of two.
inline void expert_row(const float* row, std::uint32_t hidden, std::uint32_t expert, Dtype dtype, float* out) {
  const float factor = static_cast<float>(1 << expert % 3) * (expert % 2 == 0 ? 1.0f : -1.0f);
  for (std::uint32_t h = 0, from = expert % hidden; h < hidden; ++h) {
    out[h] = rounded_to(row[from] * factor, dtype);
    if (++from == hidden) from = 0;
  }
}

// Decodes a payload and its scales.
void decode_row(const Config& config, const char* payload, const char* scales, float* out);

// The combined output of a rank, [tokens, hidden] of the dtype.
std::vector<char> combined(const Config& config, const Step& step, std::uint32_t rank);

}  // namespace pplx::sim
