// combine(tail=): a float for each choice rides behind its row.
#pragma once

#include "replicas.cuh"

namespace pplx::cuda {

// The floats of a row's choices, each at its k, so that the token's rank need not know what else lives here.
__device__ inline void write_tail(const CombineArguments& a, std::uint32_t choices, std::uint32_t place, char* to) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const bool compact = k.c.layout == LayoutKind::Compact;
  const std::uint32_t from = __shfl_sync(~0u, place, compact ? 0 : __popc(choices & ((1u << lane) - 1)));
  if ((choices >> lane & 1) == 0) return;
  const bool here = from != kNone && from < a.tail_rows;
  if (from != kNone && !here) k.report->notices.short_output = 1;
  reinterpret_cast<std::uint32_t*>(to)[lane] = here ? a.tail[compact ? std::uint64_t{from} * k.c.top_k + lane : from] : 0;
}

// The floats that came behind a token's rows, 0 for choices that went nowhere. `lanes` have a row and its rank each.
template <bool kGives>
__device__ inline void take_tail(const CombineArguments& a, std::uint32_t step, std::uint32_t own, std::uint32_t lanes, const char* row,
                                 std::uint32_t rank) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::int32_t id = lane < k.c.top_k ? a.plan.ids[std::uint64_t{own} * k.c.top_k + lane] : -1;
  const std::uint32_t wanted = id < 0 ? kNone : a.relays.rep[k.per_rank.divide(static_cast<std::uint32_t>(id))];
  std::uint32_t value = 0;
  for (; lanes != 0; lanes &= lanes - 1) {
    const int of = __ffs(static_cast<int>(lanes)) - 1;
    const std::uint32_t from = __shfl_sync(~0u, rank, of);
    const auto* its_row = of_lane(row, of);
    const std::uint32_t tail_at = (is_remote(k, from) ? a.relays.answer : k.combine).tail_at;
    if (from == wanted) value = __ldcg(reinterpret_cast<const std::uint32_t*>(its_row + tail_at) + lane);
  }
  if (lane < k.c.top_k) a.tail_out[std::uint64_t{k.slice.token(own)} * k.c.top_k + lane] = value;
  if (kGives) give_tail(k, step, own, value);
}

}  // namespace pplx::cuda
