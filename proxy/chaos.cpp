#include "chaos.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <thread>

#include "../src/protocol/immediate.h"

namespace pplx {
namespace {

// Three bits of a piece's number travel, and five of a step's, so eight pieces later, or 32 steps, a copy would look current. A
// replay is at most 2 * kPast arrivals old.
constexpr std::size_t kPast = 3;
constexpr std::size_t kMostWaiting = 4096;       // may wait: real queues are finite
constexpr std::size_t kErrorsKept = 64;
constexpr std::uint32_t kLongestBurst = 4;
constexpr std::uint64_t kLongestDelay = 10'000'000;
constexpr int kCutError = 110;                 // ETIMEDOUT, what a NIC says after its last retry

std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

double fraction(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1p-53; }

[[noreturn]] void refuse(const std::string& item, const std::string& why) {
  throw std::invalid_argument("'" + item + "' " + why);
}

std::uint64_t number(const std::string& item, const std::string& text) {
  if (text.empty() || text.size() > 18 || text.find_first_not_of("0123456789") != std::string::npos)
    refuse(item, "must be a whole number, not '" + text + "'");
  return std::stoull(text);
}

double probability(const std::string& item, const std::string& text) {
  std::size_t used = 0;
  double value = -1;
  if (!text.empty() && text.find_first_not_of("0123456789.") == std::string::npos) try {
      value = std::stod(text, &used);
    } catch (const std::exception&) {
      used = 0;
    }
  if (used != text.size() || !(value >= 0 && value <= 1)) refuse(item, "must be a probability, 0 to 1, not '" + text + "'");
  return value;
}

ChaosOptions::Cut cut(const std::string& item, const std::string& text, bool silent) {
  const std::size_t dash = text.find('-'), at = text.find('@');
  if (dash == std::string::npos || at == std::string::npos || dash > at)
    refuse(item, "must be two ranks and a number, like 0-2@100");
  ChaosOptions::Cut cut;
  cut.silent = silent;
  const std::uint64_t a = number(item, text.substr(0, dash)), b = number(item, text.substr(dash + 1, at - dash - 1));
  if (a >= kMaxRanks || b >= kMaxRanks || a == b) refuse(item, "must name two different ranks below " + std::to_string(kMaxRanks));
  cut.a = static_cast<int>(a);
  cut.b = static_cast<int>(b);
  cut.after = number(item, text.substr(at + 1));
  return cut;
}

ChaosOptions::Stall stall(const std::string& item, const std::string& text) {
  const std::size_t at = text.find('@');
  if (at == std::string::npos) refuse(item, "must be a rank and a number of writes, like 2@100");
  const std::uint64_t rank = number(item, text.substr(0, at));
  if (rank >= kMaxRanks) refuse(item, "must name a rank below " + std::to_string(kMaxRanks));
  return {static_cast<int>(rank), number(item, text.substr(at + 1))};
}

struct Probability {
  const char* name;
  double ChaosOptions::*value;
};
constexpr Probability kProbabilities[] = {
    {"delay", &ChaosOptions::delay},         {"shuffle", &ChaosOptions::shuffle}, {"split", &ChaosOptions::split},
    {"duplicate", &ChaosOptions::duplicate}, {"replay", &ChaosOptions::replay},   {"again", &ChaosOptions::again},
};

}  // namespace

ChaosOptions parse_chaos(const std::string& text) {
  ChaosOptions options;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    begin = end + 1;
    const std::size_t equals = item.find('=');
    if (equals == std::string::npos) refuse(item, "must be name=value, several with commas between");
    const std::string name = item.substr(0, equals), value = item.substr(equals + 1);
    const auto* known =
        std::find_if(std::begin(kProbabilities), std::end(kProbabilities), [&](const Probability& p) { return p.name == name; });
    if (known != std::end(kProbabilities)) options.*known->value = probability(item, value);
    else if (name == "seed") options.seed = number(item, value);
    else if (name == "delay_us") options.delay_us = static_cast<std::uint32_t>(std::min(number(item, value), kLongestDelay));
    else if (name == "kill" || name == "mute") options.cuts.push_back(cut(item, value, name == "mute"));
    else if (name == "late") {
      const ChaosOptions::Cut link = cut(item, value, false);
      options.lates.push_back({link.a, link.b, static_cast<std::uint32_t>(std::min(link.after, kLongestDelay))});
    } else if (name == "stall") options.stalls.push_back(stall(item, value));
    else
      refuse(item, "is unknown: there are seed, delay, delay_us, shuffle, split, duplicate, replay, again, kill, mute, stall and late");
  }
  return options;
}

