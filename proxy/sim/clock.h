// Virtual time: a queue of events in order of time. Nothing happens between two events.
#pragma once

#include <cstdint>
#include <queue>
#include <vector>

namespace pplx::sim {

using Time = std::uint64_t;   // nanoseconds
inline constexpr Time kMicrosecond = 1000, kMillisecond = 1000 * kMicrosecond, kSecond = 1000 * kMillisecond;

class Clock {
 public:
  class Task {
   public:
    virtual ~Task() = default;
    virtual void run(std::uint32_t what) = 0;
  };

  Time now() const { return now_; }
  double seconds() const { return static_cast<double>(now_) * 1e-9; }
  std::uint64_t events() const { return events_; }

  void at(Time when, Task& task, std::uint32_t what) { queue_.push({when, next_++, &task, what}); }
  void after(Time delay, Task& task, std::uint32_t what) { at(now_ + delay, task, what); }

  // Runs the next event. False: there is none.
  bool step() {
    if (queue_.empty()) return false;
    const Event event = queue_.top();
    queue_.pop();
    now_ = event.when;
    ++events_;
    event.task->run(event.what);
    return true;
  }

 private:
  struct Event {
    Time when;
    std::uint64_t order;   // events of equal times run in the order in which they were asked for
    Task* task;
    std::uint32_t what;
    bool operator<(const Event& other) const { return when != other.when ? when > other.when : order > other.order; }
  };

  Time now_ = 0;
  std::uint64_t next_ = 0, events_ = 0;
  std::priority_queue<Event> queue_;
};

}  // namespace pplx::sim
