// A host thread that posts lists of writes as pplx-garden's does: a new list gets one write on every NIC at once; then, round
// after round and NIC by NIC, completions are read and up to 32 more writes of the oldest list are posted.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include "simulation.h"

namespace pplx::model {

// Writes by NIC.
using WriteList = std::vector<std::deque<Message>>;

class Writer {
 public:
  static constexpr std::uint32_t kBatch = 32;

  Writer(Simulation& simulation, std::uint32_t rank) : simulation_(&simulation), rank_(rank), queues_(simulation.costs().nics) {}

  void submit(double at, WriteList list) {
    submitted_.push_back({at, std::move(list)});
    wake(at);
  }
  // The thread reads a completion some time after it has come: step() returns it then.
  void completed(double now, const Message& message, bool landed) {
    inbox_.push_back({message, landed});
    wake(now);
  }

  // The completions that the thread read in a round.
  struct Read {
    double at;
    Message message;
    bool landed;   // else: acknowledged
  };
  std::vector<Read> step(double now) {
    std::vector<Read> read;
    if (now < clock_ || !awake_) return read;
    const double begun = now;
    const std::uint64_t posted_before = writes;
    clock_ = now;
    while (!submitted_.empty() && submitted_.front().at <= now) {
      WriteList& list = submitted_.front().list;
      for (std::size_t nic = 0; nic < list.size(); ++nic) {
        if (list[nic].empty()) continue;
        post(list[nic], 1);
        if (!list[nic].empty()) queues_[nic].push_back(std::move(list[nic]));
      }
      submitted_.pop_front();
    }
    bool left = false;
    const FabricCosts& costs = simulation_->costs();
    for (std::deque<std::deque<Message>>& queue : queues_) {
      clock_ += costs.poll_us;
      while (!queue.empty()) {
        post(queue.front(), kBatch);
        if (!queue.front().empty()) break;
        queue.pop_front();
      }
      left |= !queue.empty();
    }
    for (; !inbox_.empty(); inbox_.pop_front()) {
      clock_ += costs.completion_us;
      read.push_back({clock_, inbox_.front().message, inbox_.front().landed});
    }
    busy_us += clock_ - begun;
    // With full queues and nothing read, only a completion can change anything, and it wakes.
    awake_ = left && (writes != posted_before || !read.empty());
    if (awake_)
      simulation_->wake(clock_, rank_);
    else if (!submitted_.empty())
      wake(submitted_.front().at);
    return read;
  }

  double last_post = 0, busy_us = 0;
  std::uint64_t writes = 0, bytes = 0;

 private:
  struct Submitted {
    double at;
    WriteList list;
  };
  struct Done {
    Message message;
    bool landed;
  };

  void wake(double at) {
    awake_ = true;
    simulation_->wake(std::max(at, clock_), rank_);
  }
  void post(std::deque<Message>& list, std::uint32_t most) {
    const FabricCosts& costs = simulation_->costs();
    for (; most > 0 && !list.empty() && simulation_->under_way(rank_, list.front().nic) < costs.depth; --most) {
      clock_ += costs.post_us;
      simulation_->post(clock_, list.front());
      ++writes;
      bytes += list.front().bytes;
      last_post = clock_;
      list.pop_front();
    }
  }

  Simulation* simulation_;
  std::uint32_t rank_;
  std::vector<std::deque<std::deque<Message>>> queues_;   // indexed by NIC: the rest of each list
  std::deque<Submitted> submitted_;
  std::deque<Done> inbox_;
  double clock_ = 0;
  bool awake_ = false;
};

}  // namespace pplx::model