std::string to_text(const ChaosOptions& options) {
  std::string text = "seed=" + std::to_string(options.seed);
  char room[64];
  for (const Probability& p : kProbabilities) {
    std::snprintf(room, sizeof room, ",%s=%g", p.name, options.*p.value);
    text += room;
  }
  text += ",delay_us=" + std::to_string(options.delay_us);
  for (const ChaosOptions::Cut& c : options.cuts)
    text += (c.silent ? ",mute=" : ",kill=") + std::to_string(c.a) + "-" + std::to_string(c.b) + "@" + std::to_string(c.after);
  for (const ChaosOptions::Stall& s : options.stalls) text += ",stall=" + std::to_string(s.rank) + "@" + std::to_string(s.after);
  for (const ChaosOptions::Late& l : options.lates)
    text += ",late=" + std::to_string(l.from) + "-" + std::to_string(l.to) + "@" + std::to_string(l.us);
  return text;
}

ChaosFabric::ChaosFabric(std::shared_ptr<Fabric> inner, const ChaosOptions& options, int rank,
                         std::function<Clock::time_point()> now)
    : inner_(std::move(inner)), options_(options), rank_(rank), now_(std::move(now)),
      state_(mixed(options.seed) + static_cast<std::uint64_t>(rank)) {}

std::string ChaosFabric::name() const { return inner_->name() + " in chaos " + to_text(options_); }

std::uint64_t ChaosFabric::random() { return mixed(state_ += 0x9e3779b97f4a7c15u); }
bool ChaosFabric::chance(double probability) { return fraction(random()) < probability; }

ChaosFabric::Clock::time_point ChaosFabric::due_after(Clock::time_point now) {
  if (!chance(options_.delay) || options_.delay_us == 0) return now;
  ++counts_.delayed;
  return now + std::chrono::microseconds(1 + below(options_.delay_us));
}

std::chrono::microseconds ChaosFabric::late_to(int peer) const {
  for (const ChaosOptions::Late& l : options_.lates)
    if (l.from == rank_ && l.to == peer) return std::chrono::microseconds(l.us);
  return {};
}

// The link to that peer, if it is cut by now.
const ChaosOptions::Cut* ChaosFabric::cut_to(int peer) const {
  for (const ChaosOptions::Cut& c : options_.cuts) {
    if (!(c.a == rank_ && c.b == peer) && !(c.b == rank_ && c.a == peer)) continue;
    const auto written = written_.find(peer);
    if ((written == written_.end() ? 0 : written->second) >= c.after) return &c;
  }
  return nullptr;
}

// An AllToAll may take the number of a closed one. Its 32-bit immediates cannot be told from copies of the old one's.
void ChaosFabric::forget_past() {
  past_.clear();
  held_.erase(std::remove_if(held_.begin(), held_.end(), [](const Held& held) { return held.copy; }), held_.end());
}

LocalRegion ChaosFabric::register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) {
  forget_past();
  return inner_->register_memory(base, bytes, shared_bytes);
}

LocalRegion ChaosFabric::register_device_memory(const DeviceMemory& memory) {
  forget_past();
  return inner_->register_device_memory(memory);
}

// ---- writes ----------------------------------------------------------------------------------------------------------------

Post ChaosFabric::write(const Write& write) {
  if (refusals_ == 0 && chance(options_.again)) refusals_ = 1 + static_cast<std::uint32_t>(below(kLongestBurst));
  if (refusals_ > 0) {
    --refusals_;
    ++counts_.refused;
    return Post::Again;
  }
  if (pieces_.size() >= kMostWaiting) return Post::Again;
  const std::uint64_t id = next_id_++;
  Operation& operation = operations_[id];
  operation.write = write;
  if (write.source != nullptr) operation.source = *write.source;
  if (write.target != nullptr) operation.target = *write.target;
  if (const ChaosOptions::Cut* c = cut_to(write.peer)) {
    operation.pieces = 1;
    operation.swallowed = c->silent;
    ++(c->silent ? counts_.swallowed : counts_.failed);
    if (!c->silent) end_piece(id, kCutError, "write to peer " + std::to_string(write.peer) + ": chaos cut the link");
    return Post::Accepted;
  }
  ++written_[write.peer];
  divide(id, operation);
  return Post::Accepted;
}

