#include "proxy_thread.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "../src/host/signals.h"

namespace pplx {
namespace {

using Clock = std::chrono::steady_clock;

// Polling a provider takes about as long as a short spin, so a few tries are enough before others get the core.
constexpr unsigned kSpins = 16;
// On a core of its own the thread disturbs no other, and a yield costs more than many looks at the mailboxes.
constexpr unsigned kLooksWhenPinned = 64;
constexpr auto kAwake = std::chrono::seconds(1);
// After this long without work, and without a core of its own, the thread naps between looks: see cpu::Backoff.
constexpr auto kYields = std::chrono::milliseconds(250);
constexpr long kShortestNap = 50'000;   // nanoseconds
constexpr timespec kShortNap{0, kShortestNap};

// Poll interval while no AllToAll is attached; a command wakes the thread. It polls only for what peers' providers want of its own.
// With the naps below, six proxies in each of eight ranks, one of them in use, took half of two cores.
constexpr auto kUnusedNap = std::chrono::milliseconds(20);
constexpr double kTurn = 0.1;   // it takes one each ms, unused each 20

// Naps of an idle thread: 50 us, or longer if needed to stay below a twenty-fifth of a core. The cost of a nap and a look depends
// on provider and machine: tcp asks the kernel each time, which alone took 6 % of a slow core.
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

// A thread that finds no work looks again, then gives up its core between looks, then naps between them. After kAwake it may rest.
class Idle {
 public:
  explicit Idle(const std::atomic<bool>& pinned) : pinned_(pinned) {}

  void found_work() {
    looks_ = 0;
    tired_ = false;
  }

  // After a look that found nothing. True every 64 looks: the clock is read only then, for the nap is not urgent.
  bool pause() {
    if (++looks_ < kSpins || (looks_ % kLooksWhenPinned != 0 && pinned())) return false;
    if (tired_)
      nanosleep(&kShortNap, nullptr);
    else
      sched_yield();
    return looks_ % kLooksPerClock == 0;
  }

  // When pause() was true. waiting: something is owed to this thread; unused: nothing is attached.
  bool may_rest(bool waiting, bool unused) {
    const Clock::time_point now = Clock::now();
    if (looks_ == kLooksPerClock) empty_since_ = waited_ = now;
    tired_ = now - empty_since_ > kYields && !pinned();
    if (waiting) waited_ = now;
    return !waiting && (unused || now - waited_ >= kAwake);
  }

  void rested() { looks_ = 0; }

 private:
  static constexpr unsigned kLooksPerClock = 64;

  bool pinned() const { return pinned_.load(std::memory_order_relaxed); }

  const std::atomic<bool>& pinned_;
  unsigned looks_ = 0;             // since there was work, or a rest
  bool tired_ = false;
  Clock::time_point empty_since_ = Clock::now(), waited_ = empty_since_;
};

}  // namespace

ProxyThread::ProxyThread(std::shared_ptr<Fabric> fabric, std::uint64_t shard_bytes, int cpu)
    : state_(std::make_shared<State>(std::move(fabric), shard_bytes)) {
  const WithoutSignals none;
  std::thread thread([state = state_] { serve(state); });
  pthread_setname_np(thread.native_handle(), "pplx-proxy");
  if (cpu >= 0) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (pthread_setaffinity_np(thread.native_handle(), sizeof set, &set) == 0) {
      state_->stats.cpu = cpu;
      state_->pinned.store(true, std::memory_order_relaxed);
    }
  }
  thread.detach();   // close() waits for `stopped`, and no longer than it is allowed to
}

ProxyThread::~ProxyThread() { close(); }

bool ProxyThread::call(std::function<void(Proxy&, Fabric&)> f, double timeout_seconds) {
  const auto command = std::make_shared<Command>();
  command->f = std::move(f);
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (state_->stopped) throw FabricError("the proxy thread has stopped");
  state_->commands.push_back(command);
  state_->commanded.store(true, std::memory_order_release);
  state_->changed.notify_all();
  const bool in_time = state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                                                 [&] { return command->done || state_->stopped; });
  if (command->error) std::rethrow_exception(command->error);
  return in_time && command->done;
}

