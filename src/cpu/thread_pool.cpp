#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "../host/signals.h"

namespace pplx::cpu {

namespace {

constexpr unsigned kSpins = 4, kYieldsPerLook = 32;
constexpr std::chrono::milliseconds kLong{100};
constexpr timespec kNap{0, 100'000};

}  // namespace

void Backoff::pause() {
  if (++tries_ < kSpins) {
    naps_ = false;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    return;
  }
  if (naps_) {
    nanosleep(&kNap, nullptr);
    return;
  }
  if (tries_ == kSpins) begun_ = std::chrono::steady_clock::now();
  else if (tries_ % kYieldsPerLook == 0) naps_ = std::chrono::steady_clock::now() - begun_ > kLong;
  sched_yield();
}

ThreadPool::ThreadPool(unsigned helpers) {
  const WithoutSignals none;
  for (unsigned i = 0; i < helpers; ++i) {
    state_->threads.emplace_back([state = state_] { state->serve(); });
    pthread_setname_np(state_->threads.back().native_handle(), "pplx-cpu");
  }
}

ThreadPool::~ThreadPool() {
  if (fork_.in_child()) return;
  {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stop = true;
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

void ThreadPool::State::serve() {
  std::uint64_t served = 0;
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    wake.wait(lock, [&] { return stop || (phase != nullptr && turn != served); });
    if (stop) return;
    PhaseRun* const current = phase;
    served = turn;
    ++working;
    lock.unlock();
    Backoff backoff;
    try {
      while (!leave.load(std::memory_order_acquire) && !current->poll()) backoff.pause();
    } catch (...) {
      // The caller's own poll() throws it too.
    }
    lock.lock();
    if (--working == 0) idle.notify_all();
  }
}

ThreadPool::Help::Help(ThreadPool& pool, PhaseRun& phase) : state_(*pool.state_) {
  if (state_.threads.empty()) return;
  std::lock_guard<std::mutex> lock(state_.mutex);
  if (state_.phase != nullptr) return;
  state_.phase = &phase;
  state_.leave.store(false, std::memory_order_release);
  ++state_.turn;
  helping_ = true;
  state_.wake.notify_all();
}

ThreadPool::Help::~Help() {
  if (!helping_) return;
  std::unique_lock<std::mutex> lock(state_.mutex);
  state_.leave.store(true, std::memory_order_release);
  state_.idle.wait(lock, [&] { return state_.working == 0; });
  state_.phase = nullptr;
}

}  // namespace pplx::cpu
