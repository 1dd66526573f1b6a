// A world without trouble, in which at most one thing is late: which rank waits for which is then known.
#include "world.h"

#include <cstdio>

namespace pplx::sim {

using namespace cpu;

void World::build_steady(const Late& late) {
  network_.calm();
  std::vector<std::uint32_t> node_of;
  for (std::uint32_t node = 0, nodes = random_.between(3u, 4u); node < nodes; ++node)
    node_of.insert(node_of.end(), random_.between(2u, 3u), node);
  const auto world = static_cast<std::uint32_t>(node_of.size());
  if (late.what == Late::What::Nic ? late.from > node_of.back() : late.from >= world || late.to >= world)
    throw Violation("there are " + std::to_string(world) + " ranks on " + std::to_string(node_of.back() + 1) + " nodes");
  if (late.what == Late::What::Link && node_of[late.from] == node_of[late.to])
    throw Violation("these ranks share a node, where no link is");
  ranks_ = std::vector<Rank>(world);
  alive_.assign(world, true);
  scripts_.resize(objects_);
  nodes_.assign(node_of.begin(), node_of.end());
  endpoints_ = 2;
  shard_bytes_ = 4096;
  timeout_ = 10;
  begins_ = 1;
  for (std::uint32_t r = 0; r < world; ++r) add_rank(r, node_of[r]);
  Config c;
  c.world = world;
  c.num_experts = 2 * world;
  c.top_k = random_.between(1u, 4u);
  c.dtype = static_cast<Dtype>(random_.below(3));
  c.wire = kWires[random_.below(std::size(kWires))];
  c.hidden = 32;
  c.max_tokens = 4;
  c.in_flight = 1;
  c.layout = static_cast<LayoutKind>(random_.below(3));
  c.first_step = 1;
  c.align = 1;
  c.max_rows = c.max_per_expert = world * c.max_tokens * c.top_k;
  make_object(0, c);

  if (late.what == Late::What::Rank) ranks_[late.from].late = late.by;
  if (late.what == Late::What::Link) network_.delay(late.from, late.to, late.by);
  for (std::uint32_t r = 0; r < world && late.what == Late::What::Nic; ++r)
    for (std::uint32_t peer = 0; peer < world; ++peer)
      if ((node_of[r] == late.from) != (node_of[peer] == late.from)) network_.delay(r, peer, late.by);
}

// True until `late` has passed since the rank could begin the step.
bool World::comes_late(Rank& rank) {
  if (!rank.begins) {
    rank.begins = clock_.now() + rank.late;
    later(rank.late, [this, &rank] { wake(*rank.phases_actor); });
  }
  if (clock_.now() < *rank.begins) return true;
  rank.begins.reset();
  return false;
}

std::vector<Counters> World::counters() const {
  std::vector<Counters> counters;
  for (const Rank& rank : ranks_) counters.push_back(rank.objects[0].exchange->counters());
  return counters;
}

std::string World::run_steady(std::uint32_t steps, const Late& late) {
  build_steady(late);
  connect();
  finish_generation();   // a first step, for which ranks come as they start
  const std::vector<Counters> before = counters();
  const double begun = clock_.seconds();
  steps_ += steps;
  finish_generation();
  check_bytes();
  const std::vector<Counters> after = counters();

  std::string text;
  char room[160];
  for (const Rank& rank : ranks_) {
    const std::uint32_t r = rank.number;
    const auto ended = static_cast<double>(after[r].steps - before[r].steps);
    std::snprintf(room, sizeof room, R"({"rank": %u, "node": %u, "steps": %.0f, "seconds": %.6f, "open_steps": 0, "alive": %zu, )",
                  r, rank.node, ended, clock_.seconds() - begun, ranks_.size());
    text += std::string(text.empty() ? "[" : ",\n ") + room + R"("experts": {}, "nics": {}, "waits": {)";
    const char* comma = "";
    for (std::uint32_t peer = 0; peer < ranks_.size(); ++peer) {
      if (peer == r) continue;
      std::uint64_t ns = 0;
      for (int half : {0, 1}) ns += after[r].peers[peer].waited[half] - before[r].peers[peer].waited[half];
      std::snprintf(room, sizeof room, R"(%s"%u": %.6f)", comma, peer, static_cast<double>(ns) * 1e-6 / ended);
      text += room;
      comma = ", ";
    }
    text += "}}";
  }
  return text + "]";
}

}  // namespace pplx::sim