bool ProxyThread::close(double timeout_seconds) {
  if (fork_.in_child()) return true;
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (closed_) return state_->stopped;
  closed_ = true;
  state_->stop.store(true, std::memory_order_release);
  state_->changed.notify_all();
  return state_->changed.wait_for(lock, std::chrono::duration<double>(timeout_seconds), [&] { return state_->stopped; });
}

void ProxyThread::keep(std::shared_ptr<void> owner) {
  std::lock_guard<std::mutex> lock(state_->mutex);
  state_->kept.push_back(std::move(owner));
}

ProxyThreadStats ProxyThread::stats() const {
  std::lock_guard<std::mutex> lock(state_->mutex);
  return state_->stats;
}

ProxyStanding ProxyThread::standing() {
  bool takes_turns = false;
  try {
    takes_turns = call([](Proxy&, Fabric&) {}, kTurn);   // a command publishes the counts
  } catch (const FabricError&) {   // it has stopped
  }
  const ProxyStats s = stats().proxy;
  return {!takes_turns, state_->turns.load(std::memory_order_relaxed), s.writes, s.bytes, s.again, s.errors, s.dropped, s.deepest};
}

bool ProxyThread::takes_turns(double within_seconds) const {
  const auto end = Clock::now() + std::chrono::duration<double>(within_seconds);
  const std::uint64_t before = state_->turns.load(std::memory_order_relaxed);
  while (state_->turns.load(std::memory_order_relaxed) == before) {
    if (Clock::now() > end) return false;
    nanosleep(&kShortNap, nullptr);
  }
  return true;
}

void ProxyThread::run_commands(State& state) {
  std::vector<std::shared_ptr<Command>> commands;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    commands.swap(state.commands);
    state.commanded.store(false, std::memory_order_release);
  }
  for (const std::shared_ptr<Command>& command : commands) {
    try {
      command->f(state.proxy, *state.fabric);
    } catch (...) {
      command->error = std::current_exception();
    }
    std::lock_guard<std::mutex> lock(state.mutex);
    command->done = true;
    state.stats.proxy = state.proxy.stats();
    state.changed.notify_all();
  }
}

void ProxyThread::sleep_unused(State& state) {
  std::unique_lock<std::mutex> lock(state.mutex);
  state.changed.wait_for(lock, kUnusedNap, [&] {
    return state.stop.load(std::memory_order_relaxed) || state.commanded.load(std::memory_order_relaxed);
  });
}

// Looks now and then until there is work, a command, or an end.
void ProxyThread::rest(State& state, bool unused) {
  Naps naps;
  while (!state.stop.load(std::memory_order_acquire) && !state.commanded.load(std::memory_order_acquire)) {
    if (unused)
      sleep_unused(state);
    else
      naps.nap();
    state.turns.store(state.loops + ++state.naps, std::memory_order_relaxed);
    try {
      if (!state.broken && state.proxy.step()) return;
    } catch (...) {
      return;   // the next turn meets it again and reports it
    }
  }
}

void ProxyThread::serve(const std::shared_ptr<State>& s) {
  State& state = *s;
  Idle idle(state.pinned);
  while (!state.stop.load(std::memory_order_acquire)) {
    state.turns.store(++state.loops + state.naps, std::memory_order_relaxed);
    if (state.commanded.load(std::memory_order_acquire)) run_commands(state);
    bool moved = false;
    try {
      moved = !state.broken && state.proxy.step();
    } catch (const LeftBehind&) {
      break;
    } catch (const std::exception& error) {
      if (state.stop.load(std::memory_order_acquire)) break;
      state.broken = true;
      state.proxy.fail_all(error.what());
    }
    if (moved) {
      idle.found_work();
    } else if (idle.pause()) {
      const bool unused = state.proxy.unused();
      if (!idle.may_rest(state.proxy.waiting() && !state.broken, unused)) continue;
      rest(state, unused);
      idle.rested();
    }
  }
  run_commands(state);
  std::lock_guard<std::mutex> lock(state.mutex);
  state.stats.loops = state.loops;
  state.stats.naps = state.naps;
  state.stats.proxy = state.proxy.stats();
  state.stopped = true;
  state.changed.notify_all();
}

}  // namespace pplx
