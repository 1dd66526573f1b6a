#include "proxy_thread.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace pplx {
namespace {

using Clock = std::chrono::steady_clock;

// A poll of a provider takes about as long as a short spin, so few tries are enough before others get the core.
constexpr unsigned kSpins = 16;
// On a core of its own nobody waits for this thread's turn, and a yield costs more than many looks at the mailboxes.
constexpr unsigned kLooksWhenPinned = 64;
constexpr auto kAwake = std::chrono::seconds(1);
// After that long in vain, without a core of its own, it naps between looks: see cpu::Backoff.
constexpr auto kYields = std::chrono::milliseconds(250);
constexpr long kShortestNap = 50'000;   // nanoseconds
constexpr timespec kShortNap{0, kShortestNap};

// Of a thread for which nothing is attached, whom a command wakes: it polls for what peers' providers may want of its own, and for that is
// in no hurry. With naps as below, six proxies of each of eight ranks, of which one was in use, took half of two cores.
constexpr auto kUnusedNap = std::chrono::milliseconds(20);

// Naps of an idle thread: 50 us, or as much more as keeps it below a twenty-fifth of a core. What a nap and a look cost depends on the
// provider and the machine: tcp asks the kernel each time, which alone took 6 % of a slow core.
class Naps {
 public:
  void nap() {
    if (count_++ % kPeriod == 0) {
      const long cpu = cpu_nanoseconds();
      if (count_ > 1) nanoseconds_ = std::clamp((cpu - cpu_) / kPeriod * kShare, kShortestNap, kLongest);
      cpu_ = cpu;
    }
    const timespec t{0, nanoseconds_};
    nanosleep(&t, nullptr);
  }

 private:
  static constexpr long kLongest = 1'000'000, kPeriod = 256, kShare = 25;

  static long cpu_nanoseconds() {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1'000'000'000 + t.tv_nsec;
  }

  std::uint64_t count_ = 0;
  long nanoseconds_ = kShortestNap, cpu_ = 0;
};

}  // namespace

ProxyThread::ProxyThread(std::shared_ptr<Fabric> fabric, std::uint64_t shard_bytes, int cpu)
    : shared_(std::make_shared<Shared>(std::move(fabric), shard_bytes)) {
  // Signals belong to the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread([shared = shared_] { serve(shared); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_setname_np(thread.native_handle(), "pplx-proxy");
  if (cpu >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (pthread_setaffinity_np(thread.native_handle(), sizeof set, &set) == 0) {
      shared_->stats.cpu = cpu;
      shared_->pinned.store(true, std::memory_order_relaxed);
    }
  }
  thread.detach();   // close() waits for `stopped`, and no longer than it is allowed to
}

ProxyThread::~ProxyThread() { close(); }

bool ProxyThread::call(std::function<void(Proxy&, Fabric&)> f, double timeout_seconds) {
  const auto command = std::make_shared<Command>();
  command->f = std::move(f);
  std::unique_lock<std::mutex> lock(shared_->mutex);
  if (shared_->stopped) throw FabricError("the proxy thread has stopped");
  shared_->commands.push_back(command);
  shared_->commanded.store(true, std::memory_order_release);
  shared_->changed.notify_all();
  const bool in_time = shared_->changed.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                                                 [&] { return command->done || shared_->stopped; });
  if (command->error) std::rethrow_exception(command->error);
  return in_time && command->done;
}

bool ProxyThread::close(double timeout_seconds) {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  if (closed_) return shared_->stopped;
  closed_ = true;
  shared_->stop.store(true, std::memory_order_release);
  shared_->changed.notify_all();
  return shared_->changed.wait_for(lock, std::chrono::duration<double>(timeout_seconds), [&] { return shared_->stopped; });
}

void ProxyThread::keep(std::shared_ptr<void> owner) {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->kept.push_back(std::move(owner));
}

