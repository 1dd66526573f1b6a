// The counts of an AllToAll since its construction, the same on both devices. docs/api.md says them key by key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace pplx {

// Times by powers of two: bucket i has those of less than 2^i microseconds, the last one all others.
inline constexpr std::uint32_t kTimeBuckets = 24;
constexpr std::uint32_t time_bucket(std::uint64_t nanoseconds) {
  const std::uint64_t us = nanoseconds / 1000;
  std::uint32_t bucket = 0;
  while (bucket + 1 < kTimeBuckets && us >> bucket != 0) ++bucket;
  return bucket;
}

struct Times {
  std::uint64_t counts[kTimeBuckets] = {};
  std::uint64_t nanoseconds = 0;
  void add(std::uint64_t ns) {
    ++counts[time_bucket(ns)];
    nanoseconds += ns;
  }
};

// A half of a step, or both where one launch does them.
enum class Timed : std::uint32_t { DispatchSend, DispatchRecv, CombineSend, CombineRecv, Dispatch, Combine };
inline constexpr std::uint32_t kTimed = 6;
inline constexpr const char* kTimedNames[kTimed] = {"dispatch_send", "dispatch_recv", "combine_send",
                                                    "combine_recv",  "dispatch",      "combine"};

// Waits are for the sources of a dispatch, and for those of a combine.
inline constexpr std::uint32_t kAwaited = 2;

// A dump tells of that many steps which ended.
inline constexpr std::uint32_t kLastSteps = 32;

// To and from another rank; of oneself there is nothing.
struct PeerCounters {
  std::uint64_t rows_sent = 0, rows_received = 0;
  std::uint64_t bytes_sent = 0, bytes_received = 0;   // headers included
  std::uint64_t waited[kAwaited] = {};                // nanoseconds
};

struct Counters {
  Counters(std::size_t world, std::size_t experts) : peers(world), expert_rows(experts) {}
  bool counted = false;                               // else there are steps and launches alone
  std::uint64_t steps = 0, tokens = 0;
  std::uint64_t large_dispatches = 0, large_combines = 0;   // launches of the kernels for large steps, halves too
  std::vector<PeerCounters> peers;
  std::vector<std::uint64_t> expert_rows;             // received, by local expert
  Times times[kTimed];
};

// Counters that threads share. They stay 0 where nothing is to be counted.
class Tally {
 public:
  Tally(std::size_t world, std::size_t experts, bool counts) : counts(counts), counters_(world, experts) {}
  const bool counts;

  template <typename Count>
  void count(const Count& count) {
    if (!counts) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    count(counters_);
  }
  Counters read() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counters_;
  }

 private:
  mutable std::mutex mutex_;
  Counters counters_;
};

}  // namespace pplx
