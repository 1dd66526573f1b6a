// How a rank learns that something has come. Nothing is ever asked for: whoever waits looks at words in its own memory, which peers
// or its proxy write. All of them have the step's number, so none is ever reset.
//
//   arrival         arrival[set][signal][peer]: generation (32) | step (32). The block of that signal, from that peer, is there. Written
//                   by the peer, or by this rank's proxy; read by the receive phases.
//   count           counts[set][source][i]: generation (11) | count (21) | step (32). How many rows come from that source (i = 0), or
//                   choices of local expert i - 1. Written by the source's GPU; read by dispatch_recv.
//   in-row arrival  behind each dispatch row, and behind a combine row that has a tail: like arrival, for that row or tail alone.
//                   Written by the source's GPU; read by dispatch_recv and combine_recv.
//   blank           in the place of each combine row: all ones, so this piece of 16 bytes is not there yet. The writer's piece never
//                   looks so; combine_recv makes each piece blank again once it has read it.
//
// Arrival words are stored with release, after what they announce, and loaded with acquire. Counts and pieces are what they announce,
// and are relaxed: a release at system scope takes a GPU 2 us.
//
// Which carrier uses which:
//
//   device, carrier   dispatch: counts       dispatch: rows            combine: rows                  combine: header
//   cpu, mapped       Header word, header    Dispatch word             Combine word                   Combine word
//   cpu, proxy        Dispatch word          Dispatch word             Combine word                   Combine word
//   cuda, mapped      count words            in-row arrival words      blanks; tails: in-row words    Combine word
//   cuda, proxy       Dispatch word          Dispatch word             Combine word                   Combine word
//
// Weights blocks have the Weights word, rows between replicas come as the rows of a combine do, with the Slice word for their header.
// A proxy's word on cuda lies in pinned host memory, or in the GPU's by GDRCopy; one warp looks there, and passes it on to the same
// word in device memory (src/cuda/remote.cuh).
#pragma once

#include "both.h"
#include "heap.h"
#include "step.h"

namespace pplx {

// A generation starts at 1, so fresh memory has reached nothing.
constexpr std::uint64_t arrival_word(std::uint32_t generation, std::uint32_t step) {
  return std::uint64_t{generation} << 32 | step;
}
constexpr bool arrived(std::uint64_t word, std::uint32_t generation, std::uint32_t step) {
  return static_cast<std::uint32_t>(word >> 32) == generation && step_reached(static_cast<std::uint32_t>(word), step);
}
// Whether a word has reached the generation and step of another one.
constexpr bool reached(std::uint64_t word, std::uint64_t wanted) {
  return arrived(word, static_cast<std::uint32_t>(wanted >> 32), static_cast<std::uint32_t>(wanted));
}

constexpr std::uint64_t count_word(std::uint32_t generation, std::uint32_t step, std::uint32_t count) {
  return std::uint64_t{generation & 0x7ffu} << 53 | std::uint64_t{count & 0x1fffffu} << 32 | step;
}
constexpr std::uint32_t count_of(std::uint64_t word) { return static_cast<std::uint32_t>(word >> 32) & 0x1fffffu; }
constexpr bool is_count(std::uint64_t word, std::uint32_t generation, std::uint32_t step) {
  return word == count_word(generation, step, count_of(word)) && word != 0;
}

inline constexpr std::uint32_t kBlank = 0xffffffffu;

// By the writer, once the block is stored. `memory`: the heap of whoever waits, as the writer has it mapped.
template <typename Atomics>
PPLX_BOTH void raise_arrival(char* memory, const Heap& heap, const Config& c, Signal signal, std::uint32_t writer,
                             std::uint32_t generation, std::uint32_t step) {
  Atomics::store_release(memory + heap.arrival_at(c, set_of(c, step), signal, writer), arrival_word(generation, step));
}

}  // namespace pplx
