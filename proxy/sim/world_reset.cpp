// Resets the survivors: writes in flight drain, fabrics go, and memory keeps the words of the old generation.
#include "world.h"

namespace pplx::sim {

using namespace cpu;

namespace {

constexpr Time kDrain = 100 * kMillisecond;   // the time that reset() gives writes in flight

}  // namespace

void World::stop_fabric(Rank& rank) {
  rank.proxy.reset();
  rank.fabric.reset();
}

// Writes in flight get a moment; those to a dead peer never end. Then the survivors' fabrics go.
void World::drain() {
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
}

// Words are never cleared, so words of the old generation claim that everything has arrived.
void World::make_stale(Object& object) {
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

// Python's reset() without its agreements: here all ranks wait for all.
void World::reset() {
  log_.line("reset");
  network_.set_trap({});
  ++totals_.resets;
  resetting_ = true;
  for (Rank& rank : ranks_) rank.running = false;
  drain();
  for (Rank& rank : ranks_) alive_[rank.number] = rank.alive;
  ++generation_;
  for (Rank& rank : ranks_) {
    if (!rank.alive) continue;
    rank.told.reset();
    rank.port.reset();
    for (Object& object : rank.objects) {
      const Rails before = object.exchange->blocks().rails();
      rank.to_send[object.config.object] = 0;
      object.walkers.clear();
      object.failure.reset();
      object.plan.reset();
      object.begun = object.closed = 0;
      object.exchange->reset(generation_, alive_);
      totals_.count(Fault::ReplicaLost, object.exchange->blocks().replicas().size() + 1 < object.config.replicas);
      const Rails& now = object.exchange->blocks().rails();
      for (std::uint32_t peer = 0; peer < alive_.size(); ++peer)
        totals_.count(Fault::RelayMoved, alive_[peer] && now.rep[peer] != before.rep[peer]);
      totals_.count(Fault::RelayGrew, now.sources.size() > before.sources.size());
      make_stale(object);
    }
  }
  for (std::uint32_t o = 0; o < objects_; ++o) lay_relays(o);
  for (auto& script : scripts_) script.clear();
  resetting_ = false;
  if (trouble_ == Trouble::Vanish && random_.chance(0.8))
    later(random_.between<Time>(0, 500) * kMicrosecond, [this, &rank = ranks_[victim_]] { wake_too_late(rank); });
}

}  // namespace pplx::sim
