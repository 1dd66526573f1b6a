// A phase on its way. Any number of threads may poll(): each claims units of work that can be done now, and returns when there are
// none. A blocking call is a loop around poll(); a simulation calls it when it likes.
//
// A staged run is a sequence of stages; a stage has groups of units; a group may have to wait for one peer. The units of one stage
// touch no memory in common.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../protocol/abort.h"
#include "first_error.h"
#include "float_environment.h"

namespace pplx::cpu {

// The wait that blocks a phase, in the words of an error message.
struct Waiting {
  std::uint32_t peer = kNoRank;
  Signal signal = Signal::Header;
  std::uint64_t expected = 0;
  std::uint64_t seen = 0;
  std::string what;
  std::uint32_t by = kNoRank;          // the relay to which it comes, where this rank reads it
  double longer = 0;                   // beyond `timeout`: for the peer to blame the rank for which it waits itself
  std::uint32_t piece = kNoPiece;      // the piece that is waited for; `seen` then counts the pieces that are there
  bool to_be_read = false;             // the wait is for the peer to read it, not to send it

  static constexpr std::uint32_t kNoPiece = ~0u;
};

class PhaseRun {
 public:
  virtual ~PhaseRun() = default;
  virtual bool poll() = 0;             // true: it is done. Throws what failed it
  virtual Waiting waiting() = 0;       // may be called at any time
  // Adds the time to each peer that is waited for; a run in pieces to the first of them.
  virtual void add_wait(double seconds, std::vector<double>& by_peer) {
    if (const Waiting w = waiting(); w.peer < by_peer.size()) by_peer[w.peer] += seconds;
  }

  // The last look at a mate's proxy, of a wait that has taken too long.
  struct Watched {
    std::uint32_t rank = kNoRank;
    std::uint64_t turns = 0;
    double since = 0;
  } watched;
};

class StagedRun : public PhaseRun {
 public:
  bool poll() override {
    const FloatEnvironment plain;
    for (;;) {
      errors_.rethrow();
      const int stage = stage_.load(std::memory_order_acquire);
      if (stage == kFinished) return true;
      if (stage == kNotBegun) {
        if (!begun_.exchange(true)) {
          errors_.guarded([&] { advance(0); });
          continue;
        }
        return false;
      }
      bool progress = false;
      for (Group& group : stages_[stage]->groups) progress |= work(stage, group);
      if (!progress && !errors_.failed() && stage_.load(std::memory_order_acquire) == stage) return false;
    }
  }

  // Takes what poll() has just seen.
  void add_wait(double seconds, std::vector<double>& by_peer) override {
    const int stage = stage_.load(std::memory_order_acquire);
    if (stage == kNotBegun || stage == kFinished) return;
    for (const Group& group : stages_[stage]->groups)
      if (!group.ready.load(std::memory_order_relaxed))
        if (const std::uint32_t peer = awaited(stage, group.number); peer != kNoRank) by_peer[peer] += seconds;
  }

  // A stage once begun stays where it is for the phase's lifetime.
  Waiting waiting() override {
    const int stage = stage_.load(std::memory_order_acquire);
    if (stage != kNotBegun && stage != kFinished)
      for (Group& group : stages_[stage]->groups)
        // A group may be ready that no thread has asked yet.
        if (!group.ready.load(std::memory_order_acquire) && !ready(stage, group.number)) return waiting_of(stage, group.number);
    return {};
  }

 protected:
  // The units of each group of a stage. Called once per stage, by one thread, after all units of the stage before. False: no such
  // stage.
  virtual bool begin(int stage, std::vector<std::uint32_t>& units) = 0;
  virtual bool ready(int, std::uint32_t) { return true; }              // several threads may call it; true stays true
  virtual void run(int stage, std::uint32_t group, std::uint32_t unit) = 0;
  // Called after a group's last unit; also for a group without units
  virtual void finished(int, std::uint32_t) {}
  virtual Waiting waiting_of(int, std::uint32_t) const { return {}; }
  virtual std::uint32_t awaited(int, std::uint32_t) const { return kNoRank; }   // the rank whose rows a group waits for

 private:
  static constexpr int kNotBegun = -1, kFinished = 1 << 20, kMostStages = 4;

  struct Group {
    std::uint32_t number = 0, units = 0, claims = 1;   // a group without units is claimed once too, so that it is finished
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
    if (errors_.failed() || group.next.load(std::memory_order_relaxed) >= group.claims) return false;
    bool progress = false;
    errors_.guarded([&] {
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

  std::atomic<int> stage_{kNotBegun};
  std::atomic<bool> begun_{false};
  std::unique_ptr<Stage> stages_[kMostStages];
  FirstError errors_;
};

// Returns the number of units that `rows` rows make. One is what a thread does between two looks at other work.
inline std::uint32_t units_of(std::uint64_t rows, std::uint64_t row_bytes, std::uint32_t* rows_per_unit) {
  constexpr std::uint64_t kUnitBytes = 64 * 1024;
  *rows_per_unit = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, kUnitBytes / std::max<std::uint64_t>(1, row_bytes)));
  return static_cast<std::uint32_t>((rows + *rows_per_unit - 1) / *rows_per_unit);
}

}  // namespace pplx::cpu
