// The blocking calls that run on an AllToAll, and what they wait for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "../host/standing.h"
#include "phase.h"

namespace pplx::cpu {

class Calls {
 public:
  struct Call {
    PhaseRun* run;
    Phase phase;
    std::uint32_t step;
    double begun;
  };
  class Running {
   public:
    Running(Calls& calls, const Call& call) : calls_(calls), run_(call.run) {
      const std::lock_guard<std::mutex> lock(calls_.mutex_);
      calls_.running_.push_back(call);
    }
    ~Running() {
      const std::lock_guard<std::mutex> lock(calls_.mutex_);
      const auto is_this = [this](const Call& call) { return call.run == run_; };
      calls_.running_.erase(std::find_if(calls_.running_.begin(), calls_.running_.end(), is_this));
    }
    Running(const Running&) = delete;
    Running& operator=(const Running&) = delete;

   private:
    Calls& calls_;
    PhaseRun* const run_;
  };

  // An open step's call takes the place of the last one that ended.
  void tell(Standing& s, double now) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Call& call : running_) {
      const Waiting w = call.run->waiting();
      for (Standing::Open& open : s.open) {
        if (open.step != call.step) continue;
        open = {call.step, phase_name(call.phase), true, now - call.begun, {}, w.what};
        if (w.peer != kNoRank) open.peers.push_back(w.by != kNoRank ? w.by : w.peer);
      }
    }
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Call> running_;
};

}  // namespace pplx::cpu