// All shards of a block must be cut into the same number of pieces, or their numbers would not fit together. So a hash of what they
// share decides, not chance.
std::uint32_t ChaosFabric::pieces_of(const Write& write) const {
  Immediate i = unpack(write.immediate);
  if (i.op == Op::Credit) return 1;   // it has no shards
  const std::uint32_t most = std::min(4u, kMaxShards / i.shards);
  if (most < 2) return 1;
  i.shard = 0;
  const std::uint64_t bits = mixed(mixed(options_.seed ^ pack(i)) + static_cast<std::uint64_t>(write.peer));
  return fraction(bits) < options_.split ? 2 + static_cast<std::uint32_t>(mixed(bits) % (most - 1)) : 1;
}

void ChaosFabric::divide(std::uint64_t id, Operation& operation) {
  const Write& w = operation.write;
  const std::uint32_t pieces = pieces_of(w);
  if (pieces > 1) ++counts_.split;
  std::vector<std::size_t> ends;             // at random, so pieces may be empty
  for (std::uint32_t i = 1; i < pieces; ++i) ends.push_back(below(w.bytes + 1));
  std::sort(ends.begin(), ends.end());
  ends.push_back(w.bytes);
  operation.pieces = pieces;
  const Clock::time_point now = now_() + late_to(w.peer);
  const Immediate whole = unpack(w.immediate);
  std::size_t begin = 0;
  for (std::uint32_t i = 0; i < pieces; ++i) {
    Immediate immediate = whole;
    immediate.shards = whole.shards * pieces;
    immediate.shard = whole.shard * pieces + i;
    const int endpoint = pieces > 1 ? static_cast<int>(below(static_cast<std::size_t>(endpoints()))) : w.endpoint;
    pieces_.push_back({id, begin, ends[i] - begin, pieces > 1 ? pack(immediate) : w.immediate, endpoint, due_after(now)});
    begin = ends[i];
  }
}

void ChaosFabric::post_pieces(Clock::time_point now) {
  for (std::size_t tries = pieces_.size(); tries > 0 && !pieces_.empty(); --tries) {
    const std::size_t which = pieces_.size() > 1 && chance(options_.shuffle) ? below(pieces_.size()) : 0;
    const Piece piece = pieces_[which];
    pieces_.erase(pieces_.begin() + static_cast<long>(which));
    Operation& operation = operations_.at(piece.operation);
    if (piece.due > now) {
      pieces_.push_back(piece);
      continue;
    }
    if (which != 0) ++counts_.shuffled;
    Write w = operation.write;
    w.endpoint = piece.endpoint;
    w.source = operation.write.source != nullptr ? &operation.source : nullptr;
    w.source_offset += piece.begin;
    w.target = operation.write.target != nullptr ? &operation.target : nullptr;
    w.target_offset += piece.begin;
    w.bytes = piece.bytes;
    w.immediate = piece.immediate;
    w.context = piece.operation;
    w.more = false;   // the next write may be held back
    try {
      if (inner_->write(w) == Post::Again) pieces_.push_back(piece);
    } catch (const FabricError& error) {
      end_piece(piece.operation, kCutError, error.what());
    }
  }
}

// The caller hears of a write when its last piece has ended: until then the fabric may read its source.
void ChaosFabric::end_piece(std::uint64_t id, int error, const std::string& text) {
  const auto found = operations_.find(id);
  if (found == operations_.end()) return;
  Operation& operation = found->second;
  if (error != 0 && operation.error == 0) {
    operation.error = error;
    operation.text = text;
  }
  if (--operation.pieces > 0) return;
  Completion c;
  c.kind = operation.error == 0 ? Completion::Kind::Sent : Completion::Kind::Failed;
  c.endpoint = operation.write.endpoint;
  c.error = operation.error;
  c.context = operation.write.context;
  if (c.error != 0) {
    if (errors_.size() == kErrorsKept) errors_.pop_front();
    errors_.emplace_back(c.context, operation.text);
  }
  operations_.erase(found);
  const Clock::time_point now = now_();
  hold(c, c.error == 0 ? due_after(now) : now);
}

