// Blocks in pieces for peers of other nodes (protocol/pieces.h, remote/proxy.cuh): a round is a piece, which the proxy carries when all of it is there.
//   told    pieces of the last block of that set that the proxy was told of
//   landed  leading pieces of the peer's block that are here, with checked headers, and what they say in the handle
//   room    leading pieces of this rank's block that the peer has read and that have left: what lies two places further may be written
// All are device memory. One warp passes on what the proxy says, or a carrier's signals (remote/pass_on_rounds.cuh).
// The thread that stores the last part of a piece hands it over, and not before the piece in front of it. Its parts are counted in `stored`: the tokens of
// a dispatch, for all remote peers together, since a sender of a token has waited for room at all of them; of a combine the rows for one peer, and
// the header.
#pragma once

#include "../large/ring.cuh"
#include "../large/tuning.h"
#include "../remote/proxy.cuh"

namespace pplx::cuda {

// Total of a column of all chunks' counts.
__device__ inline std::uint32_t total_of(const DispatchArguments& a, std::uint32_t column) {
  std::uint32_t total = 0;
#pragma unroll
  for (std::uint32_t i = 0; i < kTotals; ++i) total += __ldcg(a.chunk_counts.totals + i * chunk_columns(a.common.c) + column);
  return total;
}

// A count of a round is complete with all of its parts, of which one knows how many there are, and the round in front of it.
inline constexpr std::uint32_t kAllParts = 1u << 29, kRoundBefore = 1u << 30;

__device__ inline std::uint64_t* remote_word(const Common& k, const PieceArguments& p, RemoteWord word, std::uint32_t step, Op op, std::uint32_t peer) {
  const std::uint32_t set = set_of(k.c, step), of_set = static_cast<std::uint32_t>(word) * k.c.in_flight + set;
  return p.remote.words + (std::uint64_t{of_set} * kPieceOps + static_cast<std::uint32_t>(op)) * k.c.world + peer;
}
// Those that live.
__device__ inline std::uint32_t remote_peers(const Common& k) { return count_ranks(k.remote & ~k.dead); }

// Rounds of a rank with `own` tokens: at least one, for its counts.
__device__ inline std::uint32_t rounds_of_own(const PieceArguments& p, std::uint32_t own) { return max(1u, (own + p.tokens - 1) / p.tokens); }

// Rounds of a source, as the handle of a dispatch keeps them: how many there are, then the rows before each.
__device__ inline std::uint32_t* kept_rounds(const PieceArguments& p, std::uint32_t source) { return p.kept + source * (p.most + 1); }

// Rows of one op, as far as rounds say.
struct PieceRows {
  std::uint32_t begin, end;
  __device__ std::uint32_t rows() const { return end - begin; }
};
// Rows of this rank's block for a peer. All chunks have been counted.
__device__ inline PieceRows rows_of_own_round(const PieceArguments& p, const PlanView& plan, const Common& k, std::uint32_t peer, std::uint32_t round,
                                              std::uint32_t rounds) {
  const std::uint32_t* const begin = p.begin_rows + round * k.c.world + peer;
  return {__ldcg(begin), round + 1 < rounds ? __ldcg(begin + k.c.world) : __ldcg(plan.rows + peer)};
}
// Rows of a source's block, which has `rows` rows.
__device__ inline PieceRows rows_of_kept_round(const PieceArguments& p, std::uint32_t source, std::uint32_t round, std::uint32_t rows) {
  const std::uint32_t* const kept = kept_rounds(p, source);
  return {__ldcg(kept + 1 + round), round + 1 < __ldcg(kept) ? __ldcg(kept + 2 + round) : rows};
}

// ---- sending ----

// True if the blocks of all remote peers may be begun: see may_write(). A warp's.
__device__ inline bool may_write_all(const Common& k, std::uint32_t step, Op op) {
  bool good = true;
  come_late(k, step);
  for (std::uint32_t i = threadIdx.x % 32; i < remote_peers(k); i += 32) good = may_write(k, step, op, k.order[i]) && good;
  return __all_sync(~0u, good);
}

// Writes the header, by one thread, before any peer is told.
__device__ inline void write_piece_header(const Common& k, char* piece, std::uint32_t step, std::uint32_t rows, std::uint32_t flags, std::uint32_t round,
                                          std::uint32_t rounds, const PieceRows& of) {
  *reinterpret_cast<BlockHeader*>(piece) = {step, k.generation, rows, flags, k.c.rank, 0, 0, round, rounds, of.begin, of.end};
}

__device__ inline char* piece_for(const Common& k, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t round) {
  return block_for(k, set_of(k.c, step), op, peer) + k.heap.piece_at(op, round);
}

// Hands over the piece, by one thread, which knows that it is complete.
__device__ inline void hand_over(const Common& k, const PieceArguments& p, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t round,
                                 std::uint32_t rows) {
  fuzz_delay(k, std::uint64_t{round} << 32 | peer);
  if (kCarrier) {
    *announced(k, step, op, peer) = arrival_word(k.generation, step);
    put_piece(k, step, op, peer, round, rows);
    mark_told(k, step, op);
    return;
  }
  rows_of_piece(k.heap, k.c, k.host, step, op, peer, round) = rows;
  *remote_word(k, p, RemoteWord::Told, step, op, peer) = pieces_word(k.generation, step, round + 1);
  announce<Atomics>(mailbox_of(k, step, op, peer), k.generation, {step, round + 1, true}, *announced(k, step, op, peer));
  mark_told(k, step, op);
}

// Counts `more` parts that the lanes of a warp have stored and awaited. True: the round is complete.
__device__ inline bool count_parts(const Common& k, const PieceArguments& p, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t round,
                                   std::uint32_t more, std::uint32_t all) {
  const std::uint32_t place = (set_of(k.c, step) * kPieceOps + static_cast<std::uint32_t>(op)) * kPlaces + round % kPlaces;
  std::uint32_t* const stored = p.remote.stored + place * k.c.world + peer;
  fuzz_delay(k, std::uint64_t{round} << 32 | step);
  const bool complete = count_of_warp(stored, more) + more == all;
  if (complete && threadIdx.x % 32 == 0) *stored = 0;  // the next round there begins when this one has been read
  __syncwarp();
  return complete;
}

// Counts `more` stored tokens of a dispatch, or what comes before them: kRoundBefore. A warp's.
static __device__ __noinline__ void count_tokens_of_round(const DispatchArguments& a, std::uint32_t step, std::uint32_t round, std::uint32_t more) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  const std::uint32_t rounds = rounds_of_own(p, a.own);
  for (; round < rounds; ++round, more = kRoundBefore) {
    const std::uint32_t tokens = min(p.tokens, a.own - round * p.tokens);
    if (!count_parts(k, p, step, Op::Dispatch, k.c.rank, round, more, tokens + kRoundBefore)) return;
    for (std::uint32_t i = threadIdx.x % 32; i < remote_peers(k); i += 32) {
      const std::uint32_t peer = k.order[i];
      const PieceRows of = rows_of_own_round(p, a.plan, k, peer, round, rounds);
      write_piece_header(k, piece_for(k, step, Op::Dispatch, peer, round), step, __ldcg(a.plan.rows + peer), 0, round, rounds, of);
      hand_over(k, p, step, Op::Dispatch, peer, round, of.rows());
    }
    __syncwarp();
  }
}