ProxyThreadStats ProxyThread::stats() const {
  std::lock_guard<std::mutex> lock(shared_->mutex);
  return shared_->stats;
}

bool ProxyThread::takes_turns(double within_seconds) const {
  const auto end = Clock::now() + std::chrono::duration<double>(within_seconds);
  const std::uint64_t before = shared_->turns.load(std::memory_order_relaxed);
  while (shared_->turns.load(std::memory_order_relaxed) == before) {
    if (Clock::now() > end) return false;
    nanosleep(&kShortNap, nullptr);
  }
  return true;
}

void ProxyThread::run_commands(Shared& shared) {
  std::vector<std::shared_ptr<Command>> commands;
  {
    std::lock_guard<std::mutex> lock(shared.mutex);
    commands.swap(shared.commands);
    shared.commanded.store(false, std::memory_order_release);
  }
  for (const std::shared_ptr<Command>& command : commands) {
    try {
      command->f(shared.proxy, *shared.fabric);
    } catch (...) {
      command->error = std::current_exception();
    }
    std::lock_guard<std::mutex> lock(shared.mutex);
    command->done = true;
    shared.stats.proxy = shared.proxy.stats();
    shared.changed.notify_all();
  }
}

void ProxyThread::sleep_unused(Shared& shared) {
  std::unique_lock<std::mutex> lock(shared.mutex);
  shared.changed.wait_for(lock, kUnusedNap, [&] {
    return shared.stop.load(std::memory_order_relaxed) || shared.commanded.load(std::memory_order_relaxed);
  });
}

void ProxyThread::serve(const std::shared_ptr<Shared>& s) {
  Shared& shared = *s;
  Clock::time_point last_moved = Clock::now(), empty_since = last_moved;
  unsigned empty = 0;
  bool tired = false;
  bool broken = false;
  std::uint64_t loops = 0, naps = 0;
  while (!shared.stop.load(std::memory_order_acquire)) {
    shared.turns.store(++loops + naps, std::memory_order_relaxed);
    if (shared.commanded.load(std::memory_order_acquire)) run_commands(shared);
    bool moved = false;
    try {
      moved = !broken && shared.proxy.step();
    } catch (const std::exception& error) {
      broken = true;   // the fabric is beyond use: say so once, then only take commands
      shared.proxy.fail_all(error.what());
    }
    if (moved) {
      empty = 0;
      tired = false;
      continue;
    }
    if (++empty < kSpins) continue;
    if (empty % kLooksWhenPinned != 0 && shared.pinned.load(std::memory_order_relaxed)) continue;
    if (tired)
      nanosleep(&kShortNap, nullptr);
    else
      sched_yield();
    // The clock is read only now and then, for the nap is not urgent.
    if (empty % 64 != 0) continue;
    const Clock::time_point now = Clock::now();
    if (empty == 64) empty_since = last_moved = now;
    tired = now - empty_since > kYields && !shared.pinned.load(std::memory_order_relaxed);
    if (shared.proxy.waiting() && !broken) {
      last_moved = now;
      continue;
    }
    const bool unused = shared.proxy.unused();
    if (!unused && now - last_moved < kAwake) continue;
    Naps rest;
    while (!shared.stop.load(std::memory_order_acquire) && !shared.commanded.load(std::memory_order_acquire)) {
      if (unused)
        sleep_unused(shared);
      else
        rest.nap();
      shared.turns.store(loops + ++naps, std::memory_order_relaxed);
      try {
        if (!broken && shared.proxy.step()) break;
      } catch (const std::exception&) {
        break;   // the next turn meets it again and reports it
      }
    }
    empty = 0;
  }
  run_commands(shared);
  std::lock_guard<std::mutex> lock(shared.mutex);
  shared.stats.loops = loops;
  shared.stats.naps = naps;
  shared.stats.proxy = shared.proxy.stats();
  shared.stopped = true;
  shared.changed.notify_all();
}

}  // namespace pplx
