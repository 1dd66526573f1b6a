// The first failure of an AllToAll. A word tells it to all who wait, on this rank or another; the words of a message do not fit in it
// and are kept here.
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "atomic.h"
#include "failure.h"

namespace pplx {

class FirstFailure {
 public:
  // Unless `word` has one already. Safe from any thread.
  void tell(std::uint64_t* word, const Abort& abort, const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (store_if_zero(word, abort_word(abort))) message_ = message;   // a peer may have been faster, with words of its own
  }
  // The message that came with the word; empty: none did.
  std::string message() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return message_;
  }
  void forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    message_.clear();
  }

  void name_networks(std::vector<std::string> by_peer) { networks_ = std::move(by_peer); }   // before the first step
  // By which `peer` is reached; empty: its memory is mapped.
  std::string network_of(std::uint32_t peer) const { return peer < networks_.size() ? networks_[peer] : std::string(); }

 private:
  mutable std::mutex mutex_;
  std::string message_;
  std::vector<std::string> networks_;
};

}  // namespace pplx
