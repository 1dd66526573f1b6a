// What a rank with few tokens sends back in a combine of which others have so many that their blocks go in pieces. All units are claimed in one
// order: headers, then rows in rounds.
#pragma once

#include "../decode/combine_send.cuh"
#include "../remote/combine_extras.cuh"
#include "../remote/pass_on_rounds.cuh"

namespace pplx::cuda {

// Rounds of a combine that a launch sends. The second one, a receive half, does not wait with what the first has claimed.
__device__ inline Claim claim_of_sums(const PieceArguments& p) { return p.begins ? Claim::CombineSend : Claim::CombineRest; }

// Whether what a peer's round of the slot held, here and there, is of no use any more. For a warp.
__device__ inline bool await_room_for_sums(const Common& k, const PieceArguments& p, std::uint32_t step, std::uint32_t peer, std::uint32_t round) {
  const bool begins = round < kPlaces && is_remote(k, peer);
  bool good = true;
  if (threadIdx.x % 32 == 0) {
    if (begins) come_late(k, step);
    good = begins ? may_write(k, step, Op::Combine, peer) : await_room(k, p, Phase::CombineSend, step, Op::Combine, peer, round);
  }
  return all_of_warp(good);
}

// A remote peer's header of a round: of each of its pieces one, or of the whole block. There is room for it.
static __device__ __noinline__ void send_header_of_round(const CombineArguments& a, std::uint32_t step, const RoundRun& run, const CombineShared& s) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  const std::uint32_t peer = run.source, rows = s.rows_begin[peer + 1] - s.rows_begin[peer], rounds = *kept_rounds(p, peer);
  const std::uint32_t flags = flags_of(a) | (*a.received.overflowed != 0 ? kOverflowed : 0u);
  PieceRows of{0, rows};
  if (rounds != 0) of = rows_of_kept_round(p, peer, run.round, rows);
  if (threadIdx.x % 32 == 0) write_piece_header(k, piece_for(k, step, Op::Combine, peer, run.round), step, rows, flags, run.round, rounds, of);
  count_sums_of_round(k, p, step, peer, run.round, rows, kAllParts - of.rows() + (run.round == 0 ? kRoundBefore : 0));
}
// Of a unit that is a header whether its peer has one in that round.
__device__ inline bool has_header(const PieceArguments& p, const RoundRun& run) { return run.round < max(1u, *kept_rounds(p, run.source)); }

// By one warp, while others send: what there is room for at remote peers.
__device__ inline void pass_on_rooms(const CombineArguments& a, std::uint32_t step) {
  const PieceArguments& p = a.pieces;
  const auto begin = [&](PassedPeer& of) { of.all_room = rounds_to_be_free(p, *kept_rounds(p, of.peer)); };
  pass_on_rounds(a.common, p, step, {Op::Combine, Phase::CombineSend, Phase::CombineRecv}, begin, [](std::uint32_t, std::uint32_t) { return true; });
}

// Rows that go behind one release, or none: rows of whole blocks show by themselves that they have come. Remote peers' are counted.
template <typename T, bool kMappedOnly, int kVectors>
__device__ inline void send_run_of_round(const CombineArguments& a, std::uint32_t step, const RoundRun& run, CombineShared& s) {
  const Common& k = a.common;
  const bool remote = !kMappedOnly && is_remote(k, run.source);
  char* const rows = rows_of_run(k, Op::Combine, k.combine, run, block_for(k, set_of(k.c, step), Op::Combine, run.source));
  for (std::uint32_t i = 0; i < run.rows; ++i) {
    Places places;
    places.load<kMappedOnly>(a, s.rows_begin[run.source] + run.first + i);
    const std::uint32_t n = places.check(a);
    if (!kMappedOnly && a.uses_weights && !sent_weight(a, step, run.source, run.first + i, places.weight)) return;
    char* const row = rows + std::uint64_t{i} * k.combine.row_bytes;
#pragma unroll 1
    for (std::uint32_t at = 0; at < k.row_bytes; at += strip_bytes(kVectors)) {
      const std::uint32_t begin = at + threadIdx.x % 32 * 16, end = min(k.row_bytes, at + strip_bytes(kVectors));
      Sums<T, kVectors> sums;
      sum_row(a, places, n, begin, end, sums);
      if (remote)
        sums.store(row, begin, end);
      else
        sums.send(row, begin, end);
      fuzz_delay(k, std::uint64_t{step} << 32 | begin);
    }
    if (kMappedOnly || !a.has_tail) continue;
    write_tail(a, places.choices, places.out_row, row + k.combine.tail_at);
    if (run.in_pieces || remote) continue;
    __syncwarp();
    if (threadIdx.x % 32 == 0) publish(k, row + k.combine.arrival_at, arrival_word(k.generation, step));  // a tail is any bits at all
  }
  mark_stage(k, Stage::Sent);
  __syncwarp();
  if (remote)
    count_sums_of_round(k, a.pieces, step, run.source, run.round, s.rows_begin[run.source + 1] - s.rows_begin[run.source], run.rows);
  else if (run.in_pieces && threadIdx.x % 32 < run.rows)
    publish(k, rows + std::uint64_t{threadIdx.x % 32} * k.combine.row_bytes + k.combine.arrival_at, word_of_round(k, step, run.round));
  __syncwarp();
}

// For each warp. rows: its own.
template <typename T, bool kMappedOnly, int kVectors>
static __device__ __noinline__ void send_rounds(const CombineArguments& a, std::uint32_t step, CombineShared& s, RoundRows& rows) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  if (p.begin == p.end) return;
  if (!kMappedOnly && a.uses_weights && p.begins) send_all_weights(a, step, threadIdx.x / 32, kCombineWarps);
  const std::uint32_t remote = remote_peers(k), headers = p.begins ? k.living - remote : 0;
  Rounds rounds(k, p, step, s.rows_begin, Phase::CombineSend, kRowsOfRoundRun, 1, rows);
  if (!rounds.open(p.begin, p.end)) return;
  for (;;) {
    const std::uint32_t unit = claim(k, p, step, claim_of_sums(p));
    if (unit < headers) {
      send_combine_header<true>(a, step, k.order[remote + unit], s, 0);
      continue;
    }
    RoundRun run;
    if (!rounds.find(unit - headers, run)) return;
    if (run.is_header ? !has_header(p, run) : run.rows == 0) continue;
    if (!await_room_for_sums(k, p, step, run.source, run.round)) return;
    if (run.is_header)
      send_header_of_round(a, step, run, s);
    else
      send_run_of_round<T, kMappedOnly, kVectors>(a, step, run, s);
  }
}

struct CombineRounds {
  static constexpr bool kPieces = true;
  using Rows = RoundRows;
  // For each warp of a step in rounds.
  template <typename T, bool kMappedOnly, int kVectors>
  __device__ static void send(const CombineArguments& a, std::uint32_t step, CombineShared& s, RoundRows& rows) {
    const Common& k = a.common;
    if (blockIdx.x == 0 && threadIdx.x < 32) forget_rounds(k, a.pieces, step, Op::Dispatch);
    if (!kMappedOnly && !a.release && a.recv && k.remote != 0 && threadIdx.x / 32 == kCombineWarps - 1 && claim(k, a.pieces, step, Claim::CombineAside) == 0)
      pass_on_rooms(a, step);
    if (!a.release) send_rounds<T, kMappedOnly, kVectors>(a, step, s, rows);
  }
};

}  // namespace pplx::cuda
