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

}  // namespace pplx
