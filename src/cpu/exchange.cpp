#include "exchange.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace pplx::cpu {
namespace {

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

}  // namespace

double Exchange::steady_clock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Exchange::Exchange(const Config& config, Memory memory, unsigned threads, double timeout_seconds, Clock clock)
    : config_(config), heap_(heap_of(config)), memory_(std::move(memory)), pool_(threads > 0 ? threads - 1 : 0),
      timeout_(timeout_seconds), now_(std::move(clock)), next_step_(config.first_step), alive_(config.world, true), open_(config.in_flight),
      staging_(config.in_flight), mailed_(std::size_t{config.in_flight} * kOps * config.world, 0),
      left_at_(config.world) {
  if (const char* what = invalid(config)) throw Misuse(what);
  if (quantised(config_.wire)) {
    const std::size_t row = dispatch_block(config_).route_at;
    for (std::vector<char>& staging : staging_) staging.resize(row * config_.max_tokens);
  }
  for (std::atomic<double>& at : left_at_) at = -1.0;
  rebuild_order();
}

void Exchange::rebuild_order() {
  order_ = peer_order(config_, alive_);
  replicas_.clear();
  for (std::uint32_t peer : order_)
    if (peer != config_.rank && first_replica(config_, peer) == first_replica(config_, config_.rank)) replicas_.push_back(peer);
}

// ---- for the phases --------------------------------------------------------------------------------------------------

Waiting Exchange::waiting_for(std::uint32_t step, Signal signal, std::uint32_t peer, const char* what) const {
  Waiting w;
  w.peer = peer;
  w.signal = signal;
  w.expected = arrival_word(generation_, step);
  w.seen = arrival(set_of(config_, step), signal, peer);
  w.what = what;
  return w;
}

std::vector<Exchange::Announced> Exchange::announced(std::uint32_t set, Op op) const {
  std::vector<Announced> blocks;
  for (std::uint32_t peer : order_) {
    const std::uint64_t index = heap_.word_index(config_, set, op, peer);
    if (!mapped(peer)) blocks.push_back({mailbox_entry(heap_, memory_.own, index), mailed_[index]});
  }
  return blocks;
}

bool Exchange::have_left(const std::vector<Announced>& blocks) {
  return std::all_of(blocks.begin(), blocks.end(), [](const Announced& block) { return has_left<HostAtomics>(block.entry, block.last); });
}

void Exchange::raise_at_peer(std::uint32_t step, Signal signal, std::uint32_t peer) {
  raise_arrival<HostAtomics>(memory_.peers[peer], heap_, config_, signal, config_.rank, generation_, step);
}

void Exchange::publish(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows, const char* block) {
  count_block(peer, rows, block_layout(config_, op).bytes(rows), true);
  if (mapped(peer)) {
    raise_at_peer(step, signal_of(op), peer);
    return;
  }
  const std::uint64_t index = heap_.word_index(config_, set_of(config_, step), op, peer);
  const MailboxEntry entry = mailbox_entry(heap_, memory_.own, index);
  set_place(entry, static_cast<std::uint64_t>(block - memory_.own));
  announce<HostAtomics>(entry, generation_, {step, rows}, mailed_[index]);
}

BlockHeader Exchange::header(std::uint32_t step, std::uint32_t rows, std::uint32_t flags) const {
  BlockHeader h;
  h.step = step;
  h.generation = generation_;
  h.rows = rows;
  h.flags = flags;
  h.source = config_.rank;
  return h;
}

void Exchange::protocol_error(Phase phase, std::uint32_t step, std::uint32_t peer, const std::string& what) const {
  throw PeerFailure(rank_text(peer) + " sent what it must not: " + what + " (" + phase_name(phase) + ", step " +
                        std::to_string(step) + "). Its memory or its program is damaged, or it runs another version.",
                    AbortReason::Protocol, peer, phase, step);
}

