#include "network.h"

#include <algorithm>
#include <cstring>

namespace pplx::sim {
namespace {

constexpr int kLinkError = 104, kRemoteAccess = 13;
constexpr std::size_t kHistory = 64;
// Five bits of the step travel, and three of the piece, so an immediate that is 32 steps or eight pieces old looks current. No
// network repeats that late: what is repeated is among the last few steps of its source, and the last few pieces of its stream.
constexpr std::uint64_t kRecentSteps = 12;   // eight may be open
constexpr std::uint64_t kRecentPieces = 4;

// A source and an AllToAll count steps together. Not each step has weights, so these cannot count for themselves.
std::uint32_t steps_of(std::uint32_t immediate) { return immediate & 0x1fff0000u; }

// The stream that an immediate belongs to. A credit has no shards; there they name an op.
std::uint32_t stream_of(std::uint32_t immediate) {
  return immediate & (unpack(immediate).op == Op::Credit ? 0xffff00ffu : 0xffff0000u);
}

}  // namespace

Profile::Profile(Random& random) {
  latency = random.between<Time>(1, 20) * kMicrosecond;
  ns_per_byte = random.chance(0.5) ? 0.02 : 1.0;
  const auto often = [&](double most) { return random.chance(0.3) ? 0.0 : most * static_cast<double>(random.below(1000)) / 1000; };
  late_read = often(0.5);
  split = often(0.6);
  delayed = often(0.03);
  duplicated = often(0.2);
  replayed = often(0.1);
  stranger = often(0.02);
  busy = often(0.15);
  queue_depth = random.chance(0.3) ? random.between(1u, 8u) : 256;
  completions = random.chance(0.3) ? random.between(1u, 8u) : 1024;
  refuses_unknown = random.chance(0.5);
  offsets = random.chance(0.5);
}

void Network::calm() {
  Profile& p = profile_;
  p.late_sent = p.late_read = p.split = p.delayed = p.duplicated = p.replayed = p.stranger = p.busy = 0;
  p.queue_depth = 256;
  p.completions = 1024;
}

Network::Port& Network::open(std::uint32_t rank, int endpoints) {
  ports_.push_back(std::make_unique<Port>());
  Port& port = *ports_.back();
  port.number = static_cast<std::uint32_t>(ports_.size() - 1);
  port.rank = rank;
  port.endpoints = endpoints;
  return port;
}

void Network::close(std::uint32_t number) {
  Port& port = *ports_[number];
  port.open = false;
  port.on_ready = nullptr;
  port.regions.clear();
  port.ready.clear();
  port.held.clear();
}

// ---- posting -------------------------------------------------------------------------------------------------------------

// EAGAIN: towards a busy peer, with a full queue, or from a peer that does not know the initiator.
bool Network::refuses(Port& from, const Port& to, int peer, bool unknown) {
  Time& busy_until = from.busy_until[peer];
  if (clock_.now() < busy_until) return true;
  if (random_.chance(profile_.busy)) {
    busy_until = clock_.now() + random_.between<Time>(1, 10 * profile_.latency);
    totals_.count(Fault::Busy);
    log_.line("rank %u: EAGAIN towards rank %d", from.rank, peer);
    return true;
  }
  if (from.under_way >= profile_.queue_depth) {
    totals_.count(Fault::QueueFull);
    return true;
  }
  if (unknown && profile_.refuses_unknown) {
    totals_.count(Fault::UnknownRefused);
    log_.line("rank %u: EAGAIN, rank %u has not inserted it yet", from.rank, to.rank);
    busy_until = clock_.now() + random_.between<Time>(1, profile_.latency);
    return true;
  }
  return false;
}

Network::Flight& Network::take_flight(std::uint32_t* number) {
  if (free_.empty()) {
    *number = static_cast<std::uint32_t>(flights_.size());
    return flights_.emplace_back();
  }
  *number = free_.back();
  free_.pop_back();
  return flights_[*number] = Flight();
}

Post Network::post(Port& from, const Write& write) {
  const auto peer = from.peers.find(write.peer);
  if (peer == from.peers.end()) throw Violation("a write to rank " + std::to_string(write.peer) + ", which was never inserted");
  if (write.endpoint < 0 || write.endpoint >= from.endpoints) throw Violation("a write on an endpoint that is none");
  Port& to = *ports_[peer->second];
  const auto source = from.regions.find(static_cast<std::uint64_t>(write.source->id));
  if (source == from.regions.end() || write.source_offset + write.bytes > source->second.bytes)
    throw Violation("a write that reads outside of registered memory");
  const Immediate immediate = unpack(write.immediate);

  const bool unknown = to.open && to.peers.count(static_cast<int>(from.rank)) == 0;
  if (refuses(from, to, write.peer, unknown)) return Post::Again;
  Fate fate = Fate::Whole;
  if (trapped(from, write, immediate, &fate))
    throw FabricError("fi_writemsg to rank " + std::to_string(write.peer) + ": planted failure");

  std::uint32_t number;
  Flight& f = take_flight(&number);
  f.from = from.number;
  f.to = to.number;
  f.write = write;
  f.source = source->second.base + write.source_offset;
  f.source_key = source->first;
  f.key = write.target->key[0];
  f.target = write.target->base + write.target_offset;
  f.immediate = immediate;
  f.fate = fate;
  f.order = ++pair(f.from, f.to).posted;
  f.bytes.resize(write.bytes);
  ++from.under_way;
  ++totals_.writes;
  from.posted[immediate.object] += write.bytes;
  if (log_.on())
    log_.line("rank %u -> rank %u: %s of step ..%02x, object %u, shard %u of %u, %zu bytes: posted on endpoint %d", from.rank,
              to.rank, op_name(immediate.op), immediate.step, immediate.object, immediate.shard, immediate.shards, write.bytes,
              write.endpoint);
  if (unknown) {
    totals_.count(Fault::UnknownDropped);
    f.patience = profile_.latency;
    schedule(number, kTryPeer, random_.between(f.patience, 4 * f.patience));
  } else {
    launch(number);
  }
  return Post::Accepted;
}

// True: the post itself fails.
bool Network::trapped(Port& from, const Write& write, const Immediate& immediate, Fate* fate) {
  if (trap_.fired || trap_.rank != from.rank || trap_.kind == Trap::Kind::None || trap_.kind == Trap::Kind::CompletionsLost)
    return false;
  BlockHeader header;
  if (immediate.op == Op::Credit) {
    if (trap_.kind == Trap::Kind::Corrupt) return false;
  } else {
    if (immediate.shard != 0 || write.bytes < sizeof header) return false;   // the first shard has the header
    std::memcpy(&header, static_cast<const char*>(write.source->base) + write.source_offset, sizeof header);
  }
  if (!trap_.fits(immediate, static_cast<std::uint32_t>(write.peer), header, write.bytes)) return false;
  trap_.fired = true;
  trap_.peer = static_cast<std::uint32_t>(write.peer);
  trap_.immediate = immediate;
  log_.line("rank %u: a planted failure in the %s of step ..%02x to rank %d", from.rank, op_name(immediate.op), immediate.step,
            write.peer);
  switch (trap_.kind) {
    case Trap::Kind::FailedPost: totals_.count(Fault::FailedPost); return true;
    case Trap::Kind::FailedWrite: totals_.count(Fault::FailedWrite); *fate = Fate::Fails; return false;
    case Trap::Kind::FailedSomewhere: totals_.count(Fault::FailedSomewhere); *fate = Fate::FailsUnsaid; return false;
    default: *fate = Fate::Corrupt; return false;
  }
}

void Network::schedule(std::uint32_t number, std::uint32_t action, Time delay) {
  ++flights_[number].events;
  clock_.after(delay, *this, number * kActions + action);
}

// When each piece is read and lands, and when the completions are due. Sent waits for every read, the arrival for every landing.
void Network::launch(std::uint32_t number) {
  Flight& f = flights_[number];
  const Time latency = std::max<Time>(1, profile_.latency);
  Time wire = random_.between<Time>(latency / 2, latency * 3 / 2) +
              static_cast<Time>(static_cast<double>(f.write.bytes) * profile_.ns_per_byte);
  if (random_.chance(profile_.delayed)) {
    totals_.count(Fault::Delayed);
    wire *= random_.between<Time>(20, 100);
  }
  f.count = 1;
  if (f.write.bytes > 1 && f.fate != Fate::Corrupt && random_.chance(profile_.split)) {
    f.count = static_cast<std::uint32_t>(std::min<std::size_t>(f.write.bytes, random_.between(2u, kMostPieces)));
    totals_.count(Fault::SplitRead);
    totals_.count(Fault::SplitLanding);
  }
  std::size_t at = 0;
  for (std::uint32_t i = 0; i < f.count; ++i) {
    const std::size_t left = f.write.bytes - at, more = f.count - 1 - i;
    const std::size_t bytes = more == 0 ? left : 1 + random_.below(left - more);
    f.pieces[i] = {at, at + bytes, false};
    at += bytes;
  }
  f.unread = f.unlanded = f.count;
  // The local completion may come long before the data lands, or long after; a late read comes with it.
  const Time completes = random_.chance(profile_.late_sent) ? wire * random_.between<Time>(2, 30) : random_.between<Time>(1, 2 * wire);
  const bool late = f.fate == Fate::Whole && random_.chance(profile_.late_read);
  if (late) totals_.count(Fault::LateRead);
  const auto slow = late_.find({ports_[f.from]->rank, ports_[f.to]->rank});
  const Time by = slow == late_.end() ? 0 : slow->second;
  Time last_read = 0, last_landing = 0;
  for (std::uint32_t i = 0; i < f.count; ++i) {
    const Time read = late && i + 1 == f.count ? completes : random_.between<Time>(0, std::min(completes, wire / 2));
    const Time lands = read + random_.between<Time>(1, wire) + by;
    last_read = std::max(last_read, read);
    last_landing = std::max(last_landing, lands);
    schedule(number, kRead + i, read);
    schedule(number, kLand + i, lands);
  }
  schedule(number, kSent, std::max(completes, last_read));
  schedule(number, kArrive, last_landing + random_.between<Time>(0, latency / 4));
}

// ---- on the way ------------------------------------------------------------------------------------------------------------

std::string Network::text(const Flight& f) const {
  return "the " + std::string(op_name(f.immediate.op)) + " of rank " + std::to_string(ports_[f.from]->rank) + " to rank " +
         std::to_string(ports_[f.to]->rank) + " (step .." + std::to_string(f.immediate.step) + ", shard " +
         std::to_string(f.immediate.shard) + " of " + std::to_string(f.immediate.shards) + ")";
}

void Network::run(std::uint32_t what) {
  const std::uint32_t number = what / kActions, action = what % kActions;
  Flight& f = flights_[number];
  --f.events;
  if (clock_.now() < f.not_before && ((action >= kLand && action < kSent) || action == kArrive)) {
    schedule(number, action, f.not_before - clock_.now() + (action == kArrive ? 1 : 0));
    return;
  }
  if (action < kLand) {
    read(f, f.pieces[action - kRead]);
  } else if (action < kSent) {
    land(f, f.pieces[action - kLand]);
  } else if (action == kSent) {
    sent(f);
  } else if (action == kArrive) {
    arrive(number, f);
  } else if (action == kRepeat) {
    if (ports_[f.to]->open && is_recent(*ports_[f.to], f.arrival)) {
      totals_.count(Fault::Duplicated);
      if (log_.on()) log_.line("rank %u: %s arrived once more", ports_[f.to]->rank, text(f).c_str());
      repeat_arrival(*ports_[f.to], f.arrival);
    }
  } else if (action == kTryPeer) {
    const Port& to = *ports_[f.to];
    if (to.open && to.peers.count(static_cast<int>(ports_[f.from]->rank)) == 0) {
      totals_.count(Fault::UnknownDropped);
      f.patience = std::min(2 * f.patience, 50 * kMillisecond);
      schedule(number, kTryPeer, random_.between(f.patience / 2, f.patience));
    } else {
      launch(number);
    }
  }
  if (flights_[number].events == 0) free_.push_back(number);
}

void Network::read(Flight& f, Piece& piece) {
  const Port& from = *ports_[f.from];
  if (!from.open || from.dead) {
    f.lost = true;   // the process is gone before its data left
    return;
  }
  piece.read = true;
  if (piece.end > piece.begin) std::memcpy(f.bytes.data() + piece.begin, f.source + piece.begin, piece.end - piece.begin);
  if (--f.unread == 0 && f.fate == Fate::Corrupt) trap_.damage(f.immediate, f.bytes.data());
}

void Network::land(Flight& f, const Piece& piece) {
  if (!piece.read || f.lost) return;
  Port& to = *ports_[f.to];
  --f.unlanded;
  if (f.fate == Fate::Fails && random_.chance(0.5)) f.lost = true;   // the rest may or may not land
  if (f.fate == Fate::FailsUnsaid) f.lost = true;
  if (f.lost) return;
  const auto region = to.regions.find(f.key);
  if (!to.open || region == to.regions.end()) {
    totals_.count(Fault::StaleWrite);
    if (log_.on()) log_.line("%s reached memory that is registered no more", text(f).c_str());
    f.lost = true;
    return;
  }
  const std::uint64_t at = profile_.offsets ? f.target : f.target - reinterpret_cast<std::uint64_t>(region->second.base);
  if (at + f.write.bytes > region->second.shared_bytes) throw Violation(text(f) + " writes outside of shared memory");
  if (to.dead) return;
  if (piece.end > piece.begin)
    std::memcpy(region->second.base + at + piece.begin, f.bytes.data() + piece.begin, piece.end - piece.begin);
}

void Network::sent(Flight& f) {
  Port& from = *ports_[f.from];
  if (!from.open || from.dead) return;
  Port& to = *ports_[f.to];
  --from.under_way;
  if (to.dead && f.unlanded > 0) return;   // its outcome stays unknown, but its place in the queue is free
  Due due;
  due.completion.kind = Completion::Kind::Sent;
  due.completion.context = f.write.context;
  due.completion.endpoint = f.write.endpoint;
  const bool gone = !to.open && f.unlanded > 0;
  if (f.fate == Fate::Fails || f.fate == Fate::FailsUnsaid || f.lost || gone) {
    due.completion.kind = Completion::Kind::Failed;
    due.completion.has_context = f.fate != Fate::FailsUnsaid;
    due.completion.error = f.lost && to.open && f.fate == Fate::Whole ? kRemoteAccess : kLinkError;
    if (log_.on()) log_.line("rank %u: %s failed", from.rank, text(f).c_str());
    push(from, due);
    return;
  }
  // Until this moment the provider may read the source, once or many times.
  if (f.fate == Fate::Whole && !f.bytes.empty() && std::memcmp(f.bytes.data(), f.source, f.bytes.size()) != 0)
    throw Violation(text(f) + ": its source changed before its local completion");
  due.source = f.source;
  due.bytes = f.bytes.size();
  due.key = f.source_key;
  if (log_.on()) log_.line("rank %u: %s left", from.rank, text(f).c_str());
  push(from, due);
}

void Network::arrive(std::uint32_t number, Flight& f) {
  Port& to = *ports_[f.to];
  if (f.lost || f.unread > 0 || f.unlanded > 0 || !to.open || to.dead) return;
  Pair& among = pair(f.from, f.to);
  if (f.order < among.arrived) totals_.count(Fault::Reordered);
  among.arrived = std::max(among.arrived, f.order);
  const auto op = static_cast<std::size_t>(f.immediate.op);
  const std::uint32_t block = f.immediate.object << 8 | f.immediate.step << 3 | f.immediate.piece;
  if (among.block[op] == block && f.immediate.shard < among.shard[op]) totals_.count(Fault::ShardsReordered);
  among.block[op] = block;
  among.shard[op] = f.immediate.shard;
  if (log_.on()) log_.line("rank %u: %s arrived", to.rank, text(f).c_str());
  push_arrival(to, f.write.immediate);
  f.arrival = note(to, f.write.immediate);

  if (random_.chance(profile_.duplicated)) schedule(number, kRepeat, random_.between<Time>(1, 4 * profile_.latency));
  if (!to.history.empty() && random_.chance(profile_.replayed)) {
    const Arrival& old = to.history[random_.below(to.history.size())];
    const Immediate i = unpack(old.immediate);
    if (is_recent(to, old)) {
      totals_.count(Fault::Replayed);
      log_.line("rank %u: the %s of rank %u, step ..%02x, shard %u, piece ..%u arrived, of long ago", to.rank, op_name(i.op),
                i.source, i.step, i.shard, i.piece);
      repeat_arrival(to, old);
    }
  }
  if (random_.chance(profile_.stranger)) {
    const Immediate i{static_cast<Op>(random_.below(8)), static_cast<std::uint32_t>(random_.below(8)),
                      random_.chance(0.5) ? to.rank : kMaxRanks - 1, static_cast<std::uint32_t>(random_.below(256)), 0, 1};
    totals_.count(Fault::UnknownSource);
    log_.line("rank %u: an immediate of an unknown source arrived", to.rank);
    push_arrival(to, pack(i));
  }
  to.history.push_back(f.arrival);
  if (to.history.size() > kHistory) to.history.pop_front();
}

bool Network::is_recent(const Port& port, const Arrival& arrival) {
  const auto newest = port.steps.find(steps_of(arrival.immediate));
  if (newest == port.steps.end() || arrival.step + kRecentSteps < newest->second) return false;
  const auto pieces = port.streams.find(stream_of(arrival.immediate));
  if (pieces == port.streams.end()) return false;
  const auto piece = pieces->second.find(arrival.step);
  return piece != pieces->second.end() && arrival.piece + kRecentPieces >= piece->second;
}

// Steps, and pieces of a step, come in any order, but none is overtaken by half the count that its number can tell apart.
Network::Arrival Network::note(Port& port, std::uint32_t immediate) {
  const Immediate i = unpack(immediate);
  std::uint64_t& newest_step = port.steps[steps_of(immediate)];
  Pieces& pieces = port.streams[stream_of(immediate)];
  if (newest_step == 0) newest_step = 32 + i.step;
  const std::uint32_t step_ahead = (i.step - static_cast<std::uint32_t>(newest_step)) & 31u;
  const bool late_step = step_ahead > 16;
  Arrival at{immediate, late_step ? newest_step - (32 - step_ahead) : newest_step + step_ahead};
  newest_step = std::max(newest_step, at.step);
  std::uint64_t& newest = pieces.try_emplace(at.step, 8 + i.piece).first->second;
  const std::uint32_t piece_ahead = (i.piece - static_cast<std::uint32_t>(newest)) & 7u;
  const bool late_piece = piece_ahead > kRecentPieces;
  at.piece = late_piece ? newest - (8 - piece_ahead) : newest + piece_ahead;
  newest = std::max(newest, at.piece);
  while (pieces.begin()->first + 16 < newest_step) pieces.erase(pieces.begin());
  if (i.op == Op::Credit) {
    totals_.count(Fault::Credit);
    if (late_step || late_piece) totals_.count(Fault::CreditReordered);
  } else if (i.piece > 0) {
    totals_.count(Fault::Piece);
  }
  return at;
}

void Network::hold_up(std::uint32_t port, Time then) {
  for (Flight& f : flights_)
    if (f.events > 0 && f.from == port && f.unread == 0) f.not_before = then;
}

// ---- completions -----------------------------------------------------------------------------------------------------------

void Network::push_arrival(Port& at, std::uint32_t immediate) {
  Due due;
  due.completion.kind = Completion::Kind::Arrived;
  due.completion.immediate = immediate;
  push(at, due);
}

void Network::repeat_arrival(Port& at, const Arrival& arrival) {
  Due due;
  due.completion.kind = Completion::Kind::Arrived;
  due.completion.immediate = arrival.immediate;
  due.repeated = true;
  due.repeats = arrival;
  push(at, due);
}

void Network::push(Port& at, const Due& due) {
  if (trap_.kind == Trap::Kind::CompletionsLost && trap_.rank == at.rank && !trap_.fired && !at.ready.empty() &&
      trap_.fits({}, 0, {}, 0)) {
    trap_.fired = at.overran = true;
    totals_.count(Fault::CompletionsLost);
    log_.line("rank %u: its completion queue overran", at.rank);
  }
  if (at.ready.size() < profile_.completions) {
    at.ready.push_back(due);
  } else {
    totals_.count(Fault::CompletionsHeld);
    at.held.push_back(due);
  }
  if (at.on_ready) at.on_ready();
}

int Network::poll(Port& at, Completion* out, int capacity) {
  if (at.overran) throw FabricError("completion queue of sim" + std::to_string(at.rank) + " overran, completions are lost");
  // A poll may return fewer completions than there are.
  const int most = random_.chance(0.1) ? 1 : capacity;
  int n = 0;
  while (n < most && !at.ready.empty()) {
    Due& due = at.ready[random_.below(at.ready.size())];
    // Completions overtake each other, so it may have become too old here
    if (!due.repeated || is_recent(at, due.repeats)) out[n++] = due.completion;
    if (due.bytes > 0 && at.regions.count(due.key) != 0) {
      std::memset(due.source, 0xa5, due.bytes);
      totals_.count(Fault::Poisoned);
    }
    due = at.ready.back();
    at.ready.pop_back();
  }
  while (!at.held.empty() && at.ready.size() < profile_.completions) {
    at.ready.push_back(at.held.front());
    at.held.pop_front();
  }
  return n;
}

}  // namespace pplx::sim
