// A question that may have no answer, such as one to a thread that hangs in a driver.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "signals.h"

namespace pplx {

// It is asked on a thread of its own, and not again while that thread is at it. Copies are one question.
class Question {
 public:
  using Clock = std::chrono::steady_clock;

  // False: it is still asked, or no thread is to be had.
  bool ask(std::function<std::string()> f) {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->text.reset();
    if (state_->asked) return false;
    const WithoutSignals none;
    try {
      std::thread([state = state_, f = std::move(f)] {
        std::string text;
        try {
          text = f();
        } catch (const std::exception&) {   // no other: a thread that Python ends unwinds by one of its own
        }
        const std::lock_guard<std::mutex> lock(state->mutex);
        state->text = std::move(text);
        state->asked = false;
        state->answered.notify_all();
      }).detach();
    } catch (const std::system_error&) {
      return false;
    }
    return state_->asked = true;
  }
  // Nothing: none has come.
  std::optional<std::string> answer(Clock::time_point until) {
    std::unique_lock<std::mutex> lock(state_->mutex);
    state_->answered.wait_until(lock, until, [&] { return !state_->asked; });
    return state_->asked ? std::nullopt : state_->text;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable answered;
    bool asked = false;
    std::optional<std::string> text;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace pplx
