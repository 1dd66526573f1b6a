// The steps of an AllToAll as its host counts them. On CUDA a captured graph takes steps of its own, which only the device sees.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "../protocol/config.h"

namespace pplx {

class StepBook {
 public:
  explicit StepBook(const Config& c) : first_(c.first_step), next_(c.first_step) {}

  std::uint32_t next() const { return next_; }
  std::uint32_t open() { return next_++; }
  void close() {
    ++closed_;
    is_first_.store(false, std::memory_order_relaxed);
  }
  std::uint64_t closed() const { return closed_; }
  // True if no step has been closed since the start or reset(): peers may still be compiling or loading. Safe from any thread.
  bool is_first() const { return is_first_.load(std::memory_order_relaxed); }
  void reset() {
    next_ = first_;
    is_first_.store(true, std::memory_order_relaxed);
  }

 private:
  const std::uint32_t first_;
  std::uint32_t next_;
  std::uint64_t closed_ = 0;
  std::atomic<bool> is_first_{true};
};

inline std::string too_many_open_text(const std::string& open, std::uint32_t in_flight) {
  return "dispatch: " + open + " is still open, and in_flight=" + std::to_string(in_flight) +
         " allows no further one: combine it or call d.release() first";
}

}  // namespace pplx
