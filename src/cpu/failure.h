// What can go wrong, as the Python errors will name it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "../protocol/words.h"

namespace pplx {

// The caller's mistake: nothing was sent, no step was taken.
struct Misuse : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A peer's, or the network's: it latches.
struct PeerFailure : std::runtime_error {
  PeerFailure(const std::string& message, AbortReason reason, std::uint32_t peer, Phase phase, std::uint32_t step)
      : std::runtime_error(message), reason(reason), peer(peer), phase(phase), step(step) {}

  AbortReason reason;
  std::uint32_t peer;
  Phase phase;
  std::uint32_t step;
  std::string expected;
  std::string seen;
};

// As the control plane names it.
inline AbortReason reason_named(const std::string& name) {
  return name == "death"     ? AbortReason::Death
         : name == "timeout" ? AbortReason::Timeout
         : name == "closed"  ? AbortReason::Closed
                             : AbortReason::User;
}

// In the words of an error message.
inline std::string rank_text(std::uint32_t rank) { return "rank " + std::to_string(rank); }

inline std::string word_text(std::uint64_t word) {
  if (word == 0) return "nothing yet";
  return "step " + std::to_string(static_cast<std::uint32_t>(word)) + " (generation " + std::to_string(word >> 32) + ")";
}

// Of a peer that is reached over it; empty: its memory is mapped.
inline std::string over_text(const std::string& network) { return network.empty() ? "" : " over " + network; }

inline std::string abort_text(const Abort& a, const std::string& network = "") {
  const std::string where = std::string(" (") + phase_name(a.phase) + ", step " + std::to_string(a.step) + ")";
  switch (a.reason) {
    case AbortReason::Death: return rank_text(a.peer) + " died" + where;
    case AbortReason::Timeout:
      return rank_text(a.origin) + " gave up waiting for " + rank_text(a.peer) + over_text(network) + where + "; timeout= allows more";
    case AbortReason::Fabric:
      return a.peer == a.origin ? rank_text(a.origin) + " lost the network" + where
                                : rank_text(a.origin) + " lost the network to " + rank_text(a.peer) + where;
    case AbortReason::Protocol: return rank_text(a.origin) + " received what " + rank_text(a.peer) + " must not send" + where;
    case AbortReason::Interrupted: return rank_text(a.origin) + " was interrupted" + where;
    case AbortReason::Closed: return rank_text(a.peer) + " closed its Communicator" + where;
    case AbortReason::User:
    case AbortReason::None: break;
  }
  return rank_text(a.origin) + " aborted" + (a.peer == a.origin || a.peer == kNoRank ? "" : " because of " + rank_text(a.peer)) + where;
}

// Of replicas, which must hold the same.
struct TokensOf {
  std::uint32_t rank, tokens;
};
inline std::string tokens_apart_text(std::uint32_t step, TokensOf theirs, TokensOf own) {
  const std::string what = theirs.tokens == own.tokens
                               ? rank_text(theirs.rank) + " and " + rank_text(own.rank) + " passed different topk_ids"
                               : rank_text(theirs.rank) + " passed " + std::to_string(theirs.tokens) + " tokens and " +
                                     rank_text(own.rank) + " passed " + std::to_string(own.tokens);
  return what + " to the dispatch of step " + std::to_string(step) + ": replicas must pass the same tokens";
}

// Of replicas that are left, when each of them can send `most`.
inline std::string too_many_tokens_text(std::uint32_t tokens, std::uint32_t replicas, std::uint32_t most) {
  return "dispatch: " + std::to_string(tokens) + " tokens are more than the " + std::to_string(replicas) +
         " replicas of this group that are left can send, " + std::to_string(most) + " each";
}

}  // namespace pplx
