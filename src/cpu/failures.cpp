#include "failures.h"

#include <algorithm>

#include "../protocol/deadlines.h"

namespace pplx::cpu {
namespace {

std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

}  // namespace

Failures::Failures(const Blocks& blocks, Clock clock)
    : blocks_(blocks), now_(std::move(clock)), left_at_(blocks.config().world), busy_since_(blocks.config().world) {
  for (std::atomic<double>& at : left_at_) at = -1.0;
  for (std::atomic<double>& at : busy_since_) at = -1.0;
}

void Failures::tell_node(std::uint64_t word) {
  for (std::uint32_t peer = 0; peer < blocks_.config().world; ++peer)
    if (blocks_.mapped(peer) && blocks_.alive()[peer]) store_if_zero(blocks_.abort_of(peer), word);
}

void Failures::fail(const Abort& abort, const std::string& message) {
  seen();   // an older failure that this rank has heard of comes first
  note(abort, message);
}

void Failures::note(const Abort& abort, const std::string& message) {
  {
    std::lock_guard<std::mutex> lock(mutex_);   // a reset ends what came before it
    first_.tell(own_word(), abort, message);
  }
  // Only this rank knows of these, and its next call may be long in coming.
  if (abort.reason == AbortReason::Interrupted || abort.reason == AbortReason::Fabric) tell_node(abort_word(abort));
}

void Failures::lost_network(const Abort& abort, const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (network_is_lost_.load(std::memory_order_relaxed)) return;
  lost_network_ = {abort, message};
  lost_at_ = now_();
  network_is_lost_.store(true, std::memory_order_release);
}

void Failures::peer_busy(std::uint32_t peer, bool busy) {
  busy_since_[peer] = busy ? now_() : -1.0;
  if (busy) someone_was_busy_.store(true, std::memory_order_release);
}

bool Failures::someone_is_busy(double at) const {
  if (!someone_was_busy_.load(std::memory_order_acquire)) return false;
  return std::any_of(busy_since_.begin(), busy_since_.end(), [&](const std::atomic<double>& since) {
    const double busy = since.load(std::memory_order_acquire);
    return busy >= 0 && at - busy < deadlines::kBusy.seconds;
  });
}

void Failures::peer_left(std::uint32_t peer) {
  if (left_at_[peer] >= 0) return;
  left_at_[peer] = now_();
  someone_left_.store(true, std::memory_order_release);
}

void Failures::raise(Phase phase, std::uint32_t step) {
  const Config& c = blocks_.config();
  const std::uint64_t word = seen();
  std::unique_lock<std::mutex> lock(mutex_);
  if (!failure_) {
    if (word == 0) return;
    const Abort a = read_abort(word, c.world);
    std::string message = first_.text(word, c);
    if (phase != Phase::None)
      message += ", while " + rank_text(c.rank) + " was in " + phase_name(phase) + " of step " + std::to_string(step);
    // A death has no step of its own: take that in which this rank noticed it.
    const bool here = a.phase == Phase::None;
    failure_ = std::make_unique<PeerFailure>(message, a.reason, a.peer, here ? phase : a.phase, here ? step : a.step);
    tell_node(word);   // it may have come over a control connection, and theirs may be slower
  }
  const PeerFailure failure = *failure_;
  lock.unlock();
  throw failure;
}

void Failures::latch(PeerFailure failure) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_) failure_ = std::make_unique<PeerFailure>(failure);
    failure = *failure_;
  }
  // A failure that another rank reported is passed on unchanged: that rank is the origin.
  std::uint64_t word = load_acquire(own_word());
  if (word == 0) word = abort_word({failure.reason, failure.phase, blocks_.config().rank, failure.peer, failure.step});
  tell_node(word);
  throw failure;
}

bool Failures::stands_still(PhaseRun::Watched& watched, std::uint32_t mate, double waited) const {
  const std::uint64_t turns = blocks_.turns(mate);
  if (watched.rank != mate || watched.turns != turns) watched = {mate, turns, waited};
  return waited - watched.since >= deadlines::kPassedOn.seconds;
}

void Failures::look(PhaseRun& run, Phase phase, std::uint32_t step, double waited, double patience) {
  if (seen() != 0) raise(phase, step);
  if (waited < patience && !someone_left_.load(std::memory_order_acquire)) return;
  const Waiting w = run.waiting();
  if (w.peer == kNoRank) return;   // no longer blocked
  const Config& c = blocks_.config();
  const std::uint32_t mate = w.by != kNoRank ? w.by : w.peer;
  const bool watches = waited >= patience && c.node_ranks != 0 && blocks_.mapped(mate);
  const bool still = watches && stands_still(run.watched, mate, waited);
  const std::string peer =
      rank_text(w.peer) + (w.by != kNoRank ? " by way of " + rank_text(w.by) : over_text(first_.network_of(w.peer)));
  const std::string piece = w.piece == Waiting::kNoPiece ? "" : "piece " + std::to_string(w.piece) + " of ";
  const std::string waits = "waiting for " +
                            (w.to_be_read ? peer + " to read " + piece + w.what : piece + w.what + " of " + peer) + " in " +
                            phase_name(phase) + ", step " + std::to_string(step);
  const std::string expected = piece.empty() ? word_text(w.expected) : "piece " + std::to_string(w.piece);
  const std::string seen = piece.empty() ? word_text(w.seen) : std::to_string(w.seen) + " before it";
  const auto failure = [&](std::uint32_t of, const std::string& message, AbortReason reason) {
    PeerFailure f(message, reason, of, phase, step);
    f.expected = expected;
    f.seen = seen;
    throw f;
  };
  for (std::uint32_t one : {w.peer, mate}) {
    const double goodbye = left_at_[one].load(std::memory_order_acquire);
    if (goodbye >= 0 && now_() - goodbye > deadlines::kGoodbyeGrace.seconds)
      failure(one, rank_text(one) + " closed its Communicator while " + rank_text(c.rank) + " is " + waits, AbortReason::Closed);
  }
  if (!still && waited < patience + w.longer) return;
  failure(still ? mate : w.peer,
          rank_text(c.rank) + " gave up after " + seconds_text(still ? waited : patience + w.longer) + " " + waits + ": expected " +
              expected + ", saw " + seen + ". " + (still && mate != w.peer ? "Rank " + std::to_string(mate) : "That rank") +
              " is stopped, much slower, or not in the same step; timeout= allows more.",
          AbortReason::Timeout);
}

std::uint64_t Failures::seen() {
  const std::uint64_t* const at = own_word();
  if (load_acquire(at) == 0 && network_is_lost_.load(std::memory_order_acquire) &&
      now_() - lost_at_ > deadlines::kDeathGrace.seconds) {
    const std::uint32_t peer = lost_network_.abort.peer;
    const bool left = peer < left_at_.size() && left_at_[peer].load(std::memory_order_acquire) >= 0;
    const LostNetwork told = left ? lost_network_.after_goodbye() : lost_network_;
    note(told.abort, told.message);
  }
  return load_acquire(at);
}

}  // namespace pplx::cpu
