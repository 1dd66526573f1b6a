// The abort word: the reason to stop waiting.
//
//   aborts[generation mod kAborts]: set (1) | reason (4) | phase (3) | origin rank (12) | peer (12) | step (32). Written by the
//   rank that fails first, to itself and to every peer that it has mapped, with compare-and-swap: the first one stays. Read by
//   every wait, each time that it has looked in vain for a while.
//
// Ranks that are not mapped hear of it by their control connections; on CUDA the host then says so in Report.abort, which has the
// same form.
#pragma once

#include "heap.h"

namespace pplx {

// Refused: a step that would take the memory of an open one, or a call for a step that is not open.
enum class AbortReason : std::uint8_t { None, Death, Timeout, Fabric, Protocol, Interrupted, Closed, User, Refused };
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
  std::uint32_t origin = kNoRank;   // the rank that noticed
  std::uint32_t peer = kNoRank;     // the rank that it blames
  std::uint32_t step = 0;
};
constexpr std::uint64_t abort_word(const Abort& a) {
  return 1ull << 63 | std::uint64_t(a.reason) << 59 | std::uint64_t(a.phase) << 56 |
         std::uint64_t(a.origin & 0xfffu) << 44 | std::uint64_t(a.peer & 0xfffu) << 32 | a.step;
}
constexpr Abort read_abort(std::uint64_t word) {
  Abort a;
  a.reason = static_cast<AbortReason>(word >> 59 & 15u);
  a.phase = static_cast<Phase>(word >> 56 & 7u);
  a.origin = static_cast<std::uint32_t>(word >> 44) & 0xfffu;
  a.peer = static_cast<std::uint32_t>(word >> 32) & 0xfffu;
  a.step = static_cast<std::uint32_t>(word);
  return a;
}

}  // namespace pplx
