// The thread that runs a Proxy: one per Communicator. It owns the fabric; everything else reaches it through call().
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../src/host/fork_check.h"
#include "../src/host/standing.h"
#include "proxy.h"

namespace pplx {

struct ProxyThreadStats {
  ProxyStats proxy;
  std::uint64_t loops = 0, naps = 0;
  int cpu = -1;                    // pinned to; -1: not pinned
};

class ProxyThread {
 public:
  // With `cpu` -1 the scheduler decides. Pinning pays only where there are more cores than threads of ranks.
  ProxyThread(std::shared_ptr<Fabric> fabric, std::uint64_t shard_bytes, int cpu);
  ~ProxyThread();                  // close()
  ProxyThread(const ProxyThread&) = delete;
  ProxyThread& operator=(const ProxyThread&) = delete;

  // Runs `f` on the thread, between two steps, and waits for it; rethrows what it throws. False if the thread did not get to it in
  // time: then it is stuck inside the provider, and `f` may still run later.
  bool call(std::function<void(Proxy&, Fabric&)> f, double timeout_seconds = 30.0);

  // Stops promptly. A thread that is stuck inside a provider (because a peer died with a lock held) is left behind, with everything
  // that it might touch. A forked child has no such thread, and nothing to stop.
  bool close(double timeout_seconds = 1.0);

  // Keeps `owner` alive until the fabric is gone.
  void keep(std::shared_ptr<void> owner);

  ProxyThreadStats stats() const;

  ProxyStanding standing();   // safe from any thread

  // True if the thread takes a turn within that time. If not, it is stuck inside the provider, or gets no core.
  bool takes_turns(double within_seconds) const;

 private:
  struct Command {
    std::function<void(Proxy&, Fabric&)> f;
    std::exception_ptr error;
    bool done = false;
  };
  // Everything that the thread touches. The thread shares its ownership, so it can outlive this object.
  struct State {
    State(std::shared_ptr<Fabric> fabric, std::uint64_t shard_bytes)
        : fabric(std::move(fabric)), proxy(*this->fabric, shard_bytes, &stop) {}
    std::vector<std::shared_ptr<void>> kept;   // outlives the fabric
    std::shared_ptr<Fabric> fabric;
    Proxy proxy;
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::shared_ptr<Command>> commands;
    std::atomic<bool> commanded{false}, stop{false}, pinned{false};
    std::atomic<std::uint64_t> turns{0};
    std::uint64_t loops = 0, naps = 0;   // the thread's alone
    bool broken = false;                 // the thread's alone: the fabric is unusable, which was reported; only commands are taken
    bool stopped = false;
    ProxyThreadStats stats;        // published now and then, under the mutex
  };

  static void serve(const std::shared_ptr<State>& state);
  static void run_commands(State& state);
  static void sleep_unused(State& state);
  static void rest(State& state, bool unused);

  std::shared_ptr<State> state_;
  const ForkCheck fork_;
  bool closed_ = false;
};

}  // namespace pplx
