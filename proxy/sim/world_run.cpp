// Runs the generations: when each rank's proxy and phases take a turn, and the steps that they go through.
#include "world.h"

#include <algorithm>
#include <set>

namespace pplx::sim {

using namespace cpu;

namespace {

constexpr Time kLongestPause = 10 * kMillisecond;

}  // namespace

World::World(std::uint64_t seed, bool log, Totals& totals)
    : log_(clock_, log), totals_(totals), random_(mix(seed)), seed_(seed), network_(clock_, log_, totals, mix(seed + 1)) {}

World::~World() = default;

// Fresh endpoints for every generation. The ranks start at different moments, and a rank knows no initiator before it starts.
void World::connect() {
  for (Rank& rank : ranks_) {
    if (!rank.alive || rank.objects[0].config.remote_peers == 0) continue;
    rank.fabric = std::make_unique<SimFabric>(network_, rank.number, endpoints_);
    rank.proxy = std::make_unique<Proxy>(*rank.fabric, shard_bytes_);
    rank.port = rank.fabric->port().number;
    rank.broken = false;
    for (Object& object : rank.objects) {
      const Blocks::Region region = object.exchange->blocks().region();
      object.region = rank.fabric->register_memory(region.memory, region.bytes, region.shared_bytes);
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
    for (Object& object : rank.objects) {
      const Blocks& blocks = object.exchange->blocks();
      ProxyObject o;
      o.config = object.config;
      o.generation = generation_;
      o.memory = object.base();
      o.region = object.region;
      o.targets = blocks.targets_there();
      o.peers.resize(ranks_.size());
      for (std::uint32_t peer : blocks.network_peers()) {
        const Rank& there = ranks_[peer];
        if (!there.alive || !there.fabric) continue;
        rank.fabric->insert_peer(static_cast<int>(peer), there.fabric->address());
        o.peers[peer] = std::make_unique<RemoteRegion>(
            rank.fabric->import_region(static_cast<int>(peer), there.objects[object.config.object].region.description));
      }
      o.on_failure = [this, &rank, &object](const ProxyFailure& f) {
        object.exchange->failures().lost_network(f.abort(rank.number), f.text(rank.number));
        wake(*rank.phases_actor);
      };
      // The immediate of a step whose five bits no step of this generation has, nor one that a set would have next.
      std::vector<std::uint32_t> strays;
      const std::uint32_t low = object.config.first_step & 0x1fu;
      for (const Rank& peer : ranks_)
        if (o.peers[peer.number] && low >= 1 && low + steps_ + object.config.in_flight < 0x20 && random_.chance(0.1))
          strays.push_back(pack({random_.chance(0.5) ? Op::Combine : Op::Weights, object.config.object, peer.number, 0, 0, 1}));
      rank.proxy->attach(std::move(o));
      for (std::uint32_t stray : strays) network_.push_arrival(rank.fabric->port(), stray);
      totals_.count(Fault::Unasked, strays.size());
    }
    schedule(*rank.proxy_actor, true);
  }
  schedule(*rank.phases_actor, true);
}

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
  if (object.begun == steps_ || object.walkers.size() >= object.config.in_flight || !random_.chance(begins_)) return false;
  for (const std::unique_ptr<Walker>& w : object.walkers)
    if (!w->has_sent() || set_of(object.config, w->number()) == set_of(object.config, object.exchange->next_step())) return false;
  if (rank.late > 0 && comes_late(rank)) return false;
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
  for (std::size_t i = 0; i < which && (object.exchange->blocks().heap().in_pieces || object.config.node_ranks != 0); ++i)
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
    count_bytes(object.config, *step);
    // The next step may still ask for the routing of this one.
    if (step->number > 0) scripts_[object.config.object].erase(step->number - 1);
  }
  return true;
}

// Adds up what each rank has to send to other nodes in a step, without the library's plan and rails.
void World::count_bytes(const Config& c, const Step& step) {
  std::map<std::uint32_t, std::vector<std::uint32_t>> living;   // indexed by node
  for (const Rank& rank : ranks_)
    if (alive_[rank.number]) living[rank.node].push_back(rank.number);
  for (const auto& [here, sources] : living)
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const Role& role = step.roles[sources[i]];
      std::map<std::uint32_t, std::uint32_t> rows;   // indexed by receiver
      const auto receiver = [&, node = here](std::uint32_t rank) {
        const std::vector<std::uint32_t>& there = living[ranks_[rank].node];
        return ranks_[rank].node == node ? kNoRank : c.node_ranks == 0 ? rank : there[i % there.size()];
      };
      for (const Rank& rank : ranks_)
        if (alive_[rank.number] && rank.node != here) rows[receiver(rank.number)] = 0;
      for (std::uint32_t t = 0; t < role.tokens; ++t) {
        std::set<std::uint32_t> wanted;
        for (std::uint32_t k = 0; k < c.top_k && sends(role, t); ++k)
          if (const std::int32_t id = role.ids[std::size_t{t} * c.top_k + k]; id >= 0)
            wanted.insert(receiver(static_cast<std::uint32_t>(id) / experts_per_rank(c)));
        for (std::uint32_t to : wanted)
          if (to != kNoRank) ++rows[to];
      }
      for (const auto& [to, n] : rows) {
        std::uint64_t& sent = ranks_[sources[i]].to_send[c.object];
        sent += dispatch_block(c).bytes(n);
        if (step.late && !step.released) sent += weights_block(c).bytes(n);
        ranks_[to].to_send[c.object] += network_block(c, Op::Combine).bytes(step.released ? 0 : n);
      }
    }
}

std::shared_ptr<Step> World::step_of(std::uint32_t object, std::uint32_t number) {
  std::map<std::uint32_t, std::shared_ptr<Step>>& script = scripts_[object];
  std::shared_ptr<Step>& step = script[number];
  if (!step) {
    const auto before = number > 0 ? script.find(number - 1) : script.end();
    step = make_step(ranks_[0].objects[object].config, alive_, number, before != script.end() ? before->second.get() : nullptr,
                     mix(seed_ ^ mix(generation_) ^ mix(std::uint64_t{object} << 32 | number)));
    step->nodes = nodes_;
  }
  return step;
}

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
  if (!done) throw Violation("nothing happens any more, and no rank raises");
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

// Compares the bytes that each rank posted to other nodes with those that the steps' routing asks for.
void World::check_bytes() {
  for (Rank& rank : ranks_)
    for (Object& object : rank.objects) {
      if (!rank.alive || !rank.port || struck_ || object.exchange->blocks().heap().in_pieces) continue;
      const std::uint64_t asked = rank.to_send[object.config.object];
      const std::uint64_t posted = network_.port(*rank.port).posted[object.config.object];
      if (posted != asked)
        throw Violation(rank_text(rank.number) + ", object " + std::to_string(object.config.object) + ", sent other nodes " +
                        std::to_string(posted) + " bytes, not " + std::to_string(asked));
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
      check_bytes();
      if (generation_ >= generations_) break;
    } else {
      finish_in_trouble();
    }
    reset();
  }
  // Writes still in flight must not disturb anything either.
  pump(clock_.now() + 20 * kMillisecond, [] { return false; });
  ++totals_.seeds;
  totals_.events += clock_.events();
}

}  // namespace pplx::sim
