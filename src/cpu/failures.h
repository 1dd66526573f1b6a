// Events that end a wait early. The first failure latches, and this rank tells all that it has mapped.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../host/first_failure.h"
#include "../host/lost_network.h"
#include "blocks.h"

namespace pplx::cpu {

// Monotonic seconds since any fixed moment, for timeouts. A simulation brings its own.
using Clock = std::function<double()>;

class Failures {
 public:
  Failures(const Blocks& blocks, Clock clock);

  // Safe from any thread, and from the proxy. A network that was lost long enough before comes first.
  void fail(const Abort& abort, const std::string& message);
  // Reports a failed write. It takes effect a little later: mostly a death is the cause, and the control connection names the dead
  // rank.
  void lost_network(const Abort& abort, const std::string& message);
  void peer_left(std::uint32_t peer);
  void peer_busy(std::uint32_t peer, bool busy);   // it lives, and says that it comes later: no rank is blamed meanwhile
  void name_networks(std::vector<std::string> by_peer) { first_.name_networks(std::move(by_peer)); }

  // Throws the latched failure, if there is one; the arguments say what this rank was doing.
  void raise(Phase phase = Phase::None, std::uint32_t step = 0);
  [[noreturn]] void latch(PeerFailure failure);
  // Throws if this wait should end: a rank failed, the peer has left, or it took longer than `patience`,
  // and with relays than the rank for which the peer waits is allowed.
  void look(PhaseRun& run, Phase phase, std::uint32_t step, double waited, double patience);
  // Any rank: the one that is waited for may wait for the busy one itself.
  bool someone_is_busy(double at) const;
  // Forgets all. `begin_generation` is called in between: what fail() says comes before both, or after.
  template <typename F>
  void reset(F&& begin_generation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    begin_generation();
    failure_.reset();
    first_.forget();
    network_is_lost_ = false;
    store_release(own_word(), 0);
  }

 private:
  std::uint64_t* own_word() const { return blocks_.abort_of(blocks_.config().rank); }
  std::uint64_t seen();                 // this rank's abort word
  // With node_ranks. True if a mate's proxy took no turn for a while: then the mate is blamed, whatever else may be late.
  bool stands_still(PhaseRun::Watched& watched, std::uint32_t mate, double waited) const;
  void note(const Abort& abort, const std::string& message);
  void tell_node(std::uint64_t word);   // writes the abort words of the ranks that share memory with this one

  const Blocks& blocks_;
  const Clock now_;
  std::mutex mutex_;
  std::vector<std::atomic<double>> left_at_;  // indexed by peer: the time of its goodbye; negative: none yet
  std::atomic<bool> someone_left_{false};
  std::vector<std::atomic<double>> busy_since_;  // indexed by peer; negative: not busy
  std::atomic<bool> someone_was_busy_{false};
  LostNetwork lost_network_;
  double lost_at_ = 0;
  std::atomic<bool> network_is_lost_{false};
  std::unique_ptr<PeerFailure> failure_;
  FirstFailure first_;
};

}  // namespace pplx::cpu
