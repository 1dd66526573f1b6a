// The plan of a large dispatch whose outputs are Compact, of few ranks (docs/design.md, Numbers): each thread block numbers its
// rows by itself, from the ids. Only the callers need the choices of each expert: they are counted beside that.
#pragma once

#include "chunk_plan.cuh"

namespace pplx::cuda {

// A lane's part of how many tokens go to each rank: a byte for each, that the next tokens are added to, and half a word.
class RowsOfRanks {
 public:
  // A token's ranks, a bit each.
  __device__ void add(std::uint32_t ranks) {
    constexpr std::uint32_t kBitsToBytes = 0x204081u;  // moves four bits to four bytes
    low_ += (ranks & 15) * kBitsToBytes & 0x01010101u;
    high_ += (ranks >> 4) * kBitsToBytes & 0x01010101u;
  }
  // After 255 tokens at most.
  __device__ void fold() {
    sums_[0] += low_ & 0xff00ffu;
    sums_[1] += low_ >> 8 & 0xff00ffu;
    sums_[2] += high_ & 0xff00ffu;
    sums_[3] += high_ >> 8 & 0xff00ffu;
    low_ = high_ = 0;
  }
  // Adds a warp's counts to `rows`. counts: true if this lane's tokens are no other lane's.
  __device__ void add_to(const Common& k, bool counts, std::uint32_t* rows) const {
#pragma unroll
    for (std::uint32_t j = 0; j < kMostNumberedRanks; ++j) {
      const std::uint32_t mine = sums_[j / 4 * 2 + j % 2] >> 16 * (j / 2 % 2) & 0xffffu, n = __reduce_add_sync(~0u, counts ? mine : 0);
      if (threadIdx.x % 32 == 0 && n != 0 && (k.dead >> j & 1) == 0) atomicAdd(rows + j, n);
    }
  }

 private:
  static_assert(kMostNumberedRanks == 8);
  std::uint32_t low_ = 0, high_ = 0, sums_[kMostNumberedRanks / 2] = {};
};

// The rank that has an expert, as a bit; none, if there is no such expert.
__device__ inline std::uint32_t rank_bit(const Common& k, std::uint32_t id, std::uint32_t high) {
  return id < k.c.num_experts && high == 0 ? 1u << k.per_rank.divide(id) : 0;
}

// A lane's load of a token's ids: one, or two of int64 at once.
struct OneId {
  static constexpr bool kTwo = false;
  RawId id;
  __device__ void load(const DispatchArguments& a, const char* from) {
    id = a.wide_ids ? raw_id(*reinterpret_cast<const uint2*>(from)) : raw_id(*reinterpret_cast<const std::uint32_t*>(from));
  }
  __device__ std::uint32_t ranks(const DispatchArguments& a) const { return rank_bit(a.common, id.low, a.wide_ids ? id.high : 0); }
};
struct TwoIds {
  static constexpr bool kTwo = true;
  uint4 ids = {~0u, ~0u, ~0u, ~0u};
  __device__ void load(const DispatchArguments&, const char* from) { ids = *reinterpret_cast<const uint4*>(from); }
  __device__ std::uint32_t ranks(const DispatchArguments& a) const {
    return rank_bit(a.common, ids.x, ids.y) | rank_bit(a.common, ids.z, ids.w);
  }
};

// Adds to rows[r], by one of `warps` warps, how many of the tokens [begin, end) go to rank r. A lane loads kAtOnce times at once.
// kShift: bits of the lane that a token has; 0: those that top_k needs. Bad ids, and those of dead ranks, count for nothing.
template <typename Ids, std::uint32_t kAtOnce, std::uint32_t kShift = 0>
__device__ inline void count_rows_of_ranks(const DispatchArguments& a, std::uint32_t begin, std::uint32_t end, std::uint32_t warp,
                                           std::uint32_t warps, std::uint32_t* rows) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t shift = kShift != 0 ? kShift : k.group_shift;
  const std::uint32_t nth = lane & ((1u << shift) - 1), together = 32 >> shift, loads = Ids::kTwo ? 1u << shift : k.c.top_k;
  const std::uint32_t width = Ids::kTwo ? 16 : a.wide_ids ? 8 : 4, step = together * loads * width;
  RowsOfRanks counted;
#pragma unroll 1
  for (std::uint32_t first = begin + warp * kAtOnce * together; first < end; first += warps * kAtOnce * together) {
    const std::uint32_t token = first + (lane >> shift);
    const char* from = static_cast<const char*>(a.ids) + (std::uint64_t{token} * loads + nth) * width;
    Ids ids[kAtOnce];
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i, from += step)
      if (nth < loads && token + i * together < end) ids[i].load(a, from);
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      std::uint32_t ranks = ids[i].ranks(a);
#pragma unroll
      for (std::uint32_t s = 1; s < 1u << kShift; s *= 2) ranks |= __shfl_xor_sync(~0u, ranks, static_cast<int>(s));
#pragma unroll 1
      for (std::uint32_t s = 1; kShift == 0 && s >> shift == 0; s *= 2) ranks |= __shfl_xor_sync(~0u, ranks, static_cast<int>(s));
      counted.add(ranks);
    }
    counted.fold();
  }
  counted.add_to(k, nth == 0, rows);
}

