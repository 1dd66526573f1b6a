// The layout of the two allocations that a handle keeps: the one buffer that a dispatch returns, and its plan.
#pragma once

#include "../../host/output_layout.h"
#include "../../protocol/pieces.h"
#include "../../protocol/replicas.h"

namespace pplx::cuda {

// First what the combine reads and all that is small, then the rows.
struct BufferLayout : OutputLayout {
  std::uint64_t step = 0, overflowed = 0, rows_begin = 0, many = 0, choices = 0, place = 0, weight = 0;   // see ReceivedView
  std::uint64_t rounds = 0;   // see PieceArguments
};

inline BufferLayout buffer_layout(const Config& c) {
  constexpr std::uint64_t align = 256;
  const bool compact = c.layout == LayoutKind::Compact;
  const std::uint64_t received = std::uint64_t{c.world} * max_rows_of_block(c);
  BufferLayout b{output_parts(c)};
  OutputPlacer placer(0, align);
  for (OutputPart* part : {&b.counts, &b.offsets, &b.num_rows}) placer.place(*part);
  b.step = placer.take(8);
  b.overflowed = placer.take(4);
  b.rows_begin = placer.take(4 * (c.world + 1));
  b.many = placer.take(8);
  if (most_rounds(c) != 0) b.rounds = placer.take(std::uint64_t{4} * c.world * (1 + most_rounds(c)));
  b.choices = placer.take(4 * received);
  b.place = placer.take(4 * received * (compact ? 1 : c.top_k));
  if (!compact) b.weight = placer.take(4 * received * c.top_k);
  for (OutputPart* part : {&b.src_rank, &b.src_token, &b.topk_ids, &b.weights, &b.topk_weights, &b.scale, &b.x}) placer.place(*part);
  b.bytes = placer.end();
  return b;
}

// Offsets of the parts of a PlanView.
constexpr std::uint64_t plan_rows_at(const Config& c) { return 4 * align_up(c.num_experts, 4); }
constexpr std::uint64_t plan_digest_at(const Config& c) { return plan_rows_at(c) + 4 * align_up(c.world, 4); }
constexpr std::uint64_t plan_rounds_at(const Config& c) { return plan_digest_at(c) + (c.replicas > 1 ? 16 : 0); }
constexpr std::uint64_t plan_weights_at(const Config& c) { return plan_rounds_at(c) + 4 * align_up(std::uint64_t{most_rounds(c)} * c.world, 4); }
constexpr std::uint64_t plan_bytes(const Config& c, std::uint64_t tokens) {
  return plan_weights_at(c) + 4 * 4 * align_up(tokens * c.top_k, 4);
}

}  // namespace pplx::cuda
