#include "world.h"

#include <algorithm>
#include <cstring>

namespace pplx::sim {

using namespace cpu;

namespace {

constexpr Time kLongestPause = 10 * kMillisecond;
constexpr Time kByMemory = 100 * kMillisecond;   // the longest that an abort takes to reach the ranks of a node, their pauses included
constexpr Time kDrain = 100 * kMillisecond;   // the time that reset() gives writes under way

const char* name_of(Trouble trouble) {
  switch (trouble) {
    case Trouble::Kill: return "kill";
    case Trouble::Vanish: return "vanish";
    case Trouble::Leave: return "leave";
    case Trouble::FailWrite: return "failed write";
    case Trouble::FailSomewhere: return "failure without a write";
    case Trouble::FailPost: return "failed post";
    case Trouble::Overrun: return "overrun";
    case Trouble::Corrupt: return "corrupt header";
    case Trouble::None: break;
  }
  return "no trouble";
}

bool is_trap(Trouble trouble) { return trouble >= Trouble::FailWrite; }

Phase phase_of(const Immediate& i) {
  const Op op = i.op == Op::Credit ? Op(i.shard) : i.op;   // a credit names the op whose pieces it counts
  return op == Op::Dispatch ? Phase::DispatchRecv : op == Op::Combine ? Phase::CombineRecv : Phase::Weights;
}

std::string rank_text(std::uint32_t rank) { return "rank " + std::to_string(rank); }

}  // namespace

World::World(std::uint64_t seed, bool log, Totals& totals)
    : log_(clock_, log), totals_(totals), random_(mix(seed)), seed_(seed), network_(clock_, log_, totals, mix(seed + 1)) {}

World::~World() = default;

std::string World::describe() const {
  const Config& c = ranks_.front().objects.front().config;
  return std::to_string(ranks_.size()) + " ranks on " + std::to_string(ranks_.back().node + 1) + " nodes, " +
         std::to_string(objects_) + " AllToAll(s), " + std::to_string(c.num_experts) + " experts, top " + std::to_string(c.top_k) +
         ", hidden " + std::to_string(c.hidden) + ", at most " + std::to_string(c.max_tokens) + " tokens, in_flight " +
         std::to_string(c.in_flight) + ", " +
         (in_pieces(c) ? "slots of " + std::to_string(heap_of(c).slot_rows) + " rows, " : "") + (replicas_ > 1 ? std::to_string(replicas_) + " replicas, " : "") +
         std::to_string(endpoints_) + " endpoint(s), " + std::to_string(generations_) + " generation(s)";
}

// ---- the beginning -------------------------------------------------------------------------------------------------------------

Config World::draw_config(std::uint32_t object, Random& replicas, Random& pieces) {
  const auto world = static_cast<std::uint32_t>(ranks_.size());
  const bool small = world <= 8, large = world > 24;
  Config c;
  c.object = object;
  c.world = world;
  c.num_experts = random_.between(1u, 3 * world);
  c.top_k = random_.chance(0.1) && small ? random_.between(9u, kMaxTopK) : random_.between(1u, large ? 4u : 8u);
  c.dtype = static_cast<Dtype>(random_.below(3));
  c.wire = kWires[random_.below(std::size(kWires))];
  const std::uint32_t unit = 16 / dtype_bytes(c.dtype);
  c.hidden = unit * random_.between(1u, (large ? 32u : small ? 200u : 64u) / unit);
  c.max_tokens = random_.between(1u, large ? 3u : small ? 16u : 6u);
  const bool goes_in_pieces = pieces.chance(0.35);
  if (goes_in_pieces && small && pieces.chance(0.5)) c.max_tokens *= pieces.between(2u, 4u);
  c.in_flight = 1u << random_.below(large ? 2 : 4);
  c.align = random_.chance(0.5) ? 1u : random_.chance(0.5) ? 8u : random_.between(2u, 40u);
  c.layout = static_cast<LayoutKind>(random_.below(3));
  c.zero_pad = random_.chance(0.3);
  c.first_step = random_.chance(0.4)   ? 0u - random_.between(1u, 12u)
                 : random_.chance(0.5) ? 1u
                                       : static_cast<std::uint32_t>(random_.bits());
  const std::uint32_t most = world * c.max_tokens * c.top_k;
  c.max_rows = c.layout == LayoutKind::Compact ? world * c.max_tokens : most + experts_per_rank(c) * c.align;
  c.max_per_expert = most;
  if (replicas_ > 1 && replicas.chance(0.8)) c.replicas = replicas_;
  if (random_.chance(0.06)) c.max_rows = c.max_per_expert = random_.between(1u, std::max(1u, most / 4));
  if (goes_in_pieces) draw_pieces(c, pieces);
  return c;
}

// Slots of a few rows: from one row in a piece to the whole block in two.
void World::draw_pieces(Config& c, Random& pieces) const {
  const std::uint32_t most = std::max(1u, max_rows_of_block(c) / kPlaces), rows = pieces.chance(0.6) ? std::min(most, pieces.between(1u, 3u)) : pieces.between(1u, most);
  c.whole_tokens = pieces.between(1u, kPlaces * rows);
  c.slot_bytes = std::uint64_t{c.world} * kPlaces * (dispatch_block(c).bytes(rows) + combine_block(c).bytes(rows) + 2 * 63);
}

void World::build() {
  const double size = static_cast<double>(random_.below(1000)) / 1000;
  // Drawn separately, so that worlds without replicas stay as they were.
  Random replicas(mix(seed_ + 2)), pieces(mix(seed_ + 3));
  replicas_ = replicas.chance(0.75) ? 1 : replicas.chance(0.6) ? 2 : replicas.between(3u, 4u);
  const std::uint32_t drawn = size < 0.70    ? random_.between(2u, 6u)
                              : size < 0.93  ? random_.between(7u, 16u)
                              : size < 0.985 ? random_.between(17u, 32u)
                                             : random_.between(33u, 64u);
  const auto world = static_cast<std::uint32_t>(align_up(drawn, replicas_));
  ranks_ = std::vector<Rank>(world);
  alive_.assign(world, true);
  objects_ = world <= 16 && random_.chance(0.35) ? random_.between(2u, 3u) : 1;
  endpoints_ = random_.chance(0.3) ? 1 : random_.between(2, random_.chance(0.1) ? kMaxEndpoints : 4);
  shard_bytes_ = random_.between<std::uint64_t>(64, random_.chance(0.5) ? 512 : 8192);
  timeout_ = static_cast<double>(random_.between(1500, 3000)) * 1e-3;
  slow_ = random_.chance(0.3) ? 0.004 : 0.0005;
  leaves_ = random_.chance(0.4);
  gossip_ = random_.chance(0.3) ? 400 * kMillisecond : kMillisecond;
  long_ = world <= 3 && random_.chance(0.06);
  const bool troubled = random_.chance(0.55);
  generations_ = troubled ? random_.between(2u, world > 24 ? 2u : 5u) : 1;

  // Nodes of random size; most worlds have remote peers.
  const bool one_node = random_.chance(0.04);
  std::uint32_t node = 0, left = one_node ? world : random_.between(1u, std::max(1u, world / 2));
  for (std::uint32_t r = 0; r < world; ++r, left -= left > 0) {
    if (left == 0 && r % replicas_ == 0) {
      ++node;
      left = random_.between(1u, std::max(1u, world / 2));
    }
    ranks_[r].number = r;
    ranks_[r].node = node;
    ranks_[r].slowness = random_.chance(0.1) ? random_.between<Time>(5, 40) : 1;
    ranks_[r].objects.resize(objects_);
    actors_.push_back(std::make_unique<Actor>(*this, r, true));
    ranks_[r].proxy_actor = actors_.back().get();
    actors_.push_back(std::make_unique<Actor>(*this, r, false));
    ranks_[r].phases_actor = actors_.back().get();
  }
  scripts_.resize(objects_);
  for (std::uint32_t o = 0; o < objects_; ++o) {
    const Config config = draw_config(o, replicas, pieces);
    in_pieces_ |= in_pieces(config);
    for (Rank& rank : ranks_) {
      Object& object = rank.objects[o];
      object.config = config;
      object.config.rank = rank.number;
      for (const Rank& peer : ranks_) object.config.remote_peers += peer.node != rank.node;
      object.memory.resize(heap_of(object.config).bytes / sizeof(std::uint64_t));
    }
    for (Rank& rank : ranks_) {
      Object& object = rank.objects[o];
      Memory memory;
      memory.own = object.base();
      for (Rank& peer : ranks_) memory.peers.push_back(peer.node == rank.node ? peer.objects[o].base() : nullptr);
      object.exchange = std::make_unique<Exchange>(object.config, memory, 1, timeout_, [this] { return clock_.seconds(); });
    }
  }
}

// Fresh endpoints for every generation. The ranks start at different moments, and a rank knows no initiator before it starts.
void World::connect() {
  for (Rank& rank : ranks_) {
    if (!rank.alive || rank.objects[0].config.remote_peers == 0) continue;
    rank.fabric = std::make_unique<SimFabric>(network_, rank.number, endpoints_);
    rank.proxy = std::make_unique<Proxy>(*rank.fabric, shard_bytes_);
    rank.broken = false;
    for (Object& object : rank.objects) {
      const Heap heap = heap_of(object.config);
      object.region = rank.fabric->register_memory(object.base(), heap.bytes, heap.shared_bytes);
    }
    rank.fabric->port().on_ready = [this, &rank] { wake(*rank.proxy_actor); };
  }
  for (Rank& rank : ranks_)
    if (rank.alive) later(random_.between<Time>(0, 300 * kMicrosecond), [this, &rank] { start(rank); });
}

void World::start(Rank& rank) {
  if (!rank.alive) return;
  rank.running = true;
  log_.line("rank %u: starts generation %u", rank.number, generation_);
  if (rank.proxy) {
    for (const Rank& peer : ranks_)
      if (peer.alive && peer.number != rank.number && peer.fabric)
        rank.fabric->insert_peer(static_cast<int>(peer.number), peer.fabric->address());
    for (Object& object : rank.objects) {
      ProxyObject o;
      o.config = object.config;
      o.generation = generation_;
      o.memory = object.base();
      o.region = object.region;
      o.peers.resize(ranks_.size());
      for (Rank& peer : ranks_)
        if (peer.alive && peer.node != rank.node && peer.fabric)
          o.peers[peer.number] = std::make_unique<RemoteRegion>(
              rank.fabric->import_region(static_cast<int>(peer.number), peer.objects[object.config.object].region.description));
      o.on_failure = [this, &rank, &object](const ProxyFailure& f) {
        object.exchange->failures().lost_network(f.abort(rank.number), f.text(rank.number));
        wake(*rank.phases_actor);
      };
      // The immediate of a step whose five bits no step of this generation has.
      std::vector<std::uint32_t> strays;
      const std::uint32_t low = object.config.first_step & 0x1fu;
      for (const Rank& peer : ranks_)
        if (o.peers[peer.number] && low >= 1 && low + steps_ < 0x20 && random_.chance(0.1))
          strays.push_back(pack({random_.chance(0.5) ? Op::Combine : Op::Weights, object.config.object, peer.number, 0, 0, 1}));
      rank.proxy->attach(std::move(o));
      for (std::uint32_t stray : strays) network_.push_arrival(rank.fabric->port(), stray);
      totals_.count(Fault::Unasked, strays.size());
    }
    schedule(*rank.proxy_actor, true);
  }
  schedule(*rank.phases_actor, true);
}

// ---- who runs when ---------------------------------------------------------------------------------------------------------------

void World::schedule(Actor& actor, bool progress) {
  actor.pause = progress ? 0 : std::min<Time>(kLongestPause, actor.pause * 2 + 500);
  Time delay = actor.pause + random_.between<Time>(50, 2 * kMicrosecond) * ranks_[actor.rank].slowness;
  if (random_.chance(slow_)) {
    totals_.count(Fault::Slow);
    delay += random_.between<Time>(1, 5) * kMillisecond;
  }
  actor.due = clock_.now() + delay;
  clock_.at(actor.due, actor, ++actor.epoch);
}

void World::wake(Actor& actor) {
  if (!ranks_[actor.rank].running || actor.due < clock_.now() + 10 * kMicrosecond) return;
  actor.pause = 0;
  // A rank in one of its long pauses stays there; only waiting ranks notice.
  if (actor.due > clock_.now() + kLongestPause / 2 && random_.chance(slow_)) return;
  actor.due = clock_.now() + random_.between<Time>(50, 3 * kMicrosecond) * ranks_[actor.rank].slowness;
  clock_.at(actor.due, actor, ++actor.epoch);
}

void World::wake_node(const Rank& rank) {
  for (Rank& mate : ranks_)
    if (mate.node == rank.node && mate.number != rank.number) wake(*mate.phases_actor);
}

// Messages on the control connections end with their generation.
void World::later(Time delay, std::function<void()> action) {
  moments_.actions.push_back(std::make_unique<std::function<void()>>([this, action = std::move(action), generation = generation_] {
    if (generation == generation_) action();
  }));
  clock_.after(delay, moments_, static_cast<std::uint32_t>(moments_.actions.size() - 1));
}

void World::run_proxy(std::uint32_t number) {
  Rank& rank = ranks_[number];
  if (!rank.running || !rank.proxy) return;
  if (leaves_ && rank.alive && generation_ == generations_ &&
      steps_done(rank)) {   // asked between two steps, as ProxyThread::call() does
    bool quiet = true;
    for (const Object& object : rank.objects) quiet &= rank.proxy->outstanding(object.config.object) == 0;
    if (quiet) {
      totals_.count(Fault::LeftInOrder);
      leave(rank);
      return;
    }
  }
  bool moved = false;
  try {
    moved = !rank.broken && rank.proxy->step();
  } catch (const FabricError& error) {   // as in ProxyThread
    log_.line("rank %u: its fabric is beyond use: %s", number, error.what());
    rank.broken = true;
    rank.proxy->fail_all(error.what());
  }
  if (moved) wake(*rank.phases_actor);
  schedule(*rank.proxy_actor, moved);
}

void World::run_phases(std::uint32_t number) {
  Rank& rank = ranks_[number];
  if (!rank.running || resetting_) return;
  bool progress = false;
  const std::size_t first = random_.below(objects_);
  for (std::size_t i = 0; i < objects_ && rank.running; ++i) {
    Object& object = rank.objects[(first + i) % objects_];
    if (object.failure) continue;
    try {
      if (rank.alive) progress |= begin_step(rank, object);
      progress |= advance(rank, object);
    } catch (const PeerFailure& failure) {
      failed(rank, object, failure);
    }
  }
  if (progress) {
    wake(*rank.proxy_actor);
    wake_node(rank);
  }
  if (trouble_ != Trouble::None && !struck_ && number == victim_ && rank.objects[0].begun > trouble_step_) {
    const bool last_moment = rank.objects[0].begun + 2 >= steps_;   // later others may not need it any more
    if (polls_left_-- == 0 || last_moment) strike();
  }
  if (rank.running) schedule(*rank.phases_actor, progress);
}

// Up to in_flight steps are open; sends are one sequence, and the set must be free.
bool World::begin_step(Rank& rank, Object& object) {
  if (object.begun == steps_ || object.walkers.size() >= object.config.in_flight || !random_.chance(0.5)) return false;
  for (const std::unique_ptr<Walker>& w : object.walkers)
    if (!w->has_sent() || set_of(object.config, w->number()) == set_of(object.config, object.exchange->next_step())) return false;
  object.exchange->failures().raise();
  try {
    object.exchange->raise_notice();
  } catch (const Misuse& notice) {
    if (!object.may_overflow) throw Violation(rank_text(rank.number) + " raised an overflow that was none: " + notice.what());
    object.noticed = true;
  }
  std::shared_ptr<Step> step = step_of(object.config.object, object.begun);
  object.walkers.push_back(std::make_unique<Walker>(*object.exchange, step, step->same_plan ? object.plan : nullptr, totals_));
  ++object.begun;
  object.may_overflow |= step->overflows;
  return true;
}

bool World::advance(Rank& rank, Object& object) {
  if (object.walkers.empty()) return false;
  std::size_t which = random_.below(object.walkers.size());
  for (std::size_t i = 0; i < which && object.exchange->blocks().heap().in_pieces; ++i)
    if (!object.walkers[which]->in_order_after(*object.walkers[i])) which = i;   // that one first
  Walker& w = *object.walkers[which];
  const bool sent = w.has_sent();
  const Walker::Progress progress = w.advance();
  if (!sent && w.plan()) object.plan = w.plan();
  if (log_.on() && progress != Walker::Progress::None)
    log_.line("rank %u: object %u, step %u: %s", rank.number, object.config.object, w.number(),
              progress == Walker::Progress::Closed ? "closed" : phase_name(w.phase()));
  if (progress != Walker::Progress::Closed) return progress == Walker::Progress::Some;
  const std::shared_ptr<Step> step = w.step();
  object.overflowed |= step->overflows;
  object.walkers.erase(object.walkers.begin() + static_cast<std::ptrdiff_t>(which));
  ++object.closed;
  if (!rank.alive) return true;   // its generation is over, and the scripts are those of the next one
  const auto living = static_cast<std::uint32_t>(std::count(alive_.begin(), alive_.end(), true));
  if (++step->closed == living) {
    ++totals_.steps;
    // The next step may still ask for the routing of this one.
    if (step->number > 0) scripts_[object.config.object].erase(step->number - 1);
  }
  return true;
}

std::shared_ptr<Step> World::step_of(std::uint32_t object, std::uint32_t number) {
  std::map<std::uint32_t, std::shared_ptr<Step>>& script = scripts_[object];
  std::shared_ptr<Step>& step = script[number];
  if (!step) {
    const auto before = number > 0 ? script.find(number - 1) : script.end();
    step = make_step(ranks_[0].objects[object].config, alive_, number, before != script.end() ? before->second.get() : nullptr,
                     mix(seed_ ^ mix(generation_) ^ mix(std::uint64_t{object} << 32 | number)));
  }
  return step;
}

// ---- trouble ---------------------------------------------------------------------------------------------------------------------

World::Rank& World::any_alive() {
  for (;;) {
    Rank& rank = ranks_[random_.below(ranks_.size())];
    if (rank.alive) return rank;
  }
}

void World::plan_trouble() {
  trouble_ = Trouble::None;
  struck_.reset();
  late_.assign(ranks_.size(), false);
  node_raised_.clear();
  network_.set_trap({});
  const auto living = static_cast<std::uint32_t>(std::count(alive_.begin(), alive_.end(), true));
  steps_ = ranks_.size() > 24 ? random_.between(2u, 3u) : random_.between(3u, 8u);
  if (random_.chance(0.3)) steps_ += ranks_[0].objects[0].config.in_flight;
  if (long_) steps_ = random_.between(260u, 400u);
  if (generation_ == generations_) return;
  Rank& victim = any_alive();
  victim_ = victim.number;
  bool remote = false;
  for (const Rank& peer : ranks_) remote |= peer.alive && peer.node != victim.node;
  // At least two ranks must be left.
  if (living < 3 && !remote) return;
  do {
    trouble_ = random_.chance(0.25) ? Trouble::Corrupt : static_cast<Trouble>(random_.between(1, 8));
  } while (is_trap(trouble_) ? !remote : living < 3);
  trouble_step_ = random_.between(0u, 3u);
  polls_left_ = random_.between(0u, in_pieces_ ? 40u : 6u);
  // By then nobody can have finished all steps.
  steps_ = std::max(steps_, trouble_step_ + ranks_[0].objects[0].config.in_flight + 3);
  log_.line("generation %u, %u steps: %s of rank %u after it began step %u", generation_, steps_, name_of(trouble_), victim_,
            trouble_step_);
}

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
  const Fault fault = kDamages[random_.below(std::size(kDamages))];
  Trap trap;
  trap.kind = kind;
  trap.rank = victim_;
  trap.fits = [this, kind, fault](const Immediate& i, std::uint32_t peer, const BlockHeader& header, std::size_t bytes) {
    const Object& object = ranks_[victim_].objects[i.object];
    if (object.begun + 1 >= steps_) return false;   // nobody would ask for it any more
    if (kind != Trap::Kind::Corrupt) return true;
    if (i.op == Op::Weights && header.rows == 0) return false;   // never looked at
    if (fault == Fault::CorruptPiece) return i.op != Op::Weights;
    if (fault == Fault::CorruptCounts)
      return i.op == Op::Dispatch && i.piece == 0 && header.piece == 0 && local_experts(object.config, peer) > 0 && bytes >= sizeof header + sizeof(std::uint32_t);
    return fault != Fault::CorruptFlags || i.op == Op::Combine;
  };
  trap.damage = [this, fault](const Immediate& i, char* block) { damage(fault, i, block); };
  network_.set_trap(std::move(trap));
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
      const std::uint32_t count = 0x80000000u + other;
      std::memcpy(block + sizeof header, &count, sizeof count);
    }
  }
  std::memcpy(block, &header, sizeof header);
  totals_.count(fault);
  log_.line("rank %u: its header is damaged: %s", victim_, sim::name_of(fault));
}

