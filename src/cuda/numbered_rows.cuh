// The plan of a dispatch of many tokens whose outputs are Compact, of few ranks. A row's place there is its number among all rows of its source,
// so of earlier tokens nothing counts but how many of them go to each rank. Each thread block finds that out by itself, from the ids, and no
// row waits for what others count. How many choices each expert has is for the callers alone: it is counted beside all that.
#pragma once

#include "many_plan.cuh"

namespace pplx::cuda {

// By one of `warps` warps: adds to rows[r] how many of the tokens [begin, end) go to rank r. A lane has a choice, kAtOnce are asked for at once.
// kShift: a token has so many bits of the lane; 0: as many as top_k needs. What is bad or for the dead is no row.
template <std::uint32_t kAtOnce, std::uint32_t kShift = 0>
__device__ inline void count_rows_of_ranks(const DispatchArguments& a, std::uint32_t begin, std::uint32_t end, std::uint32_t warp, std::uint32_t warps,
                                           std::uint32_t* rows) {
  constexpr std::uint32_t kBitsToBytes = 0x204081u;  // of four bits
  static_assert(kMostNumberedRanks == 8 && kAtOnce < 256);
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  std::uint32_t shift = kShift;
  while (kShift == 0 && 1u << shift < k.c.top_k) ++shift;
  const std::uint32_t choice = lane & ((1u << shift) - 1), together = 32 >> shift, width = a.wide_ids ? 8 : 4, step = together * k.c.top_k * width;
  const bool has_choice = choice < k.c.top_k;
  std::uint32_t sums[kMostNumberedRanks / 2] = {};  // half a word for each rank
#pragma unroll 1
  for (std::uint32_t first = begin + warp * kAtOnce * together; first < end; first += warps * kAtOnce * together) {
    const std::uint32_t token = first + (lane >> shift);
    const char* from = static_cast<const char*>(a.ids) + (std::uint64_t{token} * k.c.top_k + choice) * width;
    RawId ids[kAtOnce];
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i, from += step) {
      if (!has_choice || token + i * together >= end) continue;
      if (a.wide_ids) {
        const uint2 both = *reinterpret_cast<const uint2*>(from);
        ids[i].low = both.x;
        ids[i].high = both.y;
      } else {
        ids[i].low = *reinterpret_cast<const std::uint32_t*>(from);
      }
    }
    std::uint32_t low = 0, high = 0;  // a byte for each rank
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      const bool good = ids[i].low < k.c.num_experts && (!a.wide_ids || ids[i].high == 0);
      std::uint32_t ranks = good ? 1u << k.per_rank.divide(ids[i].low) : 0;
#pragma unroll
      for (std::uint32_t s = 1; s < 1u << kShift; s *= 2) ranks |= __shfl_xor_sync(~0u, ranks, static_cast<int>(s));
#pragma unroll 1
      for (std::uint32_t s = 1; kShift == 0 && s >> shift == 0; s *= 2) ranks |= __shfl_xor_sync(~0u, ranks, static_cast<int>(s));
      low += (ranks & 15) * kBitsToBytes & 0x01010101u;
      high += (ranks >> 4) * kBitsToBytes & 0x01010101u;
    }
    sums[0] += low & 0xff00ffu;
    sums[1] += low >> 8 & 0xff00ffu;
    sums[2] += high & 0xff00ffu;
    sums[3] += high >> 8 & 0xff00ffu;
  }
#pragma unroll
  for (std::uint32_t j = 0; j < kMostNumberedRanks; ++j) {
    const std::uint32_t mine = sums[j / 4 * 2 + j % 2] >> 16 * (j / 2 % 2) & 0xffffu, n = __reduce_add_sync(~0u, choice == 0 ? mine : 0);
    if (lane == 0 && n != 0 && (k.dead >> j & 1) == 0) atomicAdd(rows + j, n);
  }
}

// By each of a block's workers: what comes before its first chunk, or all that there is if nothing does.
__device__ inline void count_rows_before(const DispatchArguments& a, const ManyPlan& s, std::uint32_t* sums) {
  if (s.first_chunk >= a.chunks) return;
  const Spends spends(a.common, Span::Counting);
  const std::uint32_t end = s.first_chunk == 0 ? a.own : s.first_chunk * a.tokens_per_chunk;
  std::uint32_t* const rows = sums + a.common.c.num_experts;
  if (a.common.c.top_k > 4 && a.common.c.top_k <= 8)
    count_rows_of_ranks<12, 3>(a, 0, end, threadIdx.x / 32, kWorkers, rows);
  else
    count_rows_of_ranks<4>(a, 0, end, threadIdx.x / 32, kWorkers, rows);
}

