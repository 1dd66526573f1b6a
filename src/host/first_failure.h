// The first failure of an AllToAll. A word tells it to all waiting threads, on this rank or another; the words of a message do not
// fit in it and are kept here.
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
    if (!store_if_zero(word, abort_word(abort))) return;   // a peer may have been faster, with words of its own
    told_ = abort_word(abort);
    message_ = message;
  }
  // In the words that came with it, if any did.
  std::string text(std::uint64_t word, const Config& c) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (word == told_ && !message_.empty()) return message_;
    const Abort abort = read_abort(word, c.world);
    return abort_text(abort, abort.origin == c.rank ? network_of(abort.peer) : "");
  }
  void forget() {
    const std::lock_guard<std::mutex> lock(mutex_);
    told_ = 0;
    message_.clear();
  }

  void name_networks(std::vector<std::string> by_peer) { networks_ = std::move(by_peer); }   // before the first step
  // The network that reaches `peer`; empty: its memory is mapped.
  std::string network_of(std::uint32_t peer) const { return peer < networks_.size() ? networks_[peer] : std::string(); }

 private:
  mutable std::mutex mutex_;
  std::uint64_t told_ = 0;
  std::string message_;
  std::vector<std::string> networks_;
};

}  // namespace pplx
