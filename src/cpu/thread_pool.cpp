#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

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
  // Signals belong to the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  for (unsigned i = 0; i < helpers; ++i) {
    threads_.emplace_back([this] { serve(); });
    pthread_setname_np(threads_.back().native_handle(), "pplx-cpu");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::serve() {
  std::uint64_t served = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stop_ || (phase_ != nullptr && turn_ != served); });
    if (stop_) return;
    PhaseRun* phase = phase_;
    served = turn_;
    ++working_;
    lock.unlock();
    Backoff backoff;
    try {
      while (!leave_.load(std::memory_order_acquire) && !phase->poll()) backoff.pause();
    } catch (...) {
      // The caller's own poll() throws the same.
    }
    lock.lock();
    if (--working_ == 0) idle_.notify_all();
  }
}

ThreadPool::Help::Help(ThreadPool& pool, PhaseRun& phase) : pool_(pool) {
  if (pool_.threads_.empty()) return;
  std::lock_guard<std::mutex> lock(pool_.mutex_);
  if (pool_.phase_ != nullptr) return;
  pool_.phase_ = &phase;
  pool_.leave_.store(false, std::memory_order_release);
  ++pool_.turn_;
  helping_ = true;
  pool_.wake_.notify_all();
}

ThreadPool::Help::~Help() {
  if (!helping_) return;
  std::unique_lock<std::mutex> lock(pool_.mutex_);
  pool_.leave_.store(true, std::memory_order_release);
  pool_.idle_.wait(lock, [&] { return pool_.working_ == 0; });
  pool_.phase_ = nullptr;
}

}  // namespace pplx::cpu
