// Strikes, and checks the ranks' blame: every failure that a rank raises must name the cause.
#include "world.h"

#include <algorithm>
#include <cstring>

namespace pplx::sim {

using namespace cpu;

namespace {

// The longest that an abort takes to reach the ranks of a node, their pauses included
constexpr Time kByMemory = 100 * kMillisecond;

Phase phase_of(const Immediate& i) {
  const Op op = i.op == Op::Credit ? Op(i.shard) : i.op;   // a credit names the op whose pieces it counts
  return op == Op::Dispatch ? Phase::DispatchRecv : op == Op::Combine ? Phase::CombineRecv : Phase::Weights;
}

}  // namespace

void World::strike() {
  struck_ = clock_.now();
  Rank& victim = ranks_[victim_];
  log_.line("rank %u: %s", victim_, name_of(trouble_));
  switch (trouble_) {
    case Trouble::Kill:
      totals_.count(Fault::Killed);
      if (victim.fabric && random_.chance(0.5))
        network_.hold_up(victim.fabric->port().number, clock_.now() + random_.between<Time>(1, 400) * kMillisecond);
      stop_fabric(victim);
      victim.running = victim.alive = false;
      for (Rank& rank : ranks_)
        if (rank.alive)
          later(random_.between<Time>(1, 5000) * kMicrosecond, [this, &rank, who = victim_] {
            tell(rank, {AbortReason::Death, Phase::None, who, who, 0}, rank_text(who) + " died");
          });
      return;
    case Trouble::Vanish:
      totals_.count(Fault::Vanished);
      victim.running = victim.alive = false;
      if (victim.fabric) victim.fabric->port().dead = true;
      return;
    case Trouble::Leave:
      totals_.count(Fault::Left);
      leave(victim);
      victim.alive = false;
      return;
    case Trouble::FailWrite: return set_trap(Trap::Kind::FailedWrite);
    case Trouble::FailSomewhere: return set_trap(Trap::Kind::FailedSomewhere);
    case Trouble::FailPost: return set_trap(Trap::Kind::FailedPost);
    case Trouble::Overrun: return set_trap(Trap::Kind::CompletionsLost);
    case Trouble::Corrupt: return set_trap(Trap::Kind::Corrupt);
    case Trouble::None: return;
  }
}

void World::set_trap(Trap::Kind kind) {
  constexpr Fault kDamages[] = {Fault::CorruptStep, Fault::CorruptGeneration, Fault::CorruptSource,
                                Fault::CorruptRows, Fault::CorruptCounts,     Fault::CorruptFlags, Fault::CorruptPiece};
  const Fault fault = node_ranks_ != 0 && random_.chance(0.5) ? Fault::CorruptMask : kDamages[random_.below(std::size(kDamages))];
  Trap trap;
  trap.kind = kind;
  trap.rank = victim_;
  trap.fits = [this, kind, fault](const Immediate& i, std::uint32_t peer, const BlockHeader& header, std::size_t bytes) {
    const Object& object = ranks_[victim_].objects[i.object];
    if (object.begun + 1 >= steps_) return false;   // no rank would read it any more
    if (kind != Trap::Kind::Corrupt) return true;
    if (i.op == Op::Weights && header.rows == 0) return false;   // never looked at
    if (fault == Fault::CorruptPiece) return i.op != Op::Weights;
    if (fault == Fault::CorruptCounts)
      return i.op == Op::Dispatch && i.piece == 0 && header.piece == 0 && local_experts(object.config, peer) > 0 &&
             bytes >= count_at(object.config, peer) + sizeof(std::uint32_t);
    if (fault == Fault::CorruptMask)
      return i.op == Op::Dispatch && header.rows > 0 && object.config.node_ranks != 0 &&
             bytes >= masks_at(object.config) + sizeof(std::uint32_t);
    return fault != Fault::CorruptFlags || i.op == Op::Combine;
  };
  trap.damage = [this, fault](const Immediate& i, char* block) { damage(fault, i, block); };
  network_.set_trap(std::move(trap));
}

// The place of a rank's counts in a block for it, or for its node.
std::uint64_t World::count_at(const Config& c, std::uint32_t peer) const {
  std::uint32_t number = 0;
  for (std::uint32_t r = 0; r < peer; ++r) number += ranks_[r].node == ranks_[peer].node;
  return sizeof(BlockHeader) + (c.node_ranks == 0 ? 0 : 4ull * number * experts_per_rank(c));
}

// Puts something impossible into the header.
void World::damage(Fault fault, const Immediate& i, char* block) {
  const Config& c = ranks_[victim_].objects[i.object].config;
  BlockHeader header;
  std::memcpy(&header, block, sizeof header);
  const auto other = random_.between(1u, 0xffffu);
  switch (fault) {
    case Fault::CorruptStep: header.step += other; break;
    case Fault::CorruptGeneration:
      header.generation = random_.chance(0.5) ? header.generation - 1 : header.generation + other;
      break;
    case Fault::CorruptSource: header.source ^= other; break;
    case Fault::CorruptRows:
      header.rows = i.op == Op::Dispatch ? c.max_tokens + other : header.rows + (random_.chance(0.5) ? 1 : other);
      break;
    case Fault::CorruptFlags: header.flags ^= kReleased; break;
    case Fault::CorruptPiece: (random_.chance(0.5) ? header.piece : header.pieces) += other; break;
    default: {
      const bool mask = fault == Fault::CorruptMask;
      char* const at = block + (mask ? masks_at(c) : count_at(c, network_.trap().peer));
      std::uint32_t word = 0;
      std::memcpy(&word, at, sizeof word);
      word = !mask ? 0x80000000u + other : word != 0 && random_.chance(0.5) ? 0u : 1u << c.node_ranks;  // a token may have no row
      std::memcpy(at, &word, sizeof word);
    }
  }
  std::memcpy(block, &header, sizeof header);
  totals_.count(fault);
  log_.line("rank %u: its header is damaged: %s", victim_, sim::name_of(fault));
}

void World::leave(Rank& rank) {
  log_.line("rank %u: closes its Communicator", rank.number);
  rank.running = false;
  rank.left = true;
  if (rank.proxy)
    for (Object& object : rank.objects) rank.proxy->detach(object.config.object);
  stop_fabric(rank);
  for (Rank& other : ranks_)
    if (other.alive && other.number != rank.number)
      later(random_.between<Time>(1, 50) * kMicrosecond, [&other, who = rank.number] {
        for (Object& object : other.objects) object.exchange->failures().peer_left(who);
      });
}

// Wakes a rank that stood still while the others reset without it. It goes on where it was, into memory that it still maps, with
// writes for which no memory is registered any more.
void World::wake_too_late(Rank& rank) {
  totals_.count(Fault::WokeTooLate);
  log_.line("rank %u: wakes, in the middle of a generation that is over", rank.number);
  rank.running = true;
  if (rank.fabric) rank.fabric->port().dead = false;
  if (rank.proxy) schedule(*rank.proxy_actor, true);
  schedule(*rank.phases_actor, true);
}

// As in Python after a call raised a failure: tells all ranks, unless all know.
void World::failed(Rank& rank, Object& object, const PeerFailure& failure) {
  log_.line("rank %u: object %u raises: %s", rank.number, object.config.object, failure.what());
  if (!rank.alive) {   // the others went on without it
    object.failure = failure;
    object.walkers.clear();
    return;
  }
  check_failure(rank, object, failure);
  // Ranks that share memory hear of it without control connections.
  const Time first = node_raised_.emplace(std::pair{object.config.object, rank.node}, clock_.now()).first->second;
  if (clock_.now() - first > kByMemory && !object.walkers.empty())
    throw Violation(rank_text(rank.number) + ", object " + std::to_string(object.config.object) +
                    ", noticed an abort of its own node after " + std::to_string(static_cast<double>(clock_.now() - first) * 1e-9) +
                    " s");
  ++totals_.failures;
  object.failure = failure;
  object.walkers.clear();   // their phases would raise the same failure
  if (rank.told) return;
  const bool timeout = failure.reason == AbortReason::Timeout;
  const std::uint32_t blamed = failure.peer == kNoRank ? rank.number : failure.peer;
  const Abort abort{timeout ? AbortReason::Timeout : AbortReason::User, Phase::None, rank.number, blamed, failure.step};
  tell(rank, abort, failure.what());
  for (Rank& other : ranks_)
    if (other.alive && other.number != rank.number)
      later(random_.between<Time>(1, gossip_),
            [this, &other, abort, message = std::string(failure.what())] { tell(other, abort, message); });
}

void World::tell(Rank& rank, const Abort& abort, const std::string& message) {
  if (rank.told || !rank.alive) return;
  rank.told = abort.peer;
  log_.line("rank %u: is told to blame rank %u", rank.number, abort.peer);
  for (Object& object : rank.objects) object.exchange->failures().fail(abort, message);
  wake(*rank.phases_actor);
}

// Returns the rank in whose memory `rank` looks for a peer's block: its relay, if that is another rank. Either may be blamed.
std::uint32_t World::holder_of(std::uint32_t rank, const Object& object, std::uint32_t peer) {
  const std::vector<std::uint32_t>& holder = object.exchange->blocks().rails().holder;
  return peer < holder.size() && holder[peer] != rank ? holder[peer] : peer;
}

// True if `rank` waits for `victim`, perhaps through others.
bool World::waits_for(std::uint32_t from, std::uint32_t victim) const {
  std::vector<bool> seen(ranks_.size(), false);
  std::vector<std::uint32_t> ask{from};
  while (!ask.empty()) {
    const std::uint32_t at = ask.back();
    ask.pop_back();
    if (at == victim || (at < ranks_.size() && late_[at])) return true;
    if (at >= ranks_.size() || seen[at]) continue;
    seen[at] = true;
    for (const Object& object : ranks_[at].objects) {
      if (object.failure) ask.push_back(object.failure->peer);
      for (const std::unique_ptr<Walker>& w : object.walkers)
        if (const std::uint32_t peer = w->waiting().peer; peer != kNoRank) {
          ask.push_back(peer);
          ask.push_back(holder_of(at, object, peer));
        }
    }
  }
  return false;
}

void World::check_failure(const Rank& rank, const Object& object, const PeerFailure& f) {
  const auto wrong = [&](const std::string& what) {
    throw Violation(rank_text(rank.number) + ", object " + std::to_string(object.config.object) + ", " + what + " (" +
                    name_of(trouble_) + " of rank " + std::to_string(victim_) + "): it raised \"" + f.what() + "\", peer " +
                    std::to_string(f.peer) + ", reason " + std::to_string(static_cast<int>(f.reason)) + ", " + phase_name(f.phase) +
                    " of step " + std::to_string(f.step));
  };
  const Trap& trap = network_.trap();
  if (trouble_ == Trouble::None || !struck_ || (is_trap(trouble_) && !trap.fired)) wrong("raised without a cause");
  const std::string text = f.what();
  if (f.peer != kNoRank && text.find(rank_text(f.peer)) == std::string::npos) wrong("does not name the blamed rank");
  if (text.find(rank_text(kNoRank)) != std::string::npos) wrong("names a rank that there is none of");
  const bool first_hand = rank.number == (trouble_ == Trouble::Corrupt ? trap.peer : victim_);
  const auto must_blame = [&](std::uint32_t peer) {
    if (f.peer != peer) wrong("blames the wrong rank");
  };
  const auto must_say = [&](AbortReason reason) {
    if (f.reason != reason) wrong("gives the wrong reason");
    if (f.phase != phase_of(trap.immediate)) wrong("names the wrong phase");
    // A credit is not waited for: when it fails, its place may serve a later step.
    const bool later = trap.immediate.op == Op::Credit && (f.step - trap.immediate.step) % 32 < 16;
    if (!same_step(f.step, trap.immediate) && !later) wrong("names the wrong step");
  };
  // A rank that has taken all its steps makes no call that could report the cause. Then a rank that waits for it gives up, or first
  // a replica of that rank, which waits for rows that it cannot finish.
  const auto gave_up_on_silent = [&](bool silent) {
    if (!silent || f.reason != AbortReason::Timeout || f.peer >= ranks_.size()) return false;
    if (!waits_for(f.peer, victim_) && !waits_for(holder_of(rank.number, object, f.peer), victim_)) return false;
    late_[f.peer] = true;
    return true;
  };
  switch (trouble_) {
    case Trouble::Kill:
    case Trouble::Leave: must_blame(victim_); break;
    case Trouble::Vanish:
      // A timeout blames the rank that it waited for, which may itself have been waiting.
      if (f.peer >= ranks_.size()) wrong("blames no rank");
      if (!waits_for(f.peer, victim_) && !waits_for(holder_of(rank.number, object, f.peer), victim_))
        wrong("blames a rank that does not wait for it");
      late_[f.peer] = true;
      break;
    case Trouble::FailWrite:
    case Trouble::FailPost:
      if (f.peer != trap.peer && gave_up_on_silent(ranks_[victim_].objects[trap.immediate.object].closed == steps_)) break;
      must_blame(trap.peer);
      // A rank that makes no more calls may be told first: others have given up the rank to which it failed.
      if (first_hand && !rank.told && object.config.object == trap.immediate.object) must_say(AbortReason::Fabric);
      break;
    case Trouble::FailSomewhere:
    case Trouble::Overrun:
      if (gave_up_on_silent(steps_done(ranks_[victim_]))) break;
      if (first_hand && !rank.told && f.reason != AbortReason::Fabric) wrong("gives the wrong reason");
      must_blame(victim_);
      break;
    case Trouble::Corrupt:
      must_blame(victim_);
      if (first_hand && object.config.object == trap.immediate.object) must_say(AbortReason::Protocol);
      break;
    case Trouble::None: break;
  }
}

// Every survivor must raise the cause in time, whatever it was doing.
void World::finish_in_trouble() {
  double allowed = 1.0;
  if (trouble_ == Trouble::Vanish || trouble_ == Trouble::FailWrite || trouble_ == Trouble::FailPost) allowed += 3 * timeout_;
  if (trouble_ == Trouble::Leave) allowed += 1.0;
  const Time deadline = *struck_ + static_cast<Time>(allowed * 1e9);
  const auto all_raised = [this] {
    for (Rank& rank : ranks_)
      for (Object& object : rank.objects)
        if (rank.alive && !object.failure && !(object.walkers.empty() && rank.told)) return false;
    return true;
  };
  if (!pump(std::max(deadline, clock_.now()) + 100 * kMillisecond, all_raised)) {
    for (const Rank& rank : ranks_)
      for (const Object& object : rank.objects)
        if (rank.alive && !object.failure)
          throw Violation(rank_text(rank.number) + " has not noticed " + name_of(trouble_) + " of rank " + std::to_string(victim_) +
                          " after " + std::to_string(static_cast<double>(clock_.now() - *struck_) * 1e-9) + " s");
  }
  // A rank between two steps raises it at its next call.
  for (Rank& rank : ranks_) {
    if (!rank.alive) continue;
    rank.running = false;
    for (Object& object : rank.objects) {
      try {
        object.exchange->failures().raise();
        throw Violation(rank_text(rank.number) + " forgot its failure");
      } catch (const PeerFailure& failure) {
        check_failure(rank, object, failure);
        if (object.failure && (failure.peer != object.failure->peer || failure.reason != object.failure->reason))
          throw Violation(rank_text(rank.number) + " raises another failure than at first");
      }
    }
  }
}

// All steps are done in spite of the trouble. That is right if a failed write's data had landed; its rank's next call reports it.
void World::check_noticed() {
  if (!struck_ || (is_trap(trouble_) && !network_.trap().fired)) return;
  pump(clock_.now() + kSecond, [] { return false; });
  Rank& victim = ranks_[victim_];
  Object& object = victim.objects[network_.trap().immediate.object];
  try {
    if (trouble_ == Trouble::FailWrite || trouble_ == Trouble::FailSomewhere || trouble_ == Trouble::Overrun)
      object.exchange->failures().raise();
  } catch (const PeerFailure& failure) {
    check_failure(victim, object, failure);
    return;
  }
  throw Violation(std::string("no rank noticed: ") + name_of(trouble_) + " of rank " + std::to_string(victim_));
}

}  // namespace pplx::sim
