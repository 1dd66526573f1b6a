// The latest spans of this module's threads, in a ring, for a timeline (pplx_comm/trace.py). While nothing is traced a span is one
// look at a flag.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <sys/syscall.h>
#include <unistd.h>

namespace pplx {

enum class Traced : std::uint32_t {
  None, DispatchSend, DispatchRecv, CombineSend, CombineRecv, Weights, Posted, Sent, Arrived, Kernel, Stage
};

inline constexpr std::uint32_t kUnknownStep = ~0u;   // the host does not know it

// Python has it as it lies here.
struct TraceSpan {
  std::uint64_t begun = 0, ended = 0;   // nanoseconds of the steady clock; equal: an instant
  std::uint64_t flow = 0;               // the same for a post and for its arrival; 0: none
  std::uint64_t bytes = 0;
  Traced what = Traced::None;
  std::uint32_t object = 0, step = 0, peer = 0;
  std::uint32_t lane = 0;               // the thread, the endpoint, or the set of a kernel or a stage
  std::uint32_t op = 0;                 // a block's; the phase that a kernel begins with; a stage's number
};

// A write of a block, as both of its ranks know it.
inline std::uint64_t flow_of(std::uint32_t target, std::uint32_t step, std::uint32_t immediate) {
  std::uint64_t h = (std::uint64_t{step} << 32 | immediate) ^ std::uint64_t{target} << 57;
  h = (h ^ h >> 31) * 0x7fb5d329728ea185ull;
  return (h ^ h >> 29) | 1;
}

class Trace {
 public:
  static Trace& of_module() {
    static Trace* const trace = new Trace;   // threads may outlive main()
    return *trace;
  }
  static std::uint64_t now() {
    return static_cast<std::uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
  }
  static std::uint32_t thread() {
    static thread_local const auto id = static_cast<std::uint32_t>(syscall(SYS_gettid));
    return id;
  }

  bool on() const { return on_.load(std::memory_order_relaxed); }
  // A ring is made once and stays: a thread may be writing.
  void start(std::size_t spans) {
    if (slots_ == nullptr) {
      size_ = spans;
      slots_ = std::make_unique<Slot[]>(spans);
    }
    first_ = next_.load();
    on_.store(true, std::memory_order_release);
  }
  void stop() { on_.store(false); }

  void add(const TraceSpan& span) {
    if (!on_.load(std::memory_order_acquire)) return;
    const std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = slots_[number % size_];
    slot.number.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    slot.span = span;
    slot.number.store(number + 1, std::memory_order_release);
  }

  // The latest spans since start(), but those that are being written.
  std::vector<TraceSpan> read() const {
    std::vector<TraceSpan> spans;
    const std::uint64_t end = next_.load(std::memory_order_acquire);
    for (std::uint64_t i = std::max(first_, end > size_ ? end - size_ : 0); i < end; ++i) {
      const Slot& slot = slots_[i % size_];
      if (slot.number.load(std::memory_order_acquire) != i + 1) continue;
      const TraceSpan span = slot.span;
      std::atomic_thread_fence(std::memory_order_acquire);
      if (slot.number.load(std::memory_order_relaxed) == i + 1) spans.push_back(span);
    }
    return spans;
  }

 private:
  struct Slot {
    std::atomic<std::uint64_t> number{0};   // 1 + that of the whole span that lies here
    TraceSpan span;
  };
  std::atomic<bool> on_{false};
  std::unique_ptr<Slot[]> slots_;
  std::size_t size_ = 1;
  std::uint64_t first_ = 0;
  std::atomic<std::uint64_t> next_{0};
};

// The time until its end, of this thread.
class TracedSpan {
 public:
  TracedSpan(Traced what, std::uint32_t object, std::uint32_t step) {
    if (!Trace::of_module().on()) return;
    span_.what = what;
    span_.object = object;
    span_.step = step;
    span_.lane = Trace::thread();
    span_.begun = Trace::now();
  }
  TracedSpan(const TracedSpan&) = delete;
  TracedSpan& operator=(const TracedSpan&) = delete;
  void of(std::uint32_t step) { span_.step = step; }
  ~TracedSpan() {
    if (span_.what == Traced::None) return;
    span_.ended = Trace::now();
    Trace::of_module().add(span_);
  }

 private:
  TraceSpan span_;
};

}  // namespace pplx
