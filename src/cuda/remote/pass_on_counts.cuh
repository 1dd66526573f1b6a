// Passes on what remote peers' headers say, by one warp, in the form in which peers of the node say it.
#pragma once

#include "../common/arrival.cuh"
#include "pass_on_rounds.cuh"
#include "proxy.cuh"

namespace pplx::cuda {

// In pieces: keeps what the first header of a source says of its rounds. False: it cannot be so.
__device__ inline bool keep_first_piece(const DispatchArguments& a, std::uint32_t step, const BlockHeader& h) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  std::uint32_t* const kept = kept_rounds(p, h.source);
  kept[0] = h.pieces;
  kept[1] = 0;
  if (h.pieces > 1 && h.pieces <= p.most) kept[2] = h.end;
  const bool fits = h.piece == 0 && h.begin == 0 && h.pieces >= 1 && h.pieces <= p.most && h.end <= min(h.rows, p.tokens);
  if (fits && (h.pieces > 1 || h.end == h.rows)) return true;
  return blame(k, Phase::DispatchRecv, step, h.source, p.most, h.pieces);
}
// Keeps where the round of a source's later header ends. False: it cannot end there.
__device__ inline bool keep_piece(const DispatchArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t piece) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  std::uint32_t* const kept = kept_rounds(p, source);
  const std::uint32_t set = set_of(k.c, step), pieces = kept[0], begin = kept[1 + piece];
  const std::uint32_t rows = load_vec16(k.peers[k.c.rank] + k.heap.rows_at(k.c, set, source)).x;
  const BlockHeader h = load_header(own_slot(k, set, Op::Dispatch, source) + k.heap.piece_at(Op::Dispatch, piece));
  const std::uint32_t most = min(rows, begin + p.tokens), end = piece + 1 < pieces ? min(max(begin, h.end), most) : rows;
  if (piece + 1 < pieces) kept[2 + piece] = end;
  return end <= most && check_piece_header(k, h, Phase::DispatchRecv, step, source, piece, pieces, {begin, end});
}

// Writes the counts of n remote peers' headers as peers of the node do. A look across PCIe takes a microsecond: several go at once.
__device__ inline void pass_on_counts(const Common& k, std::uint32_t step, const std::uint8_t* group, std::uint32_t n) {
  constexpr std::uint32_t kAtOnce = 4;
  const std::uint32_t set = set_of(k.c, step), lane = threadIdx.x % 32, vectors = k.expert_vec16s;
  for (std::uint32_t first = lane; first < n * vectors; first += 32 * kAtOnce) {
    uint4 counts[kAtOnce];
#pragma unroll
    for (std::uint32_t j = 0; j < kAtOnce; ++j) {
      const std::uint32_t i = first + 32 * j;
      if (i >= n * vectors) continue;
      const char* block = own_slot(k, set, Op::Dispatch, group[i / vectors]);
      counts[j] = __ldcg(reinterpret_cast<const uint4*>(block + sizeof(BlockHeader)) + i % vectors);
    }
#pragma unroll
    for (std::uint32_t j = 0; j < kAtOnce; ++j) {
      const std::uint32_t i = first + 32 * j;
      if (i >= n * vectors) continue;
      // Behind the last expert a header has anything.
      const std::uint32_t expert = i % vectors * kNumbersOfVec16;
      const auto of = [&](std::uint32_t nth, std::uint32_t n) { return expert + nth < k.experts ? n & kMostOfNumber : 0; };
      const PackedNumbers p = pack_numbers({of(0, counts[j].x), of(1, counts[j].y), of(2, counts[j].z), of(3, counts[j].w)});
      store_tagged(k, k.peers[k.c.rank] + k.heap.counts_at(k.c, set, group[i / vectors]) + kVec16Bytes * (i % vectors), step, p.words[0], p.words[1], p.words[2]);
    }
  }
}

// In pieces, after all first headers: the later ones, and what has room of those that this launch sends.
__device__ inline void pass_on_later_pieces(const DispatchArguments& a, std::uint32_t step) {
  const PieceArguments& p = a.pieces;
  const std::uint32_t sent = a.send ? rounds_of_own(p, a.own) : 0;
  const auto begin = [&](PassedPeer& of) {
    of.landed = 1;
    of.all_landed = kept_rounds(p, of.peer)[0];
    of.all_room = rounds_to_be_free(p, sent);
  };
  const auto take = [&](std::uint32_t peer, std::uint32_t piece) { return keep_piece(a, step, peer, piece); };
  pass_on_rounds(a.common, p, step, {Op::Dispatch, Phase::DispatchSend, Phase::DispatchRecv}, begin, take);
}

// Passes on remote peers' headers and arrival words, by a warp, of 32 peers at once.
template <bool kPieces = false>
__device__ inline void pass_on_dispatches(const DispatchArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const std::uint32_t set = set_of(k.c, step), lane = threadIdx.x % 32;
  if (of_first_lane([&] { return claim_words(k, step, Op::Dispatch); }) == 0) return;
  const std::uint32_t peers = remote_peers(k);
  for (std::uint32_t begin = 0; begin < peers; begin += 32) {
    const std::uint8_t* group = k.order + begin;  // the order begins with peers of other nodes
    const std::uint32_t n = min(32u, peers - begin), peer = group[min(lane, n - 1)];
    const bool there = lane >= n || wait_for_block<kPieces>(k, step, Op::Dispatch, Phase::DispatchRecv, peer);
    if (!all_of_warp(there)) return;
    mark_stage(k, step, Stage::Heard);
    const BlockHeader h = load_header(own_slot(k, set, Op::Dispatch, peer));
    pass_on_counts(k, step, group, n);
    // Counts are not used before it is known how many rows there are.
    bool good = lane >= n || check_header(k, h, Phase::DispatchRecv, step, peer);
    if constexpr (kPieces) good = good && (lane >= n || keep_first_piece(a, step, h));
    if (good && lane < n) {
      store_tagged(k, k.peers[k.c.rank] + k.heap.rows_at(k.c, set, peer), step, h.rows, 0, k.heap.in_pieces ? 1 : 0);
      if constexpr (kPieces) {
        pass_on(k, step, Signal::Dispatch, peer);
        store_release_here(parts_word(k, k.peers[k.c.rank], step, Op::Dispatch, peer), pieces_word(k.generation, step, 1));
        store_release_here(remote_word(k, a.pieces, RemoteWord::Landed, step, Op::Dispatch, peer), pieces_word(k.generation, step, 1));
      }
    }
    mark_stage(k, step, Stage::PassedOn);
    if (!__all_sync(~0u, good)) return;
  }
  if constexpr (!kPieces) {
    for (std::uint32_t i = lane; i < peers; i += 32)
      pass_on_rows(k, step, Op::Dispatch, Phase::DispatchRecv, k.order[i], load_vec16(k.peers[k.c.rank] + k.heap.rows_at(k.c, set, k.order[i])).x);
    __syncwarp();
  }
  for (std::uint32_t i = lane; i < peers; i += 32) {
    if constexpr (kPieces)
      see_pieces_leave(k, a.pieces, step, Op::Combine, Phase::CombineSend, k.order[i]);
    else
      see_it_leave(k, step, Op::Combine, Phase::CombineSend, k.order[i]);
    see_it_leave(k, step, Op::Weights, Phase::Weights, k.order[i]);
  }
  if constexpr (kPieces) pass_on_later_pieces(a, step);
}

}  // namespace pplx::cuda
