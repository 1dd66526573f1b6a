// Values chosen by measuring (bench/notes.md); large/tuning.h has those of large steps. None changes a bit of any result.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pplx::cuda {

// ---- dispatch ----

// Warps of a thread block: those that send, one that publishes what they have stored, and those that receive from the start. A row
// of 7168 codes is 448 threads' sixteen bytes each. One thread block per multiprocessor: 640 threads have 96 registers each.
inline constexpr std::uint32_t kSenderWarps = 15, kReceiverWarps = 4;
inline constexpr std::uint32_t kDispatchWarps = kSenderWarps + 1 + kReceiverWarps;
inline constexpr std::uint32_t kSenders = 32 * kSenderWarps;
inline constexpr std::uint32_t kDispatchThreads = 32 * kDispatchWarps;

// Tokens of a send unit. A warp plans each, so one more costs a thread block less than another unit does; but where thread blocks
// are enough to fill the link, two units of each leave it fewer gaps.
inline constexpr std::uint32_t kMostTokensOfUnit = 8, kFewBlocks = 48;
static_assert(kMostTokensOfUnit <= kSenderWarps);
constexpr std::uint32_t tokens_per_unit(std::uint32_t tokens, std::uint32_t blocks) {
  const std::uint32_t at_once = (tokens + blocks - 1) / blocks;
  if (at_once <= (blocks <= kFewBlocks ? kMostTokensOfUnit : 2)) return std::max(1u, at_once);
  return std::min(kMostTokensOfUnit, (at_once + 1) / 2);
}

// Parts of tokens that a sender loads while it stores one, where it has the registers for them: parts of at most kBytesOfPart.
inline constexpr int kPartsAhead = 2;
inline constexpr std::uint32_t kBytesOfPart = 32;

// A warp receives this much of a row at once, seven 16-byte vectors a lane.
inline constexpr std::uint32_t kPartBytes = 3584;

// The first rows of a block show by themselves that they have come: no release stands between a row and its reader, which makes
// their places blank again. Beyond, the release costs less than the blanks.
inline constexpr std::uint32_t kShowingRows = 1024;

// ---- combine ----

inline constexpr std::uint32_t kCombineWarps = 12;
inline constexpr std::uint32_t kCombineThreads = 32 * kCombineWarps;

// 16 bytes each, that a lane sums at once: a strip of a row. Small steps give every strip to a warp of its own, smaller ones while
// there are warps for them; in larger steps a warp has two after each other, and looks the row's places up once.
inline constexpr int kSentVectors = 4, kSentVectorsOfFew = 2, kReceivedVectors = 2, kReceivedVectorsOfFew = 1;
constexpr int received_vectors(int sent) { return sent == kSentVectorsOfFew ? kReceivedVectorsOfFew : kReceivedVectors; }
// Copies leave most of the work to receivers: once a warp of theirs has more than two strips, these are wider.
inline constexpr int kReceivedVectorsOfCopies = 4;
inline constexpr std::uint32_t kStripsTogether = 2;
// Rows of Compact are only copied, so a warp has all of a strip on its way before it stores any of it. copied_vectors: the least number of
// vectors with which no warp has two strips; where that is more than a warp holds, long strips pay on few multiprocessors alone, and two
// short ones after each other on some more.
inline constexpr int kCopiedVectors = 14;
inline constexpr std::uint32_t kBlocksOfLongStrips = 32;
constexpr int copied_vectors(std::uint64_t rows, std::uint32_t row_bytes, std::uint32_t blocks) {
  const std::uint64_t strips = std::max<std::uint64_t>(1, kCombineWarps * blocks / std::max<std::uint64_t>(1, rows));
  const std::uint64_t vectors = (row_bytes + 511) / 512, wide = (vectors + strips - 1) / strips;
  if (wide > kCopiedVectors && blocks > kBlocksOfLongStrips) return kSentVectors;
  return static_cast<int>(std::clamp<std::uint64_t>(wide, kSentVectors, kCopiedVectors));
}
constexpr std::uint32_t copies_together(int vectors, std::uint32_t blocks) {
  return vectors > kSentVectors || blocks > kFewBlocks ? 1 : kStripsTogether;
}
constexpr bool sends_few(std::uint64_t rows, std::uint32_t strips, std::uint32_t blocks) {
  return rows * strips <= std::uint64_t{kCombineWarps} * blocks;
}

// Warps that receive from the start, while the link is behind, in a combine whose warps would send several runs of strips each. Copies of
// many multiprocessors fill the link with fewer warps.
inline constexpr std::uint32_t kReceiversOfCombine = 4, kReceiversOfCopies = 6, kBlocksOfFewSenders = 65;
constexpr std::uint32_t receivers_of_combine(std::uint32_t units, std::uint32_t blocks, bool copies) {
  const std::uint32_t warps = kCombineWarps * blocks;
  if (units <= 2 * warps) return 0;
  return copies && blocks >= kBlocksOfFewSenders && units > 4 * warps ? kReceiversOfCopies : kReceiversOfCombine;
}

// Thread blocks of a launch that has the GPU to itself. Two of dispatch would leave each thread 48 registers, and it spills.
inline constexpr std::uint32_t kDispatchBlocksPerSm = 1, kCombineBlocksPerSm = 1;

// A thread block looks for untaken shares kPatientLooks times, 10 us in all, before it takes one: others may begin meanwhile.
inline constexpr std::uint32_t kPatientLooks = 20, kBetweenLooksNs = 500;

// Multiprocessors that steps in flight, or beside kernels of the caller that wait for them, leave to others.
inline constexpr std::uint32_t kSmsLeft = 4;

inline constexpr std::uint32_t kMostWarps = kDispatchWarps;  // a thread block's, in any launch
static_assert(kCombineWarps <= kMostWarps);

}  // namespace pplx::cuda