void Exchange::check_header(const BlockHeader& h, Phase phase, std::uint32_t step, Op op, std::uint32_t peer) const {
  const auto differs = [&](const char* field, std::uint64_t seen, std::uint64_t expected) {
    protocol_error(phase, step, peer, std::string(op_name(op)) + " header says " + field + " " + std::to_string(seen) +
                                          ", expected " + std::to_string(expected));
  };
  if (h.step != step) differs("step", h.step, step);
  if (h.generation != generation_) differs("generation", h.generation, generation_);
  if (h.source != peer) differs("source", h.source, peer);
  if (h.rows > max_rows_of_block(config_))
    protocol_error(phase, step, peer, std::to_string(h.rows) + " rows, more than max_tokens_per_rank=" +
                                          std::to_string(config_.max_tokens) +
                                          (config_.replicas > 1 ? " on " + std::to_string(config_.replicas) + " replicas" : ""));
}

void Exchange::check_replica(const BlockHeader& h, const Plan& plan, std::uint32_t step, std::uint32_t peer) const {
  if (h.tokens == plan.tokens && h.ids_digest == plan.ids_digest) return;
  throw PeerFailure(tokens_apart_text(step, {peer, h.tokens}, {config_.rank, plan.tokens}), AbortReason::Protocol, peer,
                    Phase::DispatchRecv, step);
}

void Exchange::note_overflow(std::uint32_t peer) const {
  std::lock_guard<std::mutex> lock(notice_mutex_);
  if (!notice_.empty()) return;
  notice_ = overflow_text(peer, config_.layout);
}

void Exchange::count_block(std::uint32_t peer, std::uint64_t rows, std::uint64_t bytes, bool sent) {
  if (peer == config_.rank) return;
  (sent ? rows_sent_ : rows_received_).fetch_add(rows, std::memory_order_relaxed);
  (sent ? bytes_sent_ : bytes_received_).fetch_add(bytes, std::memory_order_relaxed);
}

std::uint32_t Exchange::units_of(std::uint64_t rows, std::uint64_t row_bytes, std::uint32_t* rows_per_unit) const {
  *rows_per_unit = static_cast<std::uint32_t>(std::max<std::uint64_t>(1, rows_per_unit_bytes_ / std::max<std::uint64_t>(1, row_bytes)));
  return static_cast<std::uint32_t>((rows + *rows_per_unit - 1) / *rows_per_unit);
}

Exchange::Open& Exchange::open_step(std::uint32_t step, Progress expected, const char* call) {
  Open& open = open_[set_of(config_, step)];
  if (open.progress == Progress::Closed || open.step != step)
    throw Misuse(std::string(call) + ": step " + std::to_string(step) + " is not open (it was combined or released already)");
  if (open.progress != expected) {
    const char* next = open.progress == Progress::Sent       ? "dispatch_recv"
                       : open.progress == Progress::Received ? "combine_send (or release)"
                                                             : "combine_recv";
    throw Misuse(std::string(call) + ": out of order, step " + std::to_string(step) + " expects " + next + " next");
  }
  return open;
}

// ---- blocking calls ----------------------------------------------------------------------------------------------------

bool Exchange::poll(PhaseRun& phase_run, Phase phase, std::uint32_t step, double begun) {
  Since since{begun};
  return poll(phase_run, phase, step, since);
}

bool Exchange::poll(PhaseRun& phase_run, Phase phase, std::uint32_t step, Since& since) {
  try {
    if (phase_run.poll()) return true;
    if (closed_.load(std::memory_order_acquire))
      throw Closed(std::string(phase_name(phase)) + ": this AllToAll was closed while the call waited (step " + std::to_string(step) + ")");
    const double at = now_();
    if (since.last > 0 && at - since.last > deadlines::kAway.seconds) since.begun += at - since.last;
    since.last = at;
    look_for_failure(phase_run, phase, step, patience() - (at - since.begun));
    return false;
  } catch (const PeerFailure& failure) {
    latch(failure);
  }
}