// Tells remote peers what they must know before any row of theirs, by the warp that has counted all chunks, or has a given plan.
[[maybe_unused]] static __device__ __noinline__ void begin_remote_blocks(const DispatchArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  const std::uint32_t lane = threadIdx.x % 32, peers = remote_peers(k), columns = chunk_columns(k.c);
  if (peers == 0) return;
  for (std::uint32_t i = lane; a.ids != nullptr && i < peers; i += 32) {
    const std::uint32_t peer = k.order[i];
    const std::uint16_t* const rows = a.chunk_counts.counts + k.c.num_experts + peer;
    std::uint32_t before = 0;
#pragma unroll 8
    for (std::uint32_t chunk = 0; chunk < a.chunks; ++chunk) {
      if (chunk % p.chunks == 0) p.begin_rows[chunk / p.chunks * k.c.world + peer] = before;
      before += __ldcg(rows + std::uint64_t{chunk} * columns);
    }
  }
  for (std::uint32_t i = lane; i < peers * k.experts_per_rank; i += 32) {
    const std::uint32_t peer = k.order[i / k.experts_per_rank], nth = i % k.experts_per_rank, expert = first_expert_of(k, peer) + nth;
    if (nth >= local_experts_of(k, peer)) continue;
    auto* const counts = reinterpret_cast<std::uint32_t*>(piece_for(k, step, Op::Dispatch, peer, 0) + sizeof(BlockHeader));
    counts[nth] = a.ids == nullptr ? a.plan.counts[expert] : total_of(a, expert);
  }
  count_tokens_of_round(a, step, 0, kRoundBefore);
}

