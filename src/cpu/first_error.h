// The first error of a phase that several threads work on. It stops them all, and each of them throws it.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>

namespace pplx::cpu {

class FirstError {
 public:
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  template <typename F>
  void guarded(F&& f) {
    try {
      f();
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
      failed_.store(true, std::memory_order_release);
    }
  }

  void rethrow() {
    if (!failed()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
};

}  // namespace pplx::cpu
