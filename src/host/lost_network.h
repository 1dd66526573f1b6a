// A write that failed. It counts a little later, after kDeathGrace: mostly its cause is a death, and what tells of that names the
// rank.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "../protocol/deadlines.h"
#include "failure.h"
#include "fork_check.h"

namespace pplx {

struct LostNetwork {
  Abort abort;
  std::string message;

  // The peer had said goodbye: that is why its network is gone.
  LostNetwork after_goodbye() const {
    LostNetwork explained = *this;
    explained.abort.reason = AbortReason::Closed;
    explained.message = rank_text(abort.peer) + " closed its Communicator, and then " + message;
    return explained;
  }
};

// Tells of the first one when its grace is over, on a thread of its own: for a device whose waits cannot look at a clock.
class LossTeller {
 public:
  using Tell = std::function<void(const LostNetwork&)>;

  ~LossTeller() { listen(nullptr); }

  void lost(LostNetwork loss) {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (state_->lost || !state_->tell) return;
    state_->lost = true;
    state_->over = false;
    state_->loss = std::move(loss);
    state_->thread = std::thread([state = state_] { state->wait_then_tell(); });
  }

  // Null stops listening. A running call has ended when this returns.
  void listen(Tell tell) {
    if (fork_.in_child()) return;
    std::thread thread;
    {
      const std::lock_guard<std::mutex> lock(state_->mutex);
      state_->over = true;
      state_->lost = false;
      thread.swap(state_->thread);
    }
    state_->changed.notify_all();
    if (thread.joinable()) thread.join();
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->tell = std::move(tell);
  }

 private:
  // The thread owns it too, so a forked child, where that thread is gone, never destroys it.
  struct State {
    void wait_then_tell() {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait_for(lock, std::chrono::duration<double>(deadlines::kDeathGrace.seconds), [this] { return over; });
      if (!over) tell(loss);
    }

    std::mutex mutex;
    std::condition_variable changed;
    Tell tell;
    std::thread thread;
    LostNetwork loss;
    bool lost = false, over = false;
  };

  const std::shared_ptr<State> state_ = std::make_shared<State>();
  const ForkCheck fork_;
};

}  // namespace pplx