void World::stop_fabric(Rank& rank) {
  rank.proxy.reset();
  rank.fabric.reset();
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

// Wakes a rank that stood still while the others reset without it. It goes on where it was, into memory that it still maps, with writes
// for which no memory is registered any more.
void World::wake_too_late(Rank& rank) {
  totals_.count(Fault::WokeTooLate);
  log_.line("rank %u: wakes, in the middle of a generation that is over", rank.number);
  rank.running = true;
  if (rank.fabric) rank.fabric->port().dead = false;
  if (rank.proxy) schedule(*rank.proxy_actor, true);
  schedule(*rank.phases_actor, true);
}

// As in Python after a call raised a failure: tells everybody, unless everybody knows.
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

// Whether `rank` waits for `victim`, perhaps through others.
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
        if (const std::uint32_t peer = w->waiting().peer; peer != kNoRank) ask.push_back(peer);
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
  if (f.peer != kNoRank && text.find(rank_text(f.peer)) == std::string::npos) wrong("does not say whom it blames");
  if (text.find(rank_text(kNoRank)) != std::string::npos) wrong("names a rank that there is none of");
  const bool first_hand = rank.number == (trouble_ == Trouble::Corrupt ? trap.peer : victim_);
  const auto must_blame = [&](std::uint32_t peer) {
    if (f.peer != peer) wrong("blames the wrong rank");
  };
  const auto must_say = [&](AbortReason reason) {
    if (f.reason != reason) wrong("gives the wrong reason");
    if (f.phase != phase_of(trap.immediate)) wrong("names the wrong phase");
    if (!same_step(f.step, trap.immediate)) wrong("names the wrong step");
  };
  // A rank that has taken all its steps makes no call that could report the cause. Then a rank that waits for it gives up, or first a
  // replica of that rank, which waits for rows that it cannot finish.
  const auto gave_up_on_silent = [&](bool silent) {
    if (!silent || f.reason != AbortReason::Timeout || f.peer >= ranks_.size()) return false;
    if (!late_[f.peer] && !waits_for(f.peer, victim_)) return false;
    late_[f.peer] = true;
    return true;
  };
  switch (trouble_) {
    case Trouble::Kill:
    case Trouble::Leave: must_blame(victim_); break;
    case Trouble::Vanish:
      // A timeout blames the rank that it waited for, which may itself have been waiting.
      if (f.peer >= ranks_.size()) wrong("blames nobody");
      if (!late_[f.peer] && !waits_for(f.peer, victim_)) wrong("blames a rank that does not wait for it");
      late_[f.peer] = true;
      break;
    case Trouble::FailWrite:
    case Trouble::FailPost:
      if (f.peer != trap.peer && gave_up_on_silent(ranks_[victim_].objects[trap.immediate.object].closed == steps_)) break;
      must_blame(trap.peer);
      if (first_hand && object.config.object == trap.immediate.object) must_say(AbortReason::Fabric);
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

// ---- the end of a generation -----------------------------------------------------------------------------------------------------

bool World::steps_done(const Rank& rank) const {
  return std::all_of(rank.objects.begin(), rank.objects.end(),
                     [&](const Object& o) { return o.closed == steps_ && o.walkers.empty(); });
}

bool World::steps_done() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) { return !rank.alive || steps_done(rank); });
}