// Five to eight choices of a token. Not inlined: the roles that follow would spill what this has in registers.
static __device__ __noinline__ void count_rows_of_five_to_eight(const DispatchArguments& a, std::uint32_t end, std::uint32_t* its_rows) {
  std::uint32_t* const rows = known_shared(its_rows);
  if (a.common.c.top_k == 8 && a.wide_ids && reinterpret_cast<std::uint64_t>(a.ids) % 16 == 0)
    count_rows_of_ranks<TwoIds, 12, 2>(a, 0, end, threadIdx.x / 32, kWorkers, rows);
  else
    count_rows_of_ranks<OneId, 12, 3>(a, 0, end, threadIdx.x / 32, kWorkers, rows);
}

// Counts the rows before a block's first chunk, or all rows if that is chunk 0: each of its workers.
__device__ inline void count_rows_before(const DispatchArguments& a, const LargePlan& s, std::uint32_t* sums) {
  if (s.first_chunk >= a.chunks) return;
  const SpanTimer spends(a.common, Span::Counting);
  const std::uint32_t end = s.first_chunk == 0 ? a.own : s.first_chunk * a.tokens_per_chunk;
  std::uint32_t* const rows = sums + a.common.c.num_experts;
  if (a.common.c.top_k > 4 && a.common.c.top_k <= 8)
    count_rows_of_five_to_eight(a, end, rows);
  else
    count_rows_of_ranks<OneId, 4>(a, 0, end, threadIdx.x / 32, kWorkers, rows);
}

// Counts choices by expert, of the chunks that no other block has begun: one warp of each thread block. It tells of up to 32 chunks
// together, since a fence behind rows in flight to peers takes ten microseconds. memory: counting_bytes().
static __device__ __noinline__ void count_choices(const DispatchArguments& a, std::uint32_t step, char* memory) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const ChunkMarks marks(k, known_shared(memory));
  for (std::uint32_t first = blockIdx.x; first < a.chunks; first += 32 * gridDim.x) {
    const std::uint32_t mine = first + lane * gridDim.x;
    const bool taken = mine < a.chunks && atomicExch(a.chunk_counts.taken + mine, step) != step;
    const std::uint32_t all = __ballot_sync(~0u, taken);
    if (all == 0) continue;
    marks.clear(k);
    ChunkIds ids;
    const auto first_of = [&](std::uint32_t chunks) { return ChunkChoices(a, first + (__ffs(static_cast<int>(chunks)) - 1) * gridDim.x); };
    ids.load(a, first_of(all));
    for (std::uint32_t left = all; left != 0; left &= left - 1) {
      const ChunkChoices chunk = first_of(left);
      ids.keep(a, chunk, true, marks.ids);
      const std::uint32_t others = left & (left - 1);
      if (others != 0) ids.load(a, first_of(others));
      __syncwarp();
      for (std::uint32_t at = lane; at < chunk.all; at += 32)
        if (marks.ids[at] >= 0) atomicAdd(marks.tokens + marks.ids[at], 1u);
      __syncwarp();
    }
    fuzz_delay(k, first);
    add_to_totals(a, marks, blockIdx.x);
    const std::uint32_t before = count_of_warp(a.chunk_counts.counted, __popc(all));
    if (taken) store_relaxed(a.chunk_counts.ready + mine, arrival_word(k.generation, step));  // in place of another warp
    if (before + __popc(all) == a.chunks) send_all_counts(a, step);
  }
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
    to.index[at] = 0;  // unused
  }
  __syncwarp();
}

}  // namespace pplx::cuda
