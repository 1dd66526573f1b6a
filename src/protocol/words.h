// The 64-bit words that ranks, phases and the proxy signal each other with. Each is written whole, with a release store,
// and read with an acquire load; none is ever reset.
#pragma once

#include "block.h"
#include "step.h"

namespace pplx {

// Arrival: generation (32) | step (32). A generation starts at 1, so fresh memory has reached nothing.
constexpr std::uint64_t arrival_word(std::uint32_t generation, std::uint32_t step) {
  return std::uint64_t{generation} << 32 | step;
}
constexpr bool arrived(std::uint64_t word, std::uint32_t generation, std::uint32_t step) {
  return static_cast<std::uint32_t>(word >> 32) == generation && step_reached(static_cast<std::uint32_t>(word), step);
}

// Count: generation (11) | count (21) | step (32). What arrives is in the word itself, so it needs no release: a GPU sends the
// counts of a dispatch so, about 2 us earlier than a header and its arrival word.
constexpr std::uint64_t count_word(std::uint32_t generation, std::uint32_t step, std::uint32_t count) {
  return std::uint64_t{generation & 0x7ffu} << 53 | std::uint64_t{count & 0x1fffffu} << 32 | step;
}
constexpr std::uint32_t count_of(std::uint64_t word) { return static_cast<std::uint32_t>(word >> 32) & 0x1fffffu; }
constexpr bool is_count(std::uint64_t word, std::uint32_t generation, std::uint32_t step) {
  return word == count_word(generation, step, count_of(word)) && word != 0;
}

// Which arrival words a rank has, each per set and per peer. A header's word may be raised before its block's.
enum class Signal : std::uint8_t { Header, Dispatch, Combine, Weights, Share };
inline constexpr std::uint32_t kSignals = 5;
constexpr Signal signal_of(Op op) {
  return op == Op::Dispatch ? Signal::Dispatch : op == Op::Combine ? Signal::Combine : Signal::Weights;
}

// Mailbox, kernel to proxy: final (1) | rows ready (31) | step (32).
struct Mail {
  std::uint32_t step = 0;
  std::uint32_t rows = 0;
  bool final = false;
};
constexpr std::uint64_t mail_word(std::uint32_t step, std::uint32_t rows, bool final) {
  return std::uint64_t{final} << 63 | std::uint64_t{rows & 0x7fffffffu} << 32 | step;
}
constexpr Mail read_mail(std::uint64_t word) {
  return {static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32) & 0x7fffffffu, (word >> 63) != 0};
}

// Abort: set (1) | reason (3) | phase (4) | origin rank (12) | peer (12) | step (32). The first one stored wins.
enum class AbortReason : std::uint8_t { None, Death, Timeout, Fabric, Protocol, Interrupted, Closed, User };
enum class Phase : std::uint8_t { None, DispatchSend, DispatchRecv, CombineSend, CombineRecv, Weights };

constexpr const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::DispatchSend: return "dispatch_send";
    case Phase::DispatchRecv: return "dispatch_recv";
    case Phase::CombineSend: return "combine_send";
    case Phase::CombineRecv: return "combine_recv";
    case Phase::Weights: return "combine_send (weights)";
    case Phase::None: break;
  }
  return "between steps";
}

inline constexpr std::uint32_t kNoRank = 0xfff;

struct Abort {
  AbortReason reason = AbortReason::None;
  Phase phase = Phase::None;
  std::uint32_t origin = kNoRank;   // who noticed
  std::uint32_t peer = kNoRank;     // whom it blames
  std::uint32_t step = 0;
};
constexpr std::uint64_t abort_word(const Abort& a) {
  return 1ull << 63 | std::uint64_t(a.reason) << 60 | std::uint64_t(a.phase) << 56 |
         std::uint64_t(a.origin & 0xfffu) << 44 | std::uint64_t(a.peer & 0xfffu) << 32 | a.step;
}
constexpr Abort read_abort(std::uint64_t word) {
  Abort a;
  a.reason = static_cast<AbortReason>(word >> 60 & 7u);
  a.phase = static_cast<Phase>(word >> 56 & 15u);
  a.origin = static_cast<std::uint32_t>(word >> 44) & 0xfffu;
  a.peer = static_cast<std::uint32_t>(word >> 32) & 0xfffu;
  a.step = static_cast<std::uint32_t>(word);
  return a;
}

}  // namespace pplx
