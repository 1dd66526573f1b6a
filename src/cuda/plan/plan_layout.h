// Offsets of the parts of a PlanView in its one allocation.
#pragma once

#include "../../protocol/pieces.h"

namespace pplx::cuda {

constexpr std::uint64_t plan_rows_at(const Config& c) { return 4 * align_up(c.num_experts, 4); }
constexpr std::uint64_t plan_digest_at(const Config& c) { return plan_rows_at(c) + 4 * align_up(c.world, 4); }
constexpr std::uint64_t plan_rounds_at(const Config& c) { return plan_digest_at(c) + (c.replicas > 1 ? 16 : 0); }
constexpr std::uint64_t plan_weights_at(const Config& c) { return plan_rounds_at(c) + 4 * align_up(std::uint64_t{most_rounds(c)} * c.world, 4); }
constexpr std::uint64_t plan_bytes(const Config& c, std::uint64_t tokens) {
  return plan_weights_at(c) + 4 * 4 * align_up(tokens * c.top_k, 4);
}

}  // namespace pplx::cuda
