// The failures of the exchange, and their texts in Python's errors.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "../protocol/abort.h"
#include "../protocol/block.h"

namespace pplx {

// A mistake of the caller: nothing was sent, no step was taken.
struct Misuse : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Another thread closed the AllToAll while this one was in a call. Peers are told nothing.
struct Closed : Misuse {
  using Misuse::Misuse;
};

// A failure of a peer or of the network. It latches.
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

// Turns a report of the control plane into an abort: ranks below 0 are unknown.
inline Abort abort_named(const std::string& reason, int origin, int peer, std::uint32_t step) {
  const auto rank = [](int r) { return r < 0 ? kNoRank : static_cast<std::uint32_t>(r); };
  return {reason == "death"     ? AbortReason::Death
          : reason == "timeout" ? AbortReason::Timeout
          : reason == "closed"  ? AbortReason::Closed
                                : AbortReason::User,
          Phase::None, rank(origin), rank(peer), step};
}

// Reads an abort word that came from elsewhere. A rank that does not exist counts as unknown: passed on as it is, others would take
// this rank's own message for damaged.
inline Abort read_abort(std::uint64_t word, std::uint32_t world) {
  Abort a = read_abort(word);
  if (a.origin >= world) a.origin = kNoRank;
  if (a.peer >= world) a.peer = kNoRank;
  return a;
}

inline std::string rank_text(std::uint32_t rank) {
  return rank == kNoRank ? "an unknown rank" : "rank " + std::to_string(rank);
}

inline std::string word_text(std::uint64_t word) {
  if (word == 0) return "nothing yet";
  return "step " + std::to_string(static_cast<std::uint32_t>(word)) + " (generation " + std::to_string(word >> 32) + ")";
}

// " over NETWORK" for a peer that is reached over one; empty if its memory is mapped.
inline std::string over_text(const std::string& network) { return network.empty() ? "" : " over " + network; }

inline std::string abort_text(const Abort& a, const std::string& network = "") {
  const std::string where = std::string(" (") + phase_name(a.phase) + ", step " + std::to_string(a.step) + ")";
  switch (a.reason) {
    case AbortReason::Death: return rank_text(a.peer) + " died" + where;
    case AbortReason::Timeout:
      if (a.peer == a.origin)
        return rank_text(a.origin) + " gave up waiting for its own kernels" + where + "; timeout= allows more";
      return rank_text(a.origin) + " gave up waiting for " + rank_text(a.peer) + over_text(network) + where +
             "; timeout= allows more";
    case AbortReason::Fabric:
      return a.peer == a.origin ? rank_text(a.origin) + " lost the network" + where
                                : rank_text(a.origin) + " lost the network to " + rank_text(a.peer) + where;
    case AbortReason::Protocol: return rank_text(a.origin) + " received an invalid message from " + rank_text(a.peer) + where;
    case AbortReason::Interrupted: return rank_text(a.origin) + " was interrupted" + where;
    case AbortReason::Closed: return rank_text(a.peer) + " closed its Communicator" + where;
    case AbortReason::Refused: return rank_text(a.origin) + " refused to take a step" + where;
    case AbortReason::User:
    case AbortReason::None: break;
  }
  return rank_text(a.origin) + " aborted" + (a.peer == a.origin || a.peer == kNoRank ? "" : " because of " + rank_text(a.peer)) +
         where;
}

// A mistake that only the device sees, because the host does not count graph replays.
inline std::string refused_text(const Abort& a, std::uint32_t in_flight) {
  const std::string who = rank_text(a.origin), step = " step " + std::to_string(a.step);
  if (a.phase != Phase::DispatchSend)
    return who + (a.phase == Phase::DispatchRecv ? " received" : " combined") + step +
           ", which is not open: a step is received and combined once, in one graph or outside of graphs";
  return who + " dispatched" + step + " while step " + std::to_string(a.step - in_flight) +
         ", whose memory it takes, is still open: combine or release it first, or raise in_flight";
}

// Describes what a rank waits for where blocks go in pieces.
inline std::string round_text(const Abort& a, std::uint32_t piece, bool to_be_read) {
  const bool combine = a.phase == Phase::CombineSend || a.phase == Phase::CombineRecv;
  const std::string what = "piece " + std::to_string(piece) + " of the " + (combine ? "combine" : "dispatch") + " block";
  return to_be_read ? rank_text(a.peer) + " to read " + what : what + " of " + rank_text(a.peer);
}

// Replicas must hold the same tokens, and these do not.
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

// The replicas that are left hold more tokens than they can send, `most` each.
inline std::string too_many_tokens_text(std::uint32_t tokens, std::uint32_t replicas, std::uint32_t most) {
  return "dispatch: " + std::to_string(tokens) + " tokens are more than the " + std::to_string(replicas) +
         " replicas of this group that are left can send, " + std::to_string(most) + " each";
}

// How a peer ended a step otherwise than this rank, by the flags of their combine headers.
inline std::string difference_text(std::uint32_t mine, std::uint32_t theirs) {
  const std::uint32_t differ = mine ^ theirs;
  if ((differ & kReleased) != 0)
    return (theirs & kReleased) != 0 ? "a release() of a step that this rank combines"
                                     : "a combine of a step that this rank released";
  const std::string argument = (differ & kHasTail) != 0 ? "tail=" : (differ & kUsesWeights) != 0 ? "weights=" : "accumulate=";
  return (theirs & differ) != 0 ? "a combine with " + argument + ", which this rank did not pass"
                                : "a combine without " + argument + ", which this rank passed";
}

}  // namespace pplx
