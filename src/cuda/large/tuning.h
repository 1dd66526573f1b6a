// Large steps: what was chosen by measuring, in one place: bench/notes.md has the figures. Nothing here changes a bit of any
// result.
#pragma once

#include <cstddef>

#include "../common/tuning.h"

namespace pplx::cuda {

// ---- dispatch ----

// Bytes of bulk copies in flight to peers, of all senders of a GPU. The link takes no more, and copies that it does not take stand in
// front of all others of their multiprocessor: with more, receivers wait for senders.
inline constexpr std::uint32_t kBytesOnTheirWay = 3 << 19;
constexpr std::uint32_t senders_of(std::uint32_t blocks, std::uint32_t bytes_each, std::uint32_t most) {
  return std::min(most, (kBytesOnTheirWay - 1) / (blocks * bytes_each) + 1);
}

// A thread block has a warp that plans, two that find out what has come, and workers, some of which send as long as there is
// anything to send. In pieces each worker has its own shared memory: tiles on their way in and out, or rows on their way in.
inline constexpr std::uint32_t kWorkers = 12, kSendingWorkers = 9;
inline constexpr std::uint32_t kManyWarps = 3 + kWorkers;
inline constexpr std::uint32_t kManyThreads = 32 * kManyWarps;
inline constexpr std::uint32_t kTileBytes = 4096, kTilesIn = 3, kTilesOut = 2;
inline constexpr std::uint32_t kRowsIn = 2, kRowPartBytes = 7168;

// Inside a node a dispatch has workers with roles (large/load.cuh): one asks for tokens, teams quantise them, one deals rows, some
// store them, and the rest receive from the start; one warp more tells of rows. A warp that does all of it with a token of 7168
// numbers takes 19,000 cycles, most of which it waits. With 16 warps a thread has 128 registers, with 17 to 20 it has 96. A team
// has a token at a time, or a part of it, up to kQuantiserBytes each: whatever its part, a warp has 150 instructions for what lies
// between two tokens and for scales, beside 70 for 512 elements (seven warps of 2 KB: 2,000 instructions a token, two of 7 KB:
// 1,300).
inline constexpr std::uint32_t kTeams = 3, kOfTeam = 2, kQuantiserBytes = 7168;
inline constexpr std::uint32_t kQuantisers = kTeams * kOfTeam;
inline constexpr std::uint32_t kLargeWarps = kManyWarps + 1;
// Tokens on their way in, which leave for registers at once; rows on their way out.
inline constexpr std::uint32_t kTokensIn = 6, kRowsOut = 12;
// Warps that store rows, a place of the ring each. A row of 7168 codes is 15 stores of all lanes for each rank that wants it, and
// none of them waits.
inline constexpr std::uint32_t kStorers = 3;
// Tokens that are looked up together; how many such batches are under way, and are told of with one fence at most.
inline constexpr std::uint32_t kTokensTogether = 4, kBatches = 8;
// A GPU has at most kRowBytesOnTheirWay in flight to peers, though each thread block may have two tokens. The link does not
// take more, and loads and stores of all multiprocessors would wait for it: 4,096 tokens on all multiprocessors of an H100 took 132
// us with 4 MB, 141 with 8 MB, 163 with 2 MB, and 153 when each thread block could have 32 tokens on their way.
inline constexpr std::uint64_t kRowBytesOnTheirWay = 4 << 20;
// Tokens of a thread block. token_bytes: for all peers that want one.
constexpr std::uint32_t tokens_on_their_way(std::uint32_t senders, std::uint64_t token_bytes) {
  const auto fair = static_cast<std::uint32_t>(kRowBytesOnTheirWay / (senders * token_bytes));
  return fair < 2 ? 2 : fair;
}
// kSendingBlocks thread blocks fill the link. Where a launch has more, the others receive from the start: 4,096 tokens on all
// multiprocessors of an H100 take 128 us so, 132 where all send.
inline constexpr std::uint32_t kSendingBlocks = 66;
// share: in percent (PPLX_COMM_SENDING_SHARE), or 0.
constexpr std::uint32_t sending_blocks(std::uint32_t blocks, std::uint32_t share) {
  return share == 0 ? std::min(blocks, kSendingBlocks) : std::max(1u, blocks * share / 100);
}

// A rank's own rows of a thread block that do not wait until their places are known.
inline constexpr std::uint32_t kMostKeptRows = 64;

// A step takes the large kernels from some number of tokens on, which depends on this.
struct StepShape {
  std::uint32_t gpu_sms = 0;  // multiprocessors of the GPU
  std::uint32_t sms = 0;  // a launch's
  std::uint32_t row_bytes = 0;  // a row of combine's
  std::uint32_t world = 0;
  bool sums = false;  // rows of combine are sums, of several rows of experts
};
// A line holds for GPUs of exactly gpu_sms multiprocessors, for sums or for copies, and up to the other values of `most`.
struct ManyTokens {
  StepShape most;
  std::uint32_t tokens;
};
// The first line that holds counts; none: kManyTokensElsewhere. bench/results/h100-2-gpus.md, by bench/crossover.py: the least
// number measured from which on a dispatch and a combine together are no slower by the large kernels than the usual way, on one of two
// H100, hidden 7168, FP8 out, bfloat16 back. An H200 has the same number of multiprocessors. None was measured in pieces, where no line
// counts.
inline constexpr ManyTokens kManyTokens[] = {
    // Compact.
    {{132, 8, 14336, 2, false}, 64},
    {{132, 16, 14336, 2, false}, 128},
    {{132, 24, 14336, 2, false}, 192},
    {{132, 32, 14336, 2, false}, 256},
    {{132, 48, 14336, 2, false}, 512},
    {{132, 64, 14336, 2, false}, 768},
    {{132, 96, 14336, 2, false}, 1024},
    // All of them, 1,536 tokens: 61 and 104 us in place of 71 and 87, but with places made blank again those would take longer.
    {{132, 132, 14336, 2, false}, 2048},
    // Ragged.
    {{132, 8, 14336, 2, true}, 128},
    {{132, 24, 14336, 2, true}, 256},
    {{132, 32, 14336, 2, true}, 384},
    {{132, 64, 14336, 2, true}, 768},
    {{132, 132, 14336, 2, true}, 2048},
};
inline constexpr std::uint32_t kManyTokensElsewhere = 768;

template <std::size_t n>
constexpr std::uint32_t large_tokens(const ManyTokens (&lines)[n], const StepShape& s) {
  for (const auto& [most, tokens] : lines)
    if (s.gpu_sms == most.gpu_sms && s.sums == most.sums && s.sms <= most.sms && s.row_bytes <= most.row_bytes && s.world <= most.world)
      return tokens;
  return kManyTokensElsewhere;
}
// All ranks have the same number, from the first step to the last, since it decides how rows of combine look and which places are
// blank. So they agree on the largest of theirs, and set_num_sms() leaves it as it is.
constexpr std::uint32_t large_tokens(const StepShape& s) { return large_tokens(kManyTokens, s); }

// Tokens whose rows are counted together. Long chunks are fewer to add up and to plan, short ones spread the tokens evenly over all
// multiprocessors, and the first one of two is sent while the other is planned.
inline constexpr std::uint32_t kLeastTokensOfChunk = 8, kMostTokensOfChunk = 32, kMostChoicesOfChunk = 256;
constexpr std::uint32_t tokens_of_chunk(std::uint32_t tokens, std::uint32_t top_k, std::uint32_t blocks) {
  const auto most_of_block = [&](std::uint32_t chunk) { return ((tokens + chunk - 1) / chunk + blocks - 1) / blocks * chunk; };
  std::uint32_t chunk = kLeastTokensOfChunk;
  while (chunk < kMostTokensOfChunk && 2 * chunk * blocks < tokens && 2 * chunk * top_k <= kMostChoicesOfChunk &&
         most_of_block(2 * chunk) <= most_of_block(chunk))
    chunk *= 2;
  return chunk;
}

// Sums of all chunks' counts, of which each chunk adds to one: additions to one word take turns.
inline constexpr std::uint32_t kTotals = 8;

// Rows of one source that a worker waits for together, at most, in pieces and inside a node: where all of a thread block's workers
// have few, less, as the last ones to come would be one worker's alone. Runs of 8 in place of 4: 4,096 tokens of Ragged on 24
// multiprocessors of two H100 took 291 us in place of 281.
inline constexpr std::uint32_t kRowsOfRun = 8, kRowsOfCarriedRun = 4;
constexpr std::uint32_t rows_of_run(std::uint32_t rows, std::uint32_t blocks) {
  // No std::min: its reference to a constant of the host is nothing that a kernel can read.
  const std::uint32_t fair = rows / (blocks * kWorkers);
  return fair < 2 ? 2 : fair < kRowsOfCarriedRun ? fair : kRowsOfCarriedRun;
}

// Tokens, or rows of a combine, that a warp tells peers of with one fence: at most kMostToldTogether, and a fourth of what each sender has,
// so that peers have something to receive from early on.
inline constexpr std::uint32_t kMostToldTogether = 4;
constexpr std::uint32_t told_together(std::uint32_t all, std::uint32_t senders) {
  const std::uint32_t fourth = all / (4 * senders);
  return fourth < 1 ? 1 : fourth < kMostToldTogether ? fourth : kMostToldTogether;
}

// ---- combine ----

// Workers of a thread block of a large combine, and those of them that send first.
inline constexpr std::uint32_t kCombiners = 10, kSendingCombiners = 5;
inline constexpr int kVectorsOfTile = 7;  // sixteen bytes each, of a lane
inline constexpr std::uint32_t kSumTiles = 4, kSumTilesOut = 2;
// A plain combine whose rows are only copied has a loader, a storer and a teller (large/copy.cuh), warps that add up, and a dealer:
// eleven, so that each thread can have 168 registers. A part of a row has kVectorsOfAdder vectors for each lane that
// adds, and shared memory has kDealtParts parts.
inline constexpr std::uint32_t kAdders = 7, kDealtParts = 9;
inline constexpr int kVectorsOfAdder = 4;
// Rows that are only copied: half a row of 7168 numbers at a time, of which some are on their way in or out; runs of them that end
// with what is on its way. A worker that copies has fewer.
inline constexpr std::uint32_t kCopyBytes = 7168, kCopyPlaces = 9, kCopiedRuns = 8, kCopies = 3;
// One whose rows are sums has two teams of adders and a dealer, and a warp that stores and tells. 4,096 tokens of Ragged on 24
// multiprocessors of two H100: 404 us with seven adders a team, though 17 warps have 96 registers and spill 80 bytes, 422 with four
// of seven vectors each, 457 with fourteen of two. Neither team waits for the other's adders, or for its memory: parts on their way
// in, and sums on their way out.
inline constexpr std::uint32_t kAddersOfTeam = 7, kPartsOfTeam = 6, kPartsOut = 3;
inline constexpr int kVectorsOfTeam = 4;
// One whose rows are fetched: nothing is sent, so there is memory for more parts. They are what is on its way from peers.
inline constexpr std::uint32_t kFetchingTeams = 2, kAddersOfFetchingTeam = 4, kPartsOfFetchingTeam = 7;
inline constexpr int kVectorsOfFetchingTeam = 7;
// With more thread blocks rows are stored, though their experts made them where peers could fetch them: a link carries more stores
// than reads. 4,096 tokens on 8 multiprocessors of two H200 took 220 us in place of 495, on 24 187 in place of 234, on 32 191 in
// place of 225, on all 190 in place of 180.
inline constexpr std::uint32_t kOfferingBlocks = 48;

static_assert(kLargeWarps <= kMostWarps);

}  // namespace pplx::cuda