// Returns which ranks of the node that a peer stands for get a token. id_of(i): its ith choice.
template <typename IdOf>
__device__ inline std::uint32_t mask_for(const DispatchArguments& a, std::uint32_t peer, const IdOf& id_of) {
  std::uint32_t mask = 0;
#pragma unroll 4
  for (std::uint32_t i = 0; i < a.common.c.top_k; ++i) {
    const std::int32_t id = id_of(i);
    const std::uint32_t rank = id < 0 ? 0 : a.common.per_rank.divide(static_cast<std::uint32_t>(id));
    if (id >= 0 && a.relays.rep[rank] == peer) mask |= 1u << a.relays.number[rank];
  }
  return mask;
}

// Writes a token's masks to the blocks of all nodes: one thread. ids: its choices.
__device__ inline void write_masks(const DispatchArguments& a, std::uint32_t step, std::uint32_t own, const std::int32_t* ids) {
  const Common& k = a.common;
  for (std::uint64_t peers = k.remote & ~k.dead & ~a.relays.skipped; peers != 0; peers &= peers - 1) {
    const std::uint32_t peer = lowest_rank(peers);
    char* const block = block_for(k, set_of(k.c, step), Op::Dispatch, peer);
    reinterpret_cast<std::uint32_t*>(block + masks_at(k.c))[own] = mask_for(a, peer, [&](std::uint32_t i) { return ids[i]; });
  }
}

// Begins remote peers' whole blocks, by the warp that has counted all chunks and keeps what it counted, or has a given plan.
[[maybe_unused]] static __device__ __noinline__ void begin_whole_blocks(const DispatchArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t own = lane; a.ids == nullptr && has_relays(k) && own < a.own; own += 32)
    write_masks(a, step, own, a.plan.ids + std::uint64_t{own} * k.c.top_k);
  for (std::uint64_t peers = k.remote & ~k.dead & ~a.relays.skipped; peers != 0; peers &= peers - 1) {
    const std::uint32_t peer = lowest_rank(peers), rows = a.plan.rows[peer];
    char* const block = block_for(k, set_of(k.c, step), Op::Dispatch, peer);
    write_header(k, block, step, rows, 0, lane, 0, has_relays(k) ? a.own : 0);
    auto* const counts = reinterpret_cast<std::uint32_t*>(block + sizeof(BlockHeader));
    for (std::uint32_t e = lane; e < k.c.num_experts; e += 32) {
      const std::uint32_t rank = k.per_rank.divide(e), first = has_relays(k) ? a.relays.number[rank] * k.experts_per_rank : 0;
      if (a.relays.rep[rank] == peer) counts[first + e - first_expert_of(k, rank)] = a.plan.counts[e];
    }
    __syncwarp();
    if (lane == 0) count_header(k, step, Op::Dispatch, peer, rows, 1);
  }
}

// Counts the rows of whole blocks that a warp's lanes have stored and awaited. entry: a lane's, as in PlanView, or kNone. Those for
// one peer follow each other.
__device__ inline void count_far_rows(const DispatchArguments& a, std::uint32_t step, std::uint32_t entry) {
  const std::uint32_t peer = entry == kNone ? kNone : entry >> 20, alike = __match_any_sync(~0u, peer);
  if (peer != kNone && (alike & ((1u << threadIdx.x % 32) - 1)) == 0)
    count_rows(a.common, step, Op::Dispatch, peer, entry & 0xfffffu, __popc(alike), RowsOfBlock(a.plan.rows + peer));
}

// Counts `more` parts of what goes back to a peer in a round, or what comes before them. A warp's. rows: of the whole block.
[[maybe_unused]] static __device__ __noinline__ void count_sums_of_round(const Common& k, const PieceArguments& p, std::uint32_t step, std::uint32_t peer,
                                                        std::uint32_t round, std::uint32_t rows, std::uint32_t more) {
  const std::uint32_t rounds = __ldcg(kept_rounds(p, peer));
  for (; round < rounds; ++round, more = kRoundBefore) {
    if (!count_parts(k, p, step, Op::Combine, peer, round, more, kAllParts + kRoundBefore)) return;
    if (threadIdx.x % 32 == 0) hand_over(k, p, step, Op::Combine, peer, round, rows_of_kept_round(p, peer, round, rows).rows());
  }
}

}  // namespace pplx::cuda
