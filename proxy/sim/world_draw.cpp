// Draws what a run is made of: its ranks, nodes and AllToAlls, and the trouble of each generation.
#include "world.h"

#include <algorithm>

namespace pplx::sim {

using namespace cpu;

std::string World::describe() const {
  const Config& c = ranks_.front().objects.front().config;
  std::uint32_t nodes = 0;
  for (const Rank& rank : ranks_) nodes = std::max(nodes, rank.node + 1);
  return std::to_string(ranks_.size()) + " ranks on " + std::to_string(nodes) + " nodes, " +
         std::to_string(objects_) + " AllToAll(s), " + std::to_string(c.num_experts) + " experts, top " + std::to_string(c.top_k) +
         ", hidden " + std::to_string(c.hidden) + ", at most " + std::to_string(c.max_tokens) + " tokens, in_flight " +
         std::to_string(c.in_flight) + ", " +
         (in_pieces(c) ? "slots of " + std::to_string(heap_of(c).slot_rows) + " rows, " : "") +
         (replicas_ > 1 ? std::to_string(replicas_) + " replicas, " : "") +
         (c.node_ranks != 0 ? "relays for up to " + std::to_string(c.node_ranks) + " ranks of a node, " : "") +
         (c.combine_fp8 ? "sums in fp8, " : "") +
         std::to_string(endpoints_) + " endpoint(s), " + std::to_string(generations_) + " generation(s)";
}

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
  c.node_ranks = node_ranks_;
  if (in_pieces(c)) c.node_ranks = 0;
  c.combine_fp8 = c.node_ranks != 0 && Random(mix(seed_ + 6 + object)).chance(0.3);
  return c;
}

// Slots of a few rows: from one row in a piece to the whole block in two.
void World::draw_pieces(Config& c, Random& pieces) const {
  const std::uint32_t most = std::max(1u, max_rows_of_block(c) / kPlaces);
  const std::uint32_t rows = pieces.chance(0.6) ? std::min(most, pieces.between(1u, 3u)) : pieces.between(1u, most);
  c.whole_tokens = pieces.between(1u, kPlaces * rows);
  c.slot_bytes = std::uint64_t{c.world} * kPlaces * (dispatch_block(c).bytes(rows) + combine_block(c).bytes(rows) + 2 * 63);
}

// Draws nodes of up to eight ranks, unequal, of consecutive ranks or not. Replicas stay together.
void World::draw_nodes(Random& relays) {
  const auto groups = static_cast<std::uint32_t>(ranks_.size()) / replicas_;
  std::vector<std::uint32_t> order(groups), node_of(groups);
  for (std::uint32_t g = 0; g < groups; ++g) order[g] = g;
  if (relays.chance(0.4))
    for (std::uint32_t g = groups; g > 1; --g) std::swap(order[g - 1], order[relays.below(g)]);
  const std::uint32_t most = relays.between(1u, 8 / replicas_);
  for (std::uint32_t g = 0, node = 0; g < groups; ++node) {
    const std::uint32_t end = std::min(groups, g + (relays.chance(0.5) ? most : relays.between(1u, most)));
    for (; g < end; ++g) node_of[order[g]] = node;
  }
  std::map<std::uint32_t, std::uint16_t> numbers;
  Nodes nodes;
  for (std::uint32_t r = 0; r < ranks_.size(); ++r)
    nodes.push_back(numbers.emplace(node_of[r / replicas_], numbers.size()).first->second);
  if (!groups_sums(nodes)) return;
  std::vector<std::uint32_t> count(numbers.size());
  for (Rank& rank : ranks_) node_ranks_ = std::max(node_ranks_, ++count[rank.node = nodes[rank.number]]);
}

void World::add_rank(std::uint32_t number, std::uint32_t node) {
  Rank& rank = ranks_[number];
  rank.number = number;
  rank.node = node;
  rank.objects.resize(objects_);
  actors_.push_back(std::make_unique<Actor>(*this, number, true));
  rank.proxy_actor = actors_.back().get();
  actors_.push_back(std::make_unique<Actor>(*this, number, false));
  rank.phases_actor = actors_.back().get();
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
    add_rank(r, node);
    ranks_[r].slowness = random_.chance(0.1) ? random_.between<Time>(5, 40) : 1;
  }
  Random nodes(mix(seed_ + 4)), relays(mix(seed_ + 5));
  if (relays.chance(0.4)) draw_nodes(relays);
  const bool any = nodes.chance(0.5) && node_ranks_ == 0;   // sums depend on the table alone
  const std::uint32_t most = nodes.between(1u, world);
  std::map<std::uint32_t, std::uint16_t> numbers;
  for (const Rank& rank : ranks_)
    nodes_.push_back(numbers.emplace(any ? nodes.below(most) : rank.node, numbers.size()).first->second);
  scripts_.resize(objects_);
  std::vector<Config> configs;
  for (std::uint32_t o = 0; o < objects_; ++o) {
    const Config& c = configs.emplace_back(draw_config(o, replicas, pieces));
    if (!in_pieces(c)) continue;
    in_pieces_ = true;
    timeout_ = std::max(timeout_, 0.1 * max_rows_of_block(c) / heap_of(c).piece_rows);   // a rank pauses for up to 10 ms
  }
  for (std::uint32_t o = 0; o < objects_; ++o) make_object(o, configs[o]);
}

// One AllToAll, on every rank.
void World::make_object(std::uint32_t number, const Config& config) {
  for (Rank& rank : ranks_) {
    Object& object = rank.objects[number];
    object.config = config;
    object.config.rank = rank.number;
    for (const Rank& peer : ranks_) object.config.remote_peers += peer.node != rank.node;
    object.memory.resize(heap_of(object.config).bytes / sizeof(std::uint64_t));
  }
  for (Rank& rank : ranks_) {
    Object& object = rank.objects[number];
    Memory memory;
    memory.own = object.base();
    memory.nodes = nodes_;
    for (Rank& peer : ranks_) memory.peers.push_back(peer.node == rank.node ? peer.objects[number].base() : nullptr);
    object.exchange = std::make_unique<Exchange>(object.config, memory, 1, timeout_, [this] { return clock_.seconds(); });
  }
  lay_relays(number);
}

// Fresh memory for what goes between nodes.
void World::lay_relays(std::uint32_t number) {
  if (ranks_[0].objects[number].config.node_ranks == 0) return;
  for (Rank& rank : ranks_) {
    Object& object = rank.objects[number];
    const std::uint64_t bytes = rank.alive ? object.exchange->blocks().relay_bytes(rank.number) : 0;
    object.rails.emplace_back(bytes / sizeof(std::uint64_t), 0);
  }
  for (Rank& rank : ranks_) {
    std::vector<char*> areas(ranks_.size(), nullptr);
    for (Rank& mate : ranks_)
      if (mate.alive && mate.node == rank.node)
        areas[mate.number] = reinterpret_cast<char*>(mate.objects[number].rails.back().data());
    if (rank.alive) rank.objects[number].exchange->lay_relays(std::move(areas));
  }
}

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
  // No rank can have finished all steps by then.
  steps_ = std::max(steps_, trouble_step_ + ranks_[0].objects[0].config.in_flight + 3);
  log_.line("generation %u, %u steps: %s of rank %u after it began step %u", generation_, steps_, name_of(trouble_), victim_,
            trouble_step_);
}

}  // namespace pplx::sim
