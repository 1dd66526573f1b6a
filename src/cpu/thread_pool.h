// Threads that help the calling one with a phase. They sleep between phases, and there are none by default on a small share
// of a machine.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "phase.h"

namespace pplx::cpu {

// sched_yield after a few tries: ranks may be more than cores, and a spinning thread would hold up the one it waits for.
// A nap only after a long wait: who wakes stands behind all who yield. With four ranks and their proxies on two busy cores, naps of
// 5 us after 50 us of waiting made a round trip of one token take five times as long and more, one of 128 tokens twice to three
// times. But then a nap it must be: where some twenty threads do nothing but yield, Linux 6.18 lets others wait for half a minute,
// its own workers ("workqueue lockup") and ranks that everybody waits for.
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
 public:
  explicit ThreadPool(unsigned helpers);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  unsigned helpers() const { return static_cast<unsigned>(threads_.size()); }

  // While it lives, helpers work on `phase`; when it is gone, none does any more. A pool that is busy with another phase
  // leaves this one to its caller.
  class Help {
   public:
    Help(ThreadPool& pool, PhaseRun& phase);
    ~Help();
    Help(const Help&) = delete;
    Help& operator=(const Help&) = delete;

   private:
    ThreadPool& pool_;
    bool helping_ = false;
  };

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  PhaseRun* phase_ = nullptr;
  unsigned working_ = 0;
  std::uint64_t turn_ = 0;
  std::atomic<bool> leave_{false};
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace pplx::cpu
