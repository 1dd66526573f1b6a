// How a rank learns that something has come. A waiting rank polls words in its own memory, which peers
// or its proxy write. All of them have the step's number, so none is ever reset.
//
//   arrival         arrival[set][signal][peer]: generation (32) | step (32). The block of that signal, from that peer, is there. Written
//                   by the peer, or by this rank's proxy; read by the receive phases.
//   tagged vec16    sixteen bytes: what it says (96) | tag (32), which mixes generation and step. So are counts[set][source][vec16], four
//                   numbers of 24 bits each; the routes of dispatch rows; and the first vec16 of a combine's header, whose tag is its
//                   step and generation. Written by the source's GPU; read by dispatch_recv and combine_recv.
//   blank           in the place of a row: all ones, so this vec16 is not there yet. Its reader makes it blank again.
//                   So are the payload and the scales of a block's first dispatch rows (kShowingRows), and all combine rows, whose
//                   sums never look so.
//   in-row arrival  behind each dispatch row that is not among those first ones, or of which some vec16 looks blank; and behind a combine
//                   row that has a tail. Like arrival, for that row or tail alone. Written by the source's GPU; read by
//                   dispatch_recv and combine_recv.
//
//   pieces          pieces[set][op][peer], of an AllToAll in pieces, or in parts: how many are there, from the first on. The arrival word
//                   stands for the first (pieces.h, parts.h).
//
// Arrival words are stored with release, after what they announce, and loaded with acquire. Pieces are what they announce, and are
// relaxed: a release at system scope takes a GPU 2 us.
//
// Use by device and carrier:
//
//   device, carrier   dispatch: counts       dispatch: rows            combine: rows                  combine: header
//   cpu, mapped       Header word, header    Dispatch word             Combine word                   Combine word
//   cpu, proxy        Dispatch word          Dispatch word             Combine word                   Combine word
//   cuda, mapped      tagged vec16s          blanks, in-row words      blanks; tails: in-row words    tagged vec16
//   cuda, proxy       Dispatch word          pieces                    pieces                         Combine word
//   cuda, relay       tagged vec16s          Dispatch word             as mapped, to the relay        as mapped, to the relay
//
// Weights blocks have the Weights word, rows between replicas come as the rows of a combine do, with the Slice word for their
// header. A proxy's word on cuda lies in pinned host memory, or in the GPU's by GDRCopy; one warp looks there, and passes it on to
// the same word in device memory (src/cuda/remote/proxy.cuh).
#pragma once

#include "heap.h"

namespace pplx {

// A generation starts at 1, so fresh memory has reached nothing.
constexpr std::uint64_t arrival_word(std::uint32_t generation, std::uint32_t step) {
  return std::uint64_t{generation} << 32 | step;
}
constexpr bool arrived(std::uint64_t word, std::uint32_t generation, std::uint32_t step) {
  return static_cast<std::uint32_t>(word >> 32) == generation && step_reached(static_cast<std::uint32_t>(word), step);
}
// True if a word has reached the generation and step of another one.
constexpr bool reached(std::uint64_t word, std::uint64_t wanted) {
  return arrived(word, static_cast<std::uint32_t>(wanted >> 32), static_cast<std::uint32_t>(wanted));
}

// Keeps the last step of a generation among words. Below 0: none yet.
constexpr void note_step(std::int64_t& last, std::uint64_t word, std::uint32_t generation) {
  const auto step = static_cast<std::uint32_t>(word);
  if (word >> 32 == generation && (last < 0 || !step_reached(static_cast<std::uint32_t>(last), step))) last = step;
}

inline constexpr std::uint32_t kBlank = 0xffffffffu;

// Never blank. Two steps have the same only if they lie a good part of 2^32 apart.
constexpr std::uint32_t tag_of(std::uint32_t generation, std::uint32_t step) {
  const std::uint32_t tag = step + generation * 0x9e3779b1u;
  return tag == kBlank ? tag >> 1 : tag;
}

// The first three words of a tagged vec16 that has four numbers.
struct PackedNumbers {
  std::uint32_t words[3];
};
constexpr std::uint32_t kMostOfNumber = 0xffffffu;
constexpr PackedNumbers pack_numbers(const std::uint32_t (&n)[kNumbersOfVec16]) {
  return {{n[0] | n[3] << 24, n[1] | (n[3] >> 8 & 0xffu) << 24, n[2] | n[3] >> 16 << 24}};
}
constexpr void unpack_numbers(const PackedNumbers& p, std::uint32_t (&n)[kNumbersOfVec16]) {
  for (int i = 0; i < 3; ++i) n[i] = p.words[i] & kMostOfNumber;
  n[3] = p.words[0] >> 24 | p.words[1] >> 24 << 8 | p.words[2] >> 24 << 16;
}
static_assert(kMaxChoices <= kMostOfNumber, "a count fits");

// Called by the writer, once the block is stored. `memory`: the waiting rank's heap, as the writer has it mapped.
template <typename Atomics>
PPLX_BOTH void raise_arrival(char* memory, const Heap& heap, const Config& c, Signal signal, std::uint32_t writer,
                             std::uint32_t generation, std::uint32_t step) {
  Atomics::store_release(memory + heap.arrival_at(c, set_of(c, step), signal, writer), arrival_word(generation, step));
}

}  // namespace pplx
