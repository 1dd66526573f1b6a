// The signals of a carrier that GPUs drive themselves (docs/carriers.md). A signal is a count that puts of one kind, for one set and
// from one source, add to: it says how many have landed, and nothing about their order. It is never set back: whoever waits knows how
// many there were when its generation began, and how many are to come.
//
//   DispatchHeader, CombineHeader   one for each turn of the set: the header, with what rows it came with
//   DispatchRows, CombineRows       rows that came by themselves; the header says how many of them there are to be in all
//   Weights                         one for each step in which combine was given weights
//
// They lie where a proxy's arrival words do, and are as many.
#pragma once

#include "heap.h"

namespace pplx {

enum class PutSignal : std::uint8_t { DispatchHeader, DispatchRows, CombineHeader, CombineRows, Weights };
inline constexpr std::uint32_t kPutSignals = 5;
static_assert(kPutSignals == kSignals, "they take the place of the arrival words");

constexpr PutSignal header_signal(Op op) {
  return op == Op::Dispatch ? PutSignal::DispatchHeader : op == Op::Combine ? PutSignal::CombineHeader : PutSignal::Weights;
}
constexpr PutSignal rows_signal(Op op) { return op == Op::Dispatch ? PutSignal::DispatchRows : PutSignal::CombineRows; }

constexpr std::uint64_t signal_at(const Heap& heap, const Config& c, std::uint32_t set, PutSignal signal, std::uint32_t source) {
  return heap.arrival_at(c, set, static_cast<Signal>(signal), source);
}

// How often the set has been used, this step included. The step's number alone has the low bits of it; `known` is a turn of the set not
// long ago, or not far ahead.
constexpr std::uint64_t turn_of(const Config& c, std::uint32_t step, std::uint64_t known) {
  const std::uint32_t mask = 0xffffffffu / c.in_flight;
  const std::uint32_t low = (step - first_step_of_set(c, set_of(c, step))) / c.in_flight + 1;
  const std::uint32_t ahead = (low - static_cast<std::uint32_t>(known)) & mask;
  return ahead <= mask / 2 ? known + ahead : known - (mask - ahead + 1);
}

}  // namespace pplx