void ChaosFabric::remove_peer(int peer) {
  const std::string text = "write to peer " + std::to_string(peer) + ": the peer was removed";
  inner_->remove_peer(peer);   // its writes come back as Failed
  for (std::size_t i = pieces_.size(); i-- > 0;) {
    const std::uint64_t id = pieces_[i].operation;
    if (operations_.at(id).write.peer != peer) continue;
    pieces_.erase(pieces_.begin() + static_cast<long>(i));
    end_piece(id, kCutError, text);
  }
  std::vector<std::uint64_t> swallowed;
  for (const auto& [id, operation] : operations_)
    if (operation.write.peer == peer && operation.swallowed) swallowed.push_back(id);
  for (std::uint64_t id : swallowed) end_piece(id, kCutError, text);
}

// ---- completions -------------------------------------------------------------------------------------------------------------

// Real time, whatever now_ says, because a real thread must stand still.
void ChaosFabric::stand_still() {
  std::uint64_t due = 0;
  for (const ChaosOptions::Stall& s : options_.stalls) due += s.rank == rank_ && next_id_ >= s.after;
  if (due <= counts_.stalled) return;
  const std::chrono::seconds time(due - counts_.stalled);
  counts_.stalled = due;
  std::this_thread::sleep_for(time);
}

int ChaosFabric::poll(Completion* out, int capacity) {
  stand_still();
  const Clock::time_point now = now_();
  post_pieces(now);
  Completion batch[64];
  const int n = inner_->poll(batch, 64);
  for (int i = 0; i < n; ++i) take(batch[i], now);
  return hand_out(out, capacity, now);
}

void ChaosFabric::take(const Completion& c, Clock::time_point now) {
  switch (c.kind) {
    case Completion::Kind::Sent: end_piece(c.context, 0, ""); return;
    case Completion::Kind::Failed:
      if (c.has_context)
        end_piece(c.context, c.error, inner_->describe_error(c));
      else
        hold(c, now);
      return;
    case Completion::Kind::Arrived: break;
  }
  const ChaosOptions::Cut* cut = cut_to(static_cast<int>(unpack(c.immediate).source));
  if (cut != nullptr && cut->silent) {
    ++counts_.lost;
    return;
  }
  const Clock::time_point due = due_after(now);
  hold(c, due);
  if (chance(options_.duplicate)) {
    ++counts_.duplicated;
    hold_copy(c.immediate, due);
  }
  if (!past_.empty() && chance(options_.replay)) {
    ++counts_.replayed;
    hold_copy(past_[below(past_.size())], due);
  }
  past_.push_back(c.immediate);
  if (past_.size() > kPast) past_.pop_front();
}

void ChaosFabric::hold(const Completion& completion, Clock::time_point due) {
  Held held;
  held.completion = completion;
  held.due = due;
  held_.push_back(held);
}

void ChaosFabric::hold_copy(std::uint32_t immediate, Clock::time_point due) {
  Held held;
  held.completion.kind = Completion::Kind::Arrived;
  held.completion.has_context = false;
  held.completion.immediate = immediate;
  held.due = due + std::chrono::microseconds(below(options_.delay_us + std::size_t{1}));
  held.copy = true;
  held.latest = arrivals_ + kPast;
  held_.push_back(held);
}

int ChaosFabric::hand_out(Completion* out, int capacity, Clock::time_point now) {
  std::vector<std::size_t> ready;
  for (std::size_t i = 0; i < held_.size(); ++i)
    if (held_[i].due <= now || (held_[i].copy && held_[i].latest <= arrivals_)) ready.push_back(i);
  std::vector<std::size_t> gone;
  while (static_cast<int>(gone.size()) < capacity && !ready.empty()) {
    const std::size_t which = ready.size() > 1 && chance(options_.shuffle) ? below(ready.size()) : 0;
    if (which != 0) ++counts_.shuffled;
    const Held& held = held_[ready[which]];
    if (held.completion.kind == Completion::Kind::Arrived && !held.copy) ++arrivals_;
    out[gone.size()] = held.completion;
    gone.push_back(ready[which]);
    ready.erase(ready.begin() + static_cast<long>(which));
  }
  std::sort(gone.rbegin(), gone.rend());
  for (std::size_t i : gone) held_.erase(held_.begin() + static_cast<long>(i));
  return static_cast<int>(gone.size());
}

std::string ChaosFabric::describe_error(const Completion& failed) const {
  if (failed.has_context)
    for (auto error = errors_.rbegin(); error != errors_.rend(); ++error)
      if (error->first == failed.context) return error->second;
  return inner_->describe_error(failed);
}

}  // namespace pplx
