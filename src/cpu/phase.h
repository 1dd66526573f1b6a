// A phase is a row of stages; a stage is groups of units; a group may have to wait for one peer.
//
// Any number of threads may poll(): each claims units of groups that are ready, and returns when nothing is. A blocking call
// is a loop around poll(); a simulation calls it when it likes. Units of one stage touch nothing of each other's.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "../protocol/words.h"
#include "float_environment.h"

namespace pplx::cpu {

// What a blocked phase waits for, in the words of an error message.
struct Waiting {
  std::uint32_t peer = kNoRank;
  Signal signal = Signal::Header;
  std::uint64_t expected = 0;
  std::uint64_t seen = 0;
  const char* what = "";
};

class PhaseRun {
 public:
  virtual ~PhaseRun() = default;

  bool poll() {
    const FloatEnvironment plain;
    for (;;) {
      rethrow();
      const int stage = stage_.load(std::memory_order_acquire);
      if (stage == kFinished) return true;
      if (stage == kNotBegun) {
        if (!begun_.exchange(true)) {
          guarded([&] { advance(0); });
          continue;
        }
        return false;
      }
      bool progress = false;
      for (Group& group : stages_[stage]->groups) progress |= work(stage, group);
      if (!progress && !failed_.load(std::memory_order_acquire) && stage_.load(std::memory_order_acquire) == stage) return false;
    }
  }

  // At any time: a stage once begun stays where it is until the phase goes.
  Waiting waiting() {
    const int stage = stage_.load(std::memory_order_acquire);
    if (stage != kNotBegun && stage != kFinished)
      for (Group& group : stages_[stage]->groups)   // nobody may have asked yet for a group that is ready
        if (!group.ready.load(std::memory_order_acquire) && !ready(stage, group.number)) return waiting(stage, group.number);
    return {};
  }

 protected:
  // Once a stage, by one thread, after all units of the stage before: the units of each group. False: no such stage.
  virtual bool begin(int stage, std::vector<std::uint32_t>& units) = 0;
  virtual bool ready(int, std::uint32_t) { return true; }              // several threads may ask; true stays true
  virtual void run(int stage, std::uint32_t group, std::uint32_t unit) = 0;
  virtual void finished(int, std::uint32_t) {}                         // after a group's last unit; also when it has none
  virtual Waiting waiting(int, std::uint32_t) const { return {}; }

 private:
  static constexpr int kNotBegun = -1, kFinished = 1 << 20, kMostStages = 4;

  struct Group {
    std::uint32_t number = 0, units = 0, claims = 1;   // a group without units is claimed once too, to be finished
    std::atomic<std::uint32_t> next{0}, done{0};
    std::atomic<bool> ready{false};
  };
  struct Stage {
    explicit Stage(const std::vector<std::uint32_t>& units) : groups(units.size()), left(units.size()) {
      for (std::uint32_t i = 0; i < units.size(); ++i) {
        groups[i].number = i;
        groups[i].units = units[i];
        groups[i].claims = units[i] == 0 ? 1 : units[i];
      }
    }
    std::vector<Group> groups;
    std::atomic<std::size_t> left;
  };

  bool work(int stage, Group& group) {
    if (failed_.load(std::memory_order_acquire) || group.next.load(std::memory_order_relaxed) >= group.claims) return false;
    bool progress = false;
    guarded([&] {
      if (!group.ready.load(std::memory_order_acquire)) {
        if (!ready(stage, group.number)) return;
        group.ready.store(true, std::memory_order_release);
      }
      for (std::uint32_t unit; (unit = group.next.fetch_add(1, std::memory_order_relaxed)) < group.claims;) {
        progress = true;
        if (unit < group.units) run(stage, group.number, unit);
        if (group.done.fetch_add(1, std::memory_order_acq_rel) + 1 != group.claims) continue;
        finished(stage, group.number);
        if (stages_[stage]->left.fetch_sub(1, std::memory_order_acq_rel) == 1) advance(stage + 1);
      }
    });
    return progress;
  }

  void advance(int stage) {
    for (;; ++stage) {
      std::vector<std::uint32_t> units;
      if (!begin(stage, units)) {
        stage_.store(kFinished, std::memory_order_release);
        return;
      }
      if (units.empty()) continue;
      stages_[stage] = std::make_unique<Stage>(units);
      stage_.store(stage, std::memory_order_release);
      return;
    }
  }

  template <typename F>
  void guarded(F&& f) {
    try {
      f();
    } catch (...) {
      std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
      failed_.store(true, std::memory_order_release);
    }
  }

  void rethrow() {
    if (!failed_.load(std::memory_order_acquire)) return;
    std::lock_guard<std::mutex> lock(error_mutex_);
    std::rethrow_exception(error_);
  }

  std::atomic<int> stage_{kNotBegun};
  std::atomic<bool> begun_{false}, failed_{false};
  std::unique_ptr<Stage> stages_[kMostStages];
  std::mutex error_mutex_;
  std::exception_ptr error_;
};

}  // namespace pplx::cpu