void Exchange::run(PhaseRun& phase_run, Phase phase, std::uint32_t step, const Interrupted& interrupted) {
  Since since{now_()};
  const double begun = since.begun;
  double ask = begun + 0.05;
  Backoff backoff;
  try {
    const ThreadPool::Help help(pool_, phase_run);
    while (!poll(phase_run, phase, step, since)) {
      backoff.pause();
      const double at = now_();
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
    fail({AbortReason::Interrupted, phase, config_.rank, config_.rank, step}, "");
    throw;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  stats_.seconds[static_cast<int>(phase == Phase::Weights ? Phase::CombineSend : phase) - 1] += now_() - begun;
}

void Exchange::look_for_failure(PhaseRun& phase_run, Phase phase, std::uint32_t step, double left) {
  if (abort_seen() != 0) raise_failure(phase, step);
  const bool late = left <= 0;
  if (!late && !someone_left_.load(std::memory_order_acquire)) return;
  const Waiting w = phase_run.waiting();
  if (w.peer == kNoRank) return;   // no longer blocked
  const std::string over = over_text(first_.network_of(w.peer));
  const std::string waits = std::string("waiting for ") + w.what + " of " + rank_text(w.peer) + over + " in " + phase_name(phase) +
                            ", step " + std::to_string(step);
  const auto failure = [&](const std::string& message, AbortReason reason) {
    PeerFailure f(message, reason, w.peer, phase, step);
    f.expected = word_text(w.expected);
    f.seen = word_text(w.seen);
    throw f;
  };
  const double goodbye = left_at_[w.peer].load(std::memory_order_acquire);
  if (goodbye >= 0 && now_() - goodbye > deadlines::kGoodbyeGrace.seconds)
    failure(rank_text(w.peer) + " closed its Communicator while " + rank_text(config_.rank) + " is " + waits, AbortReason::Closed);
  if (late)
    failure(rank_text(config_.rank) + " gave up after " + seconds_text(patience()) + " " + waits +
                ": expected " + word_text(w.expected) + ", saw " + word_text(w.seen) +
                ". That rank is stopped, much slower, or not in the same step; timeout= allows more.",
            AbortReason::Timeout);
}

std::uint64_t Exchange::abort_seen() {
  const std::uint64_t* const at = abort_of(config_.rank);
  if (load_acquire(at) == 0 && network_is_lost_.load(std::memory_order_acquire) && now_() - lost_at_ > deadlines::kDeathGrace.seconds) {
    const std::uint32_t peer = lost_network_.abort.peer;
    const bool left = peer < config_.world && left_at_[peer].load(std::memory_order_acquire) >= 0;
    const LostNetwork told = left ? lost_network_.after_goodbye() : lost_network_;
    fail(told.abort, told.message);
  }
  return load_acquire(at);
}

void Exchange::latch(PeerFailure failure) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = std::make_unique<PeerFailure>(failure);
    failure = *failure_;
  }
  // A failure that another rank reported is passed on unchanged: that rank is the origin.
  std::uint64_t word = load_acquire(abort_of(config_.rank));
  if (word == 0) word = abort_word({failure.reason, failure.phase, config_.rank, failure.peer, failure.step});
  tell_node(word);
  throw failure;
}

void Exchange::tell_node(std::uint64_t word) {
  for (std::uint32_t peer = 0; peer < config_.world; ++peer)
    if (memory_.peers[peer] != nullptr && alive_[peer]) store_if_zero(abort_of(peer), word);
}

void Exchange::fail(const Abort& abort, const std::string& message) {
  {
    std::lock_guard<std::mutex> lock(mutex_);   // a reset ends what came before it
    first_.tell(abort_of(config_.rank), abort, message);
  }
  // Only this rank knows of these, and its next call may be long in coming.
  if (abort.reason == AbortReason::Interrupted || abort.reason == AbortReason::Fabric) tell_node(abort_word(abort));
}

void Exchange::lost_network(const Abort& abort, const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (network_is_lost_.load(std::memory_order_relaxed)) return;
  lost_network_ = {abort, message};
  lost_at_ = now_();
  network_is_lost_.store(true, std::memory_order_release);
}

void Exchange::peer_left(std::uint32_t peer) {
  if (left_at_[peer] >= 0) return;
  left_at_[peer] = now_();
  someone_left_.store(true, std::memory_order_release);
}