bool World::pump(Time deadline, const std::function<bool()>& done) {
  while (!done()) {
    if (clock_.now() > deadline) return false;
    if (!clock_.step()) return false;
  }
  return true;
}

void World::finish_generation() {
  // Longer than any timeout, so that a timeout is raised first.
  const Time deadline = clock_.now() + static_cast<Time>(timeout_ * 1e9) * 40;
  const bool done = pump(deadline, [this] {
    if (steps_done()) return true;
    return struck_ && std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) {
             return !r.alive || r.told ||
                    std::any_of(r.objects.begin(), r.objects.end(), [](const Object& o) { return o.failure.has_value(); });
           });
  });
  if (!done) throw Violation("nothing happens any more, and nobody raises");
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

// Python's reset() without its agreements: here everybody waits for everybody.
void World::reset() {
  log_.line("reset");
  network_.set_trap({});
  ++totals_.resets;
  resetting_ = true;
  for (Rank& rank : ranks_) rank.running = false;
  // Writes under way get a moment; those to a dead peer never end.
  for (Rank& rank : ranks_)
    if (rank.alive && rank.proxy) {
      rank.running = true;
      for (Object& object : rank.objects) object.walkers.clear();
      schedule(*rank.proxy_actor, true);
    }
  const auto quiet = [this](const Rank& rank, const Object& object) {
    return rank.broken || rank.proxy->outstanding(object.config.object) == 0;
  };
  pump(clock_.now() + kDrain, [&] {
    for (const Rank& rank : ranks_)
      for (const Object& object : rank.objects)
        if (rank.alive && rank.proxy && !quiet(rank, object)) return false;
    return true;
  });
  for (Rank& rank : ranks_) {
    if (!rank.alive) continue;
    rank.running = false;
    if (rank.proxy)
      for (Object& object : rank.objects) {
        const bool safe = quiet(rank, object);
        rank.proxy->detach(object.config.object);
        if (safe) rank.fabric->unregister_memory(object.region);
      }
    stop_fabric(rank);
  }
  for (Rank& rank : ranks_) alive_[rank.number] = rank.alive;
  ++generation_;
  for (Rank& rank : ranks_) {
    if (!rank.alive) continue;
    rank.told.reset();
    for (Object& object : rank.objects) {
      object.walkers.clear();
      object.failure.reset();
      object.plan.reset();
      object.begun = object.closed = 0;
      object.exchange->reset(generation_, alive_);
      totals_.count(Fault::ReplicaLost, object.exchange->blocks().replicas().size() + 1 < object.config.replicas);
      // Words are never cleared, so words of the old generation claim that everything has arrived.
      const Heap& heap = object.exchange->blocks().heap();
      for (std::uint32_t set = 0; set < object.config.in_flight; ++set)
        for (std::uint32_t signal = 0; signal < kSignals; ++signal)
          for (std::uint32_t peer = 0; peer < object.config.world; ++peer) {
            auto* word = reinterpret_cast<std::uint64_t*>(object.base() +
                                                          heap.arrival_at(object.config, set, static_cast<Signal>(signal), peer));
            *word = arrival_word(generation_ - 1, object.config.first_step + 1000);
            totals_.count(Fault::StaleWord);
          }
      for (std::uint32_t set = 0; heap.in_pieces && set < object.config.in_flight; ++set)
        for (std::uint32_t op = 0; op < kPieceOps; ++op)
          for (std::uint32_t peer = 0; peer < object.config.world; ++peer)
            for (const std::uint64_t words : {heap.pieces, heap.consumed}) {
              auto* word = reinterpret_cast<std::uint64_t*>(object.base() + heap.count_at(object.config, words, set, Op(op), peer));
              *word = pieces_word(generation_ - 1, first_step_of_set(object.config, set), 1000);
              totals_.count(Fault::StaleWord);
            }
    }
  }
  for (auto& script : scripts_) script.clear();
  resetting_ = false;
  if (trouble_ == Trouble::Vanish && random_.chance(0.8))
    later(random_.between<Time>(0, 500) * kMicrosecond, [this, &rank = ranks_[victim_]] { wake_too_late(rank); });
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
  throw Violation(std::string("nobody noticed: ") + name_of(trouble_) + " of rank " + std::to_string(victim_));
}

void World::check_notices() {
  for (Rank& rank : ranks_)
    for (Object& object : rank.objects) {
      if (!rank.alive || !object.overflowed || object.noticed) continue;
      try {
        object.exchange->raise_notice();
      } catch (const Misuse&) {
        object.noticed = true;   // reported once; the next generation does not hear of it again
        continue;
      }
      throw Violation(rank_text(rank.number) + " never said that an output buffer was too small");
    }
}

void World::run() {
  build();
  if (log_.on()) log_.line("seed %llu: %s", static_cast<unsigned long long>(seed_), describe().c_str());
  for (;;) {
    plan_trouble();
    connect();
    finish_generation();
    if (steps_done()) {
      check_noticed();
      check_notices();
      if (generation_ >= generations_) break;
    } else {
      finish_in_trouble();
    }
    reset();
  }
  // Writes still under way must not disturb anything either.
  pump(clock_.now() + 20 * kMillisecond, [] { return false; });
  ++totals_.seeds;
  totals_.events += clock_.events();
}

}  // namespace pplx::sim