// A chunk whose ids are in shared memory: `rows` has what comes before it, and then what comes after it. A lane has a token.
static __device__ __noinline__ void number_choices(const Common& k, const ChunkChoices chunk, std::int32_t* its_ids, std::uint32_t* rows,
                                                   PlannedChunk* planned) {
  static_assert(kMostTokensOfChunk == 32, "a lane has a token");
  const std::int32_t* const ids = known_shared(its_ids);
  PlannedChunk& to = *known_shared(planned);
  rows = known_shared(rows);
  const Divider per_rank = k.per_rank;
  const std::uint32_t lane = threadIdx.x % 32, choices = k.c.top_k, of_token = lane * choices;
  const bool there = lane < chunk.tokens;
  std::uint32_t ranks = 0, nth = 0;
#pragma unroll 4
  for (std::uint32_t i = 0; i < choices; ++i) {
    const std::int32_t id = there ? ids[of_token + i] : -1;
    if (id >= 0) ranks |= 1u << per_rank.divide(static_cast<std::uint32_t>(id));
  }
  for (std::uint32_t rank = 0; rank < k.c.world; ++rank) {
    const bool wants = (ranks >> rank & 1) != 0;
    const std::uint32_t tokens = __ballot_sync(~0u, wants), begin = rows[rank];
    if (wants) to.row[of_token + nth++] = rank << 20 | (begin + __popc(tokens & ((1u << lane) - 1)));
    __syncwarp();
    if (lane == 0) rows[rank] = begin + __popc(tokens);
  }
  for (; there && nth < choices; ++nth) to.row[of_token + nth] = kNone;
  for (std::uint32_t at = lane; at < chunk.all; at += 32) {
    to.id[at] = ids[at];
    to.index[at] = 0;  // nobody asks for it
  }
  __syncwarp();
}

// In place of plan_chunks(). `sums` has what count_rows_before() found.
__device__ inline void number_chunks(const DispatchArguments& a, ManyPlan& s, LoadedChunk& loaded, std::uint32_t* sums, char* memory) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, step = s.step;
  std::uint32_t* const rows = sums + k.c.num_experts;
  std::int32_t* const ids = ChunkMarks(k, memory).ids;
  Stretch stretch(a, s.first_stretch);
  std::uint32_t number = next_chunk(a, stretch), counted = number;
  if (s.first_stretch == 0) {
    if (lane == 0) {
      *a.received.step = step;  // the step's other phases read it there
      take_set(k, step);
    }
    send_rows(k, step, rows);
    __syncwarp();
    if (lane < k.c.world) rows[lane] = 0;
    __syncwarp();
  }
  for (std::uint32_t n = 0;; ++n) {
    const bool ends = number >= a.chunks;
    const ChunkChoices chunk(a, number);
    const std::uint32_t next = ends ? number : next_chunk(a, stretch);
    if (n == 0 && !ends && lane == 0) tell_bounds(a, s, 1, next);
    if (!ends && counted != number)  // none, within a stretch
      count_rows_of_ranks<2>(a, counted * a.tokens_per_chunk, number * a.tokens_per_chunk, 0, 1, rows);
    __syncwarp();
    if (n >= 2) {
      const Spends waits(k, Span::AwaitingPlaceOut);
      await_turn(s.used + n % 2, n / 2 - 1);
    }
    if (n >= 2 && lane == 0) tell_bounds(a, s, n, number);
    PlannedChunk& planned = s.chunks[n % 2];
    if (!ends) {
      const Spends spends(k, Span::PlacingChunks);
      loaded.ids.keep(a, chunk, false, ids);
#pragma unroll
      for (std::uint32_t i = 0; i < ChunkChoices::kOfLane; ++i)
        if (chunk.at(i) < chunk.all) planned.weight[chunk.at(i)] = loaded.weights[i];
      if (next < a.chunks) loaded.load(a, ChunkChoices(a, next));
      __syncwarp();
      number_choices(k, chunk, ids, rows, &planned);
    }
    __syncwarp();
    if (lane == 0) turns_arrive(s.planned + n % 2);
    if (ends) break;
    counted = number + 1;
    number = next;
  }
  count_all(a, step, memory);
}

}  // namespace pplx::cuda
