// The signals of a carrier that GPUs drive themselves (docs/carriers.md). A signal is a count that puts of one kind, for one set
// and from one source, add to: it says how many have landed, and nothing about their order. It is never set back: a waiting kernel
// knows how many there were when its generation began, and how many are to come.
//
//   Dispatch, Combine   of part 0, which has the header, one for each turn of the set; of each later part (parts.h) one for each block
//                       that has it
//   Weights             one for each step in which combine was given weights
//   in pieces           (pieces.h) in place of parts: one for each of a slot's two places, which all pieces there add to, a whole block as piece 0
//                       does; and one for the credits of that peer. The next piece of a place goes once the one before is read, and credits
//                       are given in order, so a count says which have come. How many a step has, its headers say
//
// Those of part 0, and of weights, lie where a proxy's arrival words of that name do; in pieces that of the second place and that
// of credits where its words are that count pieces.
#pragma once

#include "heap.h"

namespace pplx {

constexpr std::uint64_t signal_at(const Heap& heap, const Config& c, std::uint32_t set, Op op, std::uint32_t part, std::uint32_t source) {
  return part == 0 ? heap.arrival_at(c, set, signal_of(op), source) : heap.later_signal_at(c, set, op, part, source);
}
inline constexpr std::uint32_t kCreditSignal = kPlaces;  // behind those of the places
constexpr std::uint64_t piece_signal_at(const Heap& heap, const Config& c, std::uint32_t set, Op op, std::uint32_t nth, std::uint32_t source) {
  if (nth == 0) return heap.arrival_at(c, set, signal_of(op), source);
  return heap.count_at(c, nth == kCreditSignal ? heap.consumed : heap.pieces, set, op, source);
}
constexpr std::uint32_t signals_of(const Heap& heap, Op op) {
  if (op == Op::Weights) return 1;
  return heap.in_pieces ? kPlaces + 1 : heap.in_parts ? kMostParts : 1;
}
static_assert(kPlaces + 1 <= kMostParts, "what counts parts counts these");

// How often the set has been used, this step included. The step's number alone has the low bits of it; `known` is a turn of the set
// not long ago, or not far ahead.
constexpr std::uint64_t turn_of(const Config& c, std::uint32_t step, std::uint64_t known) {
  const std::uint32_t mask = 0xffffffffu / c.in_flight;
  const std::uint32_t low = (step - first_step_of_set(c, set_of(c, step))) / c.in_flight + 1;
  const std::uint32_t ahead = (low - static_cast<std::uint32_t>(known)) & mask;
  return ahead <= mask / 2 ? known + ahead : known - (mask - ahead + 1);
}

}  // namespace pplx
