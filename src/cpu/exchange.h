// One AllToAll on one rank, whose phases run on CPU threads. Each phase is a file of its own.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "arguments.h"
#include "blocks.h"
#include "calls.h"
#include "failures.h"
#include "open_steps.h"
#include "phase.h"
#include "thread_pool.h"

namespace pplx::cpu {

class Exchange {
 public:
  static double steady_clock();

  Exchange(const Config& config, Memory memory, unsigned threads, double timeout_seconds, Clock clock = steady_clock,
           bool counts = true);

  const Config& config() const { return blocks_.config(); }
  std::uint32_t generation() const { return blocks_.generation(); }
  const Blocks& blocks() const { return blocks_; }

  // The four phases. Each call blocks; `interrupted` is called every so often, and may throw.
  using Interrupted = std::function<void()>;
  std::uint32_t dispatch_send(const Tokens& input, const Interrupted& interrupted);
  std::shared_ptr<const Received> dispatch_recv(std::uint32_t step, const DispatchOutput& output, const Interrupted& interrupted);
  void combine_send(std::uint32_t step, const ExpertOutputs& input, const Interrupted& interrupted);
  void combine_recv(std::uint32_t step, const Result& output, const Interrupted& interrupted);

  // Throws if blocks go in pieces, and an earlier step has not come to dispatch_recv or combine_recv, which throw it too. Serves
  // callers that would have to undo something then.
  void check_order(std::uint32_t step, Phase receives) const;

  // The phases for a caller that owns the clock and polls them. Call finish_...() once poll() has returned true. poll() latches and
  // throws what fails the phase, including a timeout that counts from `begun`.
  bool poll(PhaseRun& phase_run, Phase phase, std::uint32_t step, double begun);
  double now() const { return now_(); }
  // Counts a phase that is done: its time, and how long it waited for each rank.
  void count(Phase phase, double seconds, const std::vector<double>& waited);
  std::unique_ptr<PhaseRun> start_dispatch_send(const Tokens& input, std::uint32_t* step);
  std::unique_ptr<PhaseRun> start_dispatch_recv(std::uint32_t step, const DispatchOutput& output,
                                                std::shared_ptr<Received> received);
  std::unique_ptr<PhaseRun> start_combine_send(std::uint32_t step, const ExpertOutputs& input);
  std::unique_ptr<PhaseRun> start_combine_recv(std::uint32_t step, const Result& output);
  void finish_dispatch_recv(std::uint32_t step, const std::shared_ptr<Received>& received);
  void finish_combine_send(std::uint32_t step);
  void finish_combine_recv(std::uint32_t step);

  // Safe from any thread. A failure latches: every later call throws it.
  Failures& failures() { return failures_; }
  // Calls that other threads wait in throw Closed, and all later ones
  void close() { closed_.store(true, std::memory_order_release); }
  // Throws once if some rank reported an overflow at the end of a step; every rank's next call does.
  void raise_notice() { blocks_.raise_notices(); }

  void reset(std::uint32_t generation, const std::vector<bool>& alive);
  void lay_relays(std::vector<char*> areas) { blocks_.lay_relays(std::move(areas)); }   // see Blocks
  std::uint32_t next_step() const { return steps_.book().next(); }
  std::uint32_t open_steps() const;
  Counters counters() const;
  Standing standing() const;   // safe from any thread; waits for no peer

 private:
  // How long a blocking call has waited: time in which its thread did not run moves `begun`.
  struct Since {
    double begun = 0, last = 0;
  };
  void run(PhaseRun& run, Phase phase, std::uint32_t step, const Interrupted& interrupted);
  bool poll(PhaseRun& run, Phase phase, std::uint32_t step, Since& since);

  Blocks blocks_;
  Failures failures_;
  ThreadPool pool_;
  const double timeout_;
  const Clock now_;
  mutable std::mutex mutex_;                  // steps
  std::mutex send_mutex_;                     // sends are one sequence
  OpenSteps steps_;
  Calls calls_;
  std::atomic<bool> closed_{false};
};

}  // namespace pplx::cpu
