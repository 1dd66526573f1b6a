#include "exchange.h"

#include <chrono>

#include "../host/trace.h"
#include "../protocol/deadlines.h"

namespace pplx::cpu {

double Exchange::steady_clock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Exchange::Exchange(const Config& config, Memory memory, unsigned threads, double timeout_seconds, Clock clock, bool counts)
    : blocks_(config, std::move(memory), counts), failures_(blocks_, clock), pool_(threads > 0 ? threads - 1 : 0),
      timeout_(timeout_seconds), now_(std::move(clock)), steps_(blocks_.config()) {}

// ---- blocking calls ----------------------------------------------------------------------------------------------------

bool Exchange::poll(PhaseRun& phase_run, Phase phase, std::uint32_t step, double begun) {
  Since since{begun};
  return poll(phase_run, phase, step, since);
}

bool Exchange::poll(PhaseRun& phase_run, Phase phase, std::uint32_t step, Since& since) {
  try {
    if (phase_run.poll()) return true;
    if (closed_.load(std::memory_order_acquire))
      throw Closed(std::string(phase_name(phase)) + ": this AllToAll was closed while the call waited (step " +
                   std::to_string(step) + ")");
    const double at = now_();
    if (since.last > 0 && at - since.last > deadlines::kAway.seconds) since.begun += at - since.last;
    since.last = at;
    if (failures_.someone_is_busy(at)) since.begun = at;   // the time begins when no rank is busy
    failures_.look(phase_run, phase, step, at - since.begun,
                   timeout_ * (steps_.book().is_first() ? deadlines::kFirstStepFactor : 1));
    return false;
  } catch (const PeerFailure& failure) {
    failures_.latch(failure);
  }
}

void Exchange::run(PhaseRun& phase_run, Phase phase, std::uint32_t step, const Interrupted& interrupted) {
  Since since{now_()};
  const double begun = since.begun;
  double ask = begun + 0.05;
  const bool receives = phase == Phase::DispatchRecv || phase == Phase::CombineRecv;
  std::vector<double> waited(receives && blocks_.tally().counts ? config().world : 0);
  Backoff backoff;
  const Calls::Running running(calls_, {&phase_run, phase, step, begun});
  const TracedSpan traced(Traced(phase), config().object, step);
  try {
    const ThreadPool::Help help(pool_, phase_run);
    while (!poll(phase_run, phase, step, since)) {
      const double idle = now_();
      backoff.pause();
      const double at = now_();
      if (!waited.empty()) phase_run.add_wait(at - idle, waited);
      if (at < ask) continue;
      ask = at + 0.05;
      if (interrupted) interrupted();
    }
  } catch (const PeerFailure&) {
    throw;
  } catch (const Closed&) {
    throw;
  } catch (...) {
    // A signal handler that threw, or no memory: this rank cannot finish the step, and the others must not wait for it.
    failures_.fail({AbortReason::Interrupted, phase, config().rank, config().rank, step}, "");
    throw;
  }
  count(phase, now_() - begun, waited);
}

void Exchange::count(Phase phase, double seconds, const std::vector<double>& waited) {
  blocks_.tally().count([&](Counters& counters) {
    const auto ns = [](double s) { return static_cast<std::uint64_t>(s * 1e9); };
    counters.times[static_cast<int>(phase == Phase::Weights ? Phase::CombineSend : phase) - 1].add(ns(seconds));
    for (std::uint32_t peer = 0; peer < waited.size(); ++peer)
      if (peer != config().rank) counters.peers[peer].waited[phase == Phase::CombineRecv] += ns(waited[peer]);
  });
}

std::uint32_t Exchange::dispatch_send(const Tokens& input, const Interrupted& interrupted) {
  failures_.raise();
  const std::lock_guard<std::mutex> one_at_a_time(send_mutex_);
  std::uint32_t step = 0;
  const std::unique_ptr<PhaseRun> phase = start_dispatch_send(input, &step);
  run(*phase, Phase::DispatchSend, step, interrupted);
  blocks_.tally().count([&](Counters& counters) { counters.tokens += input.plan->tokens; });
  return step;
}

std::shared_ptr<const Received> Exchange::dispatch_recv(std::uint32_t step, const DispatchOutput& output,
                                                        const Interrupted& interrupted) {
  failures_.raise();
  const auto received = std::make_shared<Received>();
  const std::unique_ptr<PhaseRun> phase = start_dispatch_recv(step, output, received);
  run(*phase, Phase::DispatchRecv, step, interrupted);
  finish_dispatch_recv(step, received);
  return received;
}

void Exchange::combine_send(std::uint32_t step, const ExpertOutputs& input, const Interrupted& interrupted) {
  failures_.raise();
  const std::unique_ptr<PhaseRun> phase = start_combine_send(step, input);
  run(*phase, input.uses_weights ? Phase::Weights : Phase::CombineSend, step, interrupted);
  finish_combine_send(step);
}

void Exchange::combine_recv(std::uint32_t step, const Result& output, const Interrupted& interrupted) {
  failures_.raise();
  const std::unique_ptr<PhaseRun> phase = start_combine_recv(step, output);
  run(*phase, Phase::CombineRecv, step, interrupted);
  finish_combine_recv(step);
}

void Exchange::check_order(std::uint32_t step, Phase receives) const {
  if (!blocks_.heap().in_pieces && config().node_ranks == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  steps_.check_order(step, receives == Phase::DispatchRecv ? &OpenStep::receiving : &OpenStep::adding, phase_name(receives));
}

void Exchange::finish_dispatch_recv(std::uint32_t step, const std::shared_ptr<Received>& received) {
  std::lock_guard<std::mutex> lock(mutex_);
  OpenStep& open = steps_.of(step);
  open.come_to(OpenStep::Progress::Received, now_());
  open.overflowed = received->overflowed;
  if (config().node_ranks != 0) open.received = received;
}

void Exchange::finish_combine_send(std::uint32_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  steps_.of(step).come_to(OpenStep::Progress::Combining, now_());
}

void Exchange::finish_combine_recv(std::uint32_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  steps_.close(step, now_());
}

// ---- life ----------------------------------------------------------------------------------------------------------------

void Exchange::reset(std::uint32_t generation, const std::vector<bool>& alive) {
  std::lock_guard<std::mutex> lock(mutex_);
  failures_.reset([&] { blocks_.reset(generation, alive); });
  steps_.reset();
}

std::uint32_t Exchange::open_steps() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return steps_.count();
}

Standing Exchange::standing() const {
  Standing s;
  const double at = now_();
  const Config& c = config();
  s.device = "cpu";
  s.generation = generation();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    steps_.tell(s, at);
    for (std::uint32_t source = 0; source < c.world; ++source) {
      s.heard[0].push_back(blocks_.last_heard(Signal::Dispatch, source));
      s.heard[1].push_back(blocks_.last_heard(Signal::Combine, source));
    }
  }
  calls_.tell(s, at);
  return s;
}

Counters Exchange::counters() const {
  Counters counters = blocks_.tally().read();
  std::lock_guard<std::mutex> lock(mutex_);
  counters.counted = blocks_.tally().counts;
  counters.steps = steps_.book().closed();
  return counters;
}

}  // namespace pplx::cpu