void Exchange::raise_failure(Phase phase, std::uint32_t step) {
  const std::uint64_t word = abort_seen();
  std::unique_lock<std::mutex> lock(mutex_);
  if (!failure_) {
    if (word == 0) return;
    const Abort a = read_abort(word, config_.world);
    std::string message = first_.message();
    if (message.empty()) message = abort_text(a);
    if (phase != Phase::None) message += ", while " + rank_text(config_.rank) + " was in " + phase_name(phase) + " of step " + std::to_string(step);
    // A death has no step of its own: take that in which this rank noticed it.
    const bool here = a.phase == Phase::None;
    failure_ = std::make_unique<PeerFailure>(message, a.reason, a.peer, here ? phase : a.phase, here ? step : a.step);
    tell_node(word);   // it may have come over a control connection, and theirs may be slower
  }
  const PeerFailure failure = *failure_;
  lock.unlock();
  throw failure;
}

void Exchange::raise_notice() {
  std::lock_guard<std::mutex> lock(notice_mutex_);
  if (notice_.empty()) return;
  const std::string text = std::move(notice_);
  notice_.clear();
  throw Misuse(text);
}

std::uint32_t Exchange::dispatch_send(const Tokens& input, const Interrupted& interrupted) {
  raise_failure();
  const std::lock_guard<std::mutex> one_at_a_time(send_mutex_);
  std::uint32_t step = 0;
  const std::unique_ptr<PhaseRun> phase = start_dispatch_send(input, &step);
  run(*phase, Phase::DispatchSend, step, interrupted);
  return step;
}

std::shared_ptr<const Received> Exchange::dispatch_recv(std::uint32_t step, const DispatchOutput& output,
                                                        const Interrupted& interrupted) {
  raise_failure();
  const auto received = std::make_shared<Received>();
  const std::unique_ptr<PhaseRun> phase = start_dispatch_recv(step, output, received);
  run(*phase, Phase::DispatchRecv, step, interrupted);
  finish_dispatch_recv(step, received);
  return received;
}

void Exchange::combine_send(std::uint32_t step, const ExpertOutputs& input, const Interrupted& interrupted) {
  raise_failure();
  const std::unique_ptr<PhaseRun> phase = start_combine_send(step, input);
  run(*phase, input.uses_weights ? Phase::Weights : Phase::CombineSend, step, interrupted);
  finish_combine_send(step);
}

void Exchange::combine_recv(std::uint32_t step, const Result& output, const Interrupted& interrupted) {
  raise_failure();
  const std::unique_ptr<PhaseRun> phase = start_combine_recv(step, output);
  run(*phase, Phase::CombineRecv, step, interrupted);
  finish_combine_recv(step);
}

void Exchange::finish_dispatch_recv(std::uint32_t step, const std::shared_ptr<Received>& received) {
  std::lock_guard<std::mutex> lock(mutex_);
  Open& open = open_[set_of(config_, step)];
  open.progress = Progress::Received;
  open.overflowed = received->overflowed;
}

void Exchange::finish_combine_send(std::uint32_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  open_[set_of(config_, step)].progress = Progress::Combining;
}

void Exchange::finish_combine_recv(std::uint32_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  open_[set_of(config_, step)] = Open();
  first_step_ = false;
  ++stats_.steps;
}

// ---- life ----------------------------------------------------------------------------------------------------------------

void Exchange::reset(std::uint32_t generation, const std::vector<bool>& alive) {
  std::lock_guard<std::mutex> lock(mutex_);
  generation_ = generation;
  alive_ = alive;
  rebuild_order();
  next_step_ = config_.first_step;
  first_step_ = true;
  failure_.reset();
  first_.forget();
  network_is_lost_ = false;
  for (Open& open : open_) open = Open();
  for (std::uint64_t& word : mailed_) word = 0;
  for (std::uint64_t at : {heap_.mailbox, heap_.sent})
    std::memset(memory_.own + at, 0, mailed_.size() * kWordBytes);
  store_release(abort_of(config_.rank), 0);
}

std::uint32_t Exchange::open_steps() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::uint32_t n = 0;
  for (const Open& open : open_) n += open.progress != Progress::Closed;
  return n;
}

Stats Exchange::stats() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Stats s = stats_;
  s.rows_sent = rows_sent_;
  s.rows_received = rows_received_;
  s.bytes_sent = bytes_sent_;
  s.bytes_received = bytes_received_;
  return s;
}

}  // namespace pplx::cpu
