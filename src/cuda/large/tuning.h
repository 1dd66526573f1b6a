// Values of large steps, chosen by measuring: bench/notes.md has the figures. None changes a bit of any result.
#pragma once

#include <cstddef>

#include "../common/tuning.h"

namespace pplx::cuda {

// ---- dispatch ----

// Bytes of bulk copies in flight to peers, of all senders of a GPU. With more, receivers wait behind copies that the link does not take.
inline constexpr std::uint32_t kBytesOnTheirWay = 3 << 19;
constexpr std::uint32_t senders_of(std::uint32_t blocks, std::uint32_t bytes_each, std::uint32_t most) {
  return std::min(most, (kBytesOnTheirWay - 1) / (blocks * bytes_each) + 1);
}

// A thread block has a warp that plans, two that find out what has come, and workers.
inline constexpr std::uint32_t kWorkers = 12;

// Workers have roles (large/load.cuh), and one warp more tells of rows: with 16 warps a thread has 128 registers, with more
// 96. A team quantises a token at a time, or a part of it, up to kQuantiserBytes each.
inline constexpr std::uint32_t kTeams = 3, kOfTeam = 2, kQuantiserBytes = 7168;
inline constexpr std::uint32_t kQuantisers = kTeams * kOfTeam;
inline constexpr std::uint32_t kLargeWarps = kWorkers + 4, kLargeThreads = 32 * kLargeWarps;
// Tokens on their way in, which leave for registers at once; rows on their way out.
inline constexpr std::uint32_t kTokensIn = 6, kRowsOut = 12;
// Warps that store rows, a place of the ring each.
inline constexpr std::uint32_t kStorers = 3;
// Tokens that are looked up together; how many such batches are under way, and are told of with one fence at most.
inline constexpr std::uint32_t kTokensTogether = 4, kBatches = 8;
// Bytes of rows that a GPU has in flight to peers, though each thread block may have two tokens. With more, loads and stores of many
// multiprocessors wait for the link; few have gaps with less.
inline constexpr std::uint64_t kRowBytesOfFew = 8 << 20, kRowBytesOfMany = 4 << 20;
inline constexpr std::uint32_t kFewSenders = 48;
// Tokens of a thread block, whose choices are spread evenly over `living` ranks.
constexpr std::uint32_t tokens_on_their_way(std::uint32_t senders, std::uint32_t row_bytes, std::uint32_t living, std::uint32_t top_k) {
  float without = 1;  // the part of tokens that a rank gets no row of
  for (std::uint32_t i = 0; i < top_k; ++i) without *= 1 - 1.0f / static_cast<float>(living);
  const float rows = static_cast<float>(living - 1) * (1 - without);
  const std::uint64_t bytes = senders <= kFewSenders ? kRowBytesOfFew : kRowBytesOfMany;
  const auto fair = static_cast<std::uint32_t>(bytes / (senders * static_cast<std::uint64_t>(rows * row_bytes) + 1));
  return fair < 2 ? 2 : fair;
}
// Thread blocks that fill the link. Where a launch has more, the others receive from the start. What fills it for several peers, whose rows
// are copies of the same tokens, are fewer: a thread block that sends hardly receives meanwhile, so at most half of them send, if there are
// enough to quantise many tokens in time. Receivers of sums have more to store.
inline constexpr std::uint32_t kSendingBlocks = 66, kSendingBlocksToMany = 44;
inline constexpr std::uint32_t kLeastHalvedOfCopies = 16, kLeastHalvedOfSums = 32, kLeastTokensOfHalf = 768;
struct SendShare {
  std::uint32_t percent = 0;  // PPLX_COMM_SENDING_SHARE, or 0: as tuned
  std::uint32_t living = 0, tokens = 0;
  bool sums = false;
};
constexpr std::uint32_t sending_blocks(std::uint32_t blocks, const SendShare& s) {
  if (s.percent != 0) return std::max(1u, blocks * s.percent / 100);
  if (s.living <= 2 || s.tokens < kLeastTokensOfHalf || blocks < (s.sums ? kLeastHalvedOfSums : kLeastHalvedOfCopies))
    return std::min(blocks, kSendingBlocks);
  return std::min(blocks / 2, s.sums ? kSendingBlocks : kSendingBlocksToMany);
}
// In rounds, where senders wait for receivers.
inline constexpr std::uint32_t kSendingShareInRounds = 50;

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
struct LargeTokens {
  StepShape most;
  std::uint32_t tokens;
};
// The first line that holds counts; none: kLargeTokensElsewhere. The least number from which on a combine is about as fast by the large
// kernels: bench/crossover.py on two H200, on four, and with four ranks on two. In pieces steps of more than Config::whole_tokens are large.
inline constexpr LargeTokens kLargeTokens[] = {
    // Compact.
    {{132, 8, 14336, 8, false}, 64},
    {{132, 16, 14336, 8, false}, 96},
    {{132, 24, 14336, 8, false}, 160},
    {{132, 32, 14336, 8, false}, 256},
    {{132, 48, 14336, 8, false}, 512},
    {{132, 64, 14336, 8, false}, 768},
    {{132, 96, 14336, 8, false}, 1024},
    {{132, 132, 14336, 8, false}, 1536},
    // Ragged.
    {{132, 8, 14336, 8, true}, 128},
    {{132, 24, 14336, 8, true}, 256},
    {{132, 32, 14336, 8, true}, 320},
    {{132, 64, 14336, 8, true}, 768},
    {{132, 132, 14336, 8, true}, 2048},
};
inline constexpr std::uint32_t kLargeTokensElsewhere = 768;

template <std::size_t n>
constexpr std::uint32_t large_tokens(const LargeTokens (&lines)[n], const StepShape& s) {
  for (const auto& [most, tokens] : lines)
    if (s.gpu_sms == most.gpu_sms && s.sums == most.sums && s.sms <= most.sms && s.row_bytes <= most.row_bytes && s.world <= most.world)
      return tokens;
  return kLargeTokensElsewhere;
}
// All ranks agree on the largest number, for all steps: it decides how rows of combine look and which places are blank. Dispatches, whose
// kinds understand each other, are large from kLargeDispatch times that number on.
constexpr std::uint32_t large_tokens(const StepShape& s) { return large_tokens(kLargeTokens, s); }
inline constexpr std::uint32_t kLargeDispatch = 2;

// Tokens whose rows are counted together. Long chunks are fewer to add up and to plan; short ones spread the tokens evenly. Where there are
// fewer than kFewTokensOfChunk for each thread block, every block has some.
inline constexpr std::uint32_t kFewTokensOfChunk = 8, kMostTokensOfChunk = 32, kMostChoicesOfChunk = 256;
constexpr std::uint32_t tokens_of_chunk(std::uint32_t tokens, std::uint32_t top_k, std::uint32_t blocks) {
  const auto most_of_block = [&](std::uint32_t chunk) { return ((tokens + chunk - 1) / chunk + blocks - 1) / blocks * chunk; };
  std::uint32_t chunk = 1;
  while (chunk < kFewTokensOfChunk && chunk * blocks < tokens) chunk *= 2;
  while (chunk < kMostTokensOfChunk && 2 * chunk * blocks < tokens && 2 * chunk * top_k <= kMostChoicesOfChunk &&
         most_of_block(2 * chunk) <= most_of_block(chunk))
    chunk *= 2;
  return chunk;
}

// Sums of all chunks' counts, of which each chunk adds to one: additions to one word take turns.
inline constexpr std::uint32_t kTotals = 8;

// Rows of one source that a worker waits for together, at most. Less where workers have few: the last rows to come would be one worker's
// alone.
inline constexpr std::uint32_t kRowsOfCarriedRun = 4;
constexpr std::uint32_t rows_of_run(std::uint32_t rows, std::uint32_t blocks) {
  // No std::min: its reference to a constant of the host is nothing that a kernel can read.
  const std::uint32_t fair = rows / (blocks * kWorkers);
  return fair < 1 ? 1 : fair < kRowsOfCarriedRun ? fair : kRowsOfCarriedRun;
}

// Tokens, or rows of a combine, that a warp tells peers of with one fence: at most a fourth of what each sender has.
inline constexpr std::uint32_t kMostToldTogether = 4;
constexpr std::uint32_t told_together(std::uint32_t all, std::uint32_t senders) {
  const std::uint32_t fourth = all / (4 * senders);
  return fourth < 1 ? 1 : fourth < kMostToldTogether ? fourth : kMostToldTogether;
}

// ---- combine ----

// A combine whose rows are copied (large/copy.cuh): with its adders it has eleven warps, and a thread 168 registers. A part of a row has
// kVectorsOfAdder vectors for each lane that adds, and shared memory has kDealtParts parts.
inline constexpr std::uint32_t kAdders = 7, kDealtParts = 9;
inline constexpr int kVectorsOfAdder = 4;
// Bytes that are copied at a time, copies and runs on their way.
inline constexpr std::uint32_t kCopyBytes = 7168, kCopyPlaces = 9, kCopiedRuns = 8;
// A combine whose rows are sums: two teams of adders and a dealer. Seven adders a team are fastest, though 17 warps have 96 registers and
// spill 80 bytes. Neither team waits for the other's adders, or for its memory: parts on their way in, and sums on their way out.
inline constexpr std::uint32_t kAddersOfTeam = 7, kPartsOfTeam = 6, kPartsOut = 3;
inline constexpr int kVectorsOfTeam = 4;
// Teams that handle every combine: with at most 12 warps a thread has 168 registers.
inline constexpr std::uint32_t kWideAdders = 4;
inline constexpr int kVectorsOfWide = 7;

static_assert(kLargeWarps <= kMostWarps);

}  // namespace pplx::cuda
