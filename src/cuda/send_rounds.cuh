// What a rank with few tokens sends back in a combine of which others have so many that their blocks go in pieces. All units are claimed in one
// order: headers, then rows in rounds.
#pragma once

#include "combine_send.cuh"
#include "rounds.cuh"

namespace pplx::cuda {

// Rounds of a combine that a launch sends. The second one, a receive half, does not wait with what the first has claimed.
__device__ inline Claim claim_of_sums(const PieceArguments& p) { return p.begins ? Claim::CombineSend : Claim::CombineRest; }

// Rows that go behind one release, or none: rows of whole blocks show by themselves that they have come.
template <typename T, bool kPlain, int kVectors>
__device__ inline void send_run_of_round(const CombineArguments& a, std::uint32_t step, const RoundRun& run, CombineShared& s) {
  const Common& k = a.common;
  char* const rows = block_for(k, set_of(k.c, step), Op::Combine, run.source) + k.combine.row_at(run.slot_row);
  for (std::uint32_t i = 0; i < run.rows; ++i) {
    Places places;
    places.load<kPlain>(a, s.rows_begin[run.source] + run.first + i);
    const std::uint32_t n = places.check(a);
    if (!kPlain && a.uses_weights && !sent_weight(a, step, run.source, run.first + i, places.weight)) return;
    char* const row = rows + std::uint64_t{i} * k.combine.row_bytes;
#pragma unroll 1
    for (std::uint32_t at = 0; at < k.row_bytes; at += strip_bytes(kVectors)) {
      const std::uint32_t begin = at + threadIdx.x % 32 * 16, end = min(k.row_bytes, at + strip_bytes(kVectors));
      Sums<T, kVectors> sums;
      sum_row<false>(a, places, n, begin, end, sums);
      sums.send(row, begin, end);
      linger(k, std::uint64_t{step} << 32 | begin);
    }
    if (kPlain || !a.has_tail) continue;
    write_tail(a, places.choices, places.place, row + k.combine.tail_at);
    if (run.in_pieces) continue;
    __syncwarp();
    if (threadIdx.x % 32 == 0) publish(k, row + k.combine.arrival_at, arrival_word(k.generation, step));  // a tail is any bits at all
  }
  note(k, Stage::Sent);
  __syncwarp();
  if (run.in_pieces && threadIdx.x % 32 < run.rows)
    publish(k, rows + std::uint64_t{threadIdx.x % 32} * k.combine.row_bytes + k.combine.arrival_at, word_of_round(k, step, run.round));
  __syncwarp();
}

// For each warp. rows: its own.
template <typename T, bool kPlain, int kVectors>
static __device__ __noinline__ void send_rounds(const CombineArguments& a, std::uint32_t step, CombineShared& s, RoundRows& rows) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  if (p.begin == p.end) return;
  if (!kPlain && a.uses_weights && p.begins) send_all_weights(a, step, threadIdx.x / 32, kCombineWarps);
  const std::uint32_t headers = p.begins ? k.living : 0;
  Rounds rounds(k, p, step, s.rows_begin, Phase::CombineSend, kRowsOfRoundRun, 1, rows);
  if (!rounds.open(p.begin, p.end)) return;
  for (;;) {
    const std::uint32_t unit = claim(k, p, step, claim_of_sums(p));
    if (unit < headers) {
      send_combine_header<true>(a, step, k.order[unit], s, 0);
      continue;
    }
    RoundRun run;
    if (!rounds.find(unit - headers, run)) return;
    if (run.rows == 0) continue;
    const bool good = threadIdx.x % 32 != 0 || await_room(k, Phase::CombineSend, step, Op::Combine, run.source, run.round);
    if (!all_of_warp(good)) return;
    send_run_of_round<T, kPlain, kVectors>(a, step, run, s);
  }
}

}  // namespace pplx::cuda
