// Threads that help the calling thread with a phase. They sleep between phases. A rank with a small share of the machine has none.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../host/fork_check.h"
#include "phase.h"

namespace pplx::cpu {

// sched_yield after a few tries: ranks may be more than cores, and a spinning thread would hold up the one it waits for.
// It naps only after a long wait, because a thread that wakes stands behind all that yield. With four ranks and their proxies on
// two busy cores, naps of 5 us after 50 us of waiting made a round trip of one token five times as long or more, one of 128 tokens
// two to three times. But then it must nap: where some twenty threads do nothing but yield, Linux 6.18 lets others wait for half a
// minute, its own workers ("workqueue lockup") and ranks that all others wait for.
class Backoff {
 public:
  void pause();
  void reset() { tries_ = 0; }

 private:
  unsigned tries_ = 0;
  bool naps_ = false;
  std::chrono::steady_clock::time_point begun_;
};

class ThreadPool {
  struct State;

 public:
  explicit ThreadPool(unsigned helpers);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned helpers() const { return static_cast<unsigned>(state_->threads.size()); }

  // While it lives, the helpers work on `phase`; afterwards none does. A pool that is busy with another phase leaves this one to
  // its caller.
  class Help {
   public:
    Help(ThreadPool& pool, PhaseRun& phase);
    ~Help();
    Help(const Help&) = delete;
    Help& operator=(const Help&) = delete;

   private:
    State& state_;
    bool helping_ = false;
  };

 private:
  // Each thread owns it too, so a forked child never destroys it: there the threads are gone, and a condition variable would wait
  // for them.
  struct State {
    void serve();

    std::mutex mutex;
    std::condition_variable wake, idle;
    PhaseRun* phase = nullptr;
    unsigned working = 0;
    std::uint64_t turn = 0;
    std::atomic<bool> leave{false};
    bool stop = false;
    std::vector<std::thread> threads;
  };

  const std::shared_ptr<State> state_ = std::make_shared<State>();
  const ForkCheck fork_;
};

}  // namespace pplx::cpu
