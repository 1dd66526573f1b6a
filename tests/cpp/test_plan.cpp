// The plan, the relays, and the arithmetic of owners, against plain loops that share nothing with them.
#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "../../src/protocol/heap_layout.h"
#include "../../src/protocol/nodes.h"
#include "../../src/protocol/plan.h"
#include "check.h"

using namespace pplx;

namespace {

Config random_config(check::Random& random) {
  Config c;
  c.world = static_cast<std::uint32_t>(random.integer(1, random.chance(0.1) ? 70 : 9));
  c.num_experts = static_cast<std::uint32_t>(random.integer(1, random.chance(0.3) ? 3 : 40));
  c.top_k = static_cast<std::uint32_t>(random.integer(1, kMaxTopK));
  c.hidden = static_cast<std::uint32_t>(random.integer(1, 60)) * 8;
  c.max_tokens = static_cast<std::uint32_t>(random.integer(1, 40));
  c.in_flight = 1u << random.integer(0, 3);
  c.dtype = static_cast<Dtype>(random.integer(0, 2));
  c.wire = static_cast<Wire>(random.integer(0, 3));
  return c;
}

// Every expert has one owner, owners own runs in order, and the last ranks may own fewer or none.
void check_ownership(const Config& c) {
  std::uint32_t next = 0;
  for (std::uint32_t r = 0; r < c.world; ++r) {
    const std::uint32_t n = local_experts(c, r);
    CHECK(n <= experts_per_rank(c));
    if (n > 0) CHECK_EQ(first_expert(c, r), next);
    for (std::uint32_t e = next; e < next + n; ++e) CHECK_EQ(rank_of_expert(c, e), r);
    next += n;
  }
  CHECK_EQ(next, c.num_experts);
  CHECK_EQ(experts_per_rank(c), (c.num_experts + c.world - 1) / c.world);
}

// Ranks of a node follow each other, or not.
Nodes random_nodes(const Config& c, check::Random& random) {
  const bool in_a_row = random.chance(0.5);
  const auto most = static_cast<std::uint32_t>(random.integer(1, c.world));
  std::map<std::uint32_t, std::uint16_t> numbers;
  Nodes nodes;
  for (std::uint32_t r = 0, last = 0; r < c.world; ++r) {
    last = in_a_row ? last + random.chance(0.4) : static_cast<std::uint32_t>(random.integer(0, most - 1));
    nodes.push_back(numbers.emplace(last, numbers.size()).first->second);
  }
  CHECK(invalid_nodes(c, nodes) == nullptr);
  return nodes;
}

std::vector<std::uint32_t> living_of(const Nodes& nodes, std::uint16_t node, const std::vector<bool>& alive) {
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t r = 0; r < nodes.size(); ++r)
    if (nodes[r] == node && alive[r]) ranks.push_back(r);
  return ranks;
}

// All ranks agree on relays. A source has one on each other node. Ranks of a node serve equally many of another one's, within one.
void check_rails(check::Random& random) {
  Config c = random_config(random);
  const Nodes nodes = random_nodes(c, random);
  c.node_ranks = kMaxNodeRanks;
  std::vector<bool> alive(c.world, true);
  const double dies = random.chance(0.5) ? 0.0 : 0.3;
  for (std::uint32_t r = 0; r < c.world; ++r) alive[r] = !random.chance(dies);
  std::vector<Rails> of(c.world);
  for (c.rank = 0; c.rank < c.world; ++c.rank)
    if (alive[c.rank]) of[c.rank] = make_rails(c, nodes, alive);
  for (std::uint32_t s = 0; s < c.world; ++s) {
    if (!alive[s]) continue;
    std::map<std::uint32_t, std::uint32_t> answers;   // a relay's place is its own
    for (std::uint32_t d = 0, number[kMaxRanks] = {}; d < c.world; ++d) {
      const std::uint32_t to = of[s].rep[d];
      CHECK_EQ(of[s].number[d], number[nodes[d]]++);
      if (!alive[d] || nodes[d] == nodes[s]) {
        CHECK_EQ(to, d);
        continue;
      }
      CHECK(alive[to] && nodes[to] == nodes[d]);
      CHECK_EQ(of[d].holder[s], to);
      const std::uint32_t nth = of[to].nth[s];
      CHECK_EQ(of[d].nth[s], nth);
      CHECK(nth < of[to].sources.size() && of[to].sources[nth] == s);
      // A source and its relay agree where the block lies, and where the answer.
      CHECK_EQ(of[s].nth_there[to], nth);
      CHECK_EQ(of[to].other_there[s], of[s].other[to]);
      CHECK(answers.emplace(of[s].other[to], to).first->second == to && of[s].other[to] + 1 < count_nodes(nodes));
    }
    CHECK(of[s].mates == living_of(nodes, nodes[s], alive));
    for (std::uint32_t mate : of[s].mates) CHECK_EQ(of[s].holder[mate], s);
    for (std::size_t i = 0; i < of[s].sources.size(); ++i) {
      CHECK_EQ(of[s].holder[of[s].sources[i]], s);
      CHECK(i == 0 || of[s].sources[i - 1] < of[s].sources[i]);
    }
  }
  for (std::uint16_t a = 0; a < count_nodes(nodes); ++a)
    for (std::uint16_t b = 0; b < count_nodes(nodes); ++b) {
      std::map<std::uint32_t, std::uint32_t> served;
      for (std::uint32_t relay : living_of(nodes, b, alive)) served[relay] = 0;
      for (std::uint32_t s : living_of(nodes, a, alive))
        if (a != b && !served.empty()) ++served[of[s].rep[served.begin()->first]];
      for (const auto& one : served)
        for (const auto& other : served) CHECK(one.second <= other.second + 1);
    }
  // Words and blocks of an area lie apart.
  const RelayArea area = relay_area(c, static_cast<std::uint32_t>(random.integer(1, 5)));
  std::uint64_t word = 0, block = area.blocks;
  for (std::uint32_t set = 0; set < c.in_flight; ++set)
    for (std::uint32_t source = 0; source < area.sources; ++source)
      for (std::uint32_t mate = 0; mate < c.node_ranks; ++mate, word += 8, block += area.block_bytes)
        CHECK(area.arrival_at(set, source, mate) == word && area.block_at(set, source, mate) == block);
  CHECK(word <= area.blocks && block == area.bytes && area.block_bytes >= combine_block(c).bytes(c.max_tokens));
}

// Slots, returned rows and blocks to send lie apart, and within their part of the area. A source does not know how many sources its
// relay has, and finds its slot there.
void check_rail_area(check::Random& random) {
  Config c = random_config(random);
  c.node_ranks = static_cast<std::uint32_t>(random.integer(1, 8));
  c.combine_fp8 = random.chance(0.3);
  const auto nodes = static_cast<std::uint32_t>(random.integer(2, 5)), sources = static_cast<std::uint32_t>(random.integer(0, 9));
  const RailArea area = rail_area(c, nodes, sources), other = rail_area(c, nodes, sources + 3);
  std::vector<std::pair<std::uint64_t, std::uint64_t>> spans;   // begin and end
  const auto add = [&](std::uint64_t at, std::uint64_t bytes) { spans.emplace_back(at, at + bytes); };
  for (std::uint32_t set = 0; set < c.in_flight; ++set)
    for (const Op op : {Op::Dispatch, Op::Combine, Op::Weights}) {
      const bool answers = op == Op::Combine;
      const std::uint64_t bytes = network_block(c, op).bytes(max_rows_of_block(c));
      for (std::uint32_t nth = 0; nth < (answers ? nodes - 1 : sources); ++nth) {
        const std::uint64_t at = area.slot_at(set, op, nth);
        CHECK(at == other.slot_at(set, op, nth) && at % 64 == 0 && at + bytes <= area.shared_bytes);
        add(at, bytes);
      }
      const std::uint64_t rows = std::uint64_t{max_rows_of_block(c)} * std::min(nodes - 1, c.top_k);
      const std::uint64_t most = answers ? sources * bytes : network_block(c, op).row_bytes * rows;
      CHECK(area.send_at(set, op) >= area.mapped_bytes && area.send_bytes[std::uint32_t(op)] >= most);
      add(area.send_at(set, op), area.send_bytes[std::uint32_t(op)]);
    }
  CHECK(area.relay_at >= area.shared_bytes && area.relay_at + area.relay.bytes <= area.mapped_bytes);
  CHECK_EQ(area.relay.sources, sources);
  add(area.relay_at, area.relay.bytes);
  std::sort(spans.begin(), spans.end());
  for (std::size_t i = 1; i < spans.size(); ++i) CHECK(spans[i - 1].second <= spans[i].first);
  CHECK(spans.back().second <= area.bytes);
}

template <typename Id>
void check_plan(const Config& config, check::Random& random) {
  Config c = config;
  const Nodes nodes = random_nodes(c, random);
  std::vector<std::uint32_t> in_node(c.world);
  for (std::uint16_t node : nodes) c.node_ranks = std::max(c.node_ranks, ++in_node[node]);
  if (!groups_sums(nodes) || c.node_ranks > kMaxNodeRanks || random.chance(0.5)) c.node_ranks = 0;
  c.rank = static_cast<std::uint32_t>(random.integer(0, c.world - 1));
  CHECK(invalid(c) == nullptr);
  const auto tokens = static_cast<std::uint32_t>(random.chance(0.1) ? 0 : random.integer(0, c.max_tokens));
  std::vector<Id> ids;
  const double dropped = random.chance(0.2) ? 0.9 : 0.1;
  const bool one_hot = random.chance(0.15);
  for (std::uint32_t i = 0; i < tokens * c.top_k; ++i) {
    const std::int64_t id = one_hot ? c.num_experts - 1 : random.integer(0, c.num_experts - 1);
    ids.push_back(static_cast<Id>(random.chance(dropped) ? (random.chance(0.5) ? -1 : -random.integer(1, 1 << 30)) : id));
  }
  std::vector<bool> alive(c.world, true);
  const bool deaths = random.chance(0.3);
  if (deaths)
    for (std::uint32_t r = 0; r < c.world; ++r) alive[r] = r == c.rank || !random.chance(0.3);
  const Rails rails = make_rails(c, nodes, alive);
  const std::vector<std::uint32_t>& rep = rails.rep;
  const Plan plan = make_plan(c, ids.data(), tokens, deaths ? &alive : nullptr, c.node_ranks != 0 ? &rep : nullptr);
  // A rank of another node gets its rows from its living one whose number is this rank's, modulo their count.
  const auto receiver = [&](std::uint32_t owner) {
    if (c.node_ranks == 0 || nodes[owner] == nodes[c.rank]) return owner;
    const std::vector<std::uint32_t> there = living_of(nodes, nodes[owner], alive), here = living_of(nodes, nodes[c.rank], alive);
    return there[static_cast<std::size_t>(std::find(here.begin(), here.end(), c.rank) - here.begin()) % there.size()];
  };

  CHECK_EQ(plan.tokens, tokens);
  CHECK_EQ(plan.top_k, c.top_k);
  // Choices: dropped ones are marked, the others are numbered per expert in (token, k) order.
  std::map<std::uint32_t, std::uint32_t> seen;
  std::vector<std::set<std::uint32_t>> wants(tokens);   // ranks of each token
  for (std::uint32_t t = 0; t < tokens; ++t)
    for (std::uint32_t k = 0; k < c.top_k; ++k) {
      const std::size_t at = std::size_t{t} * c.top_k + k;
      const std::int64_t id = ids[at];
      std::uint32_t owner = 0;
      if (id >= 0)
        while (id >= static_cast<std::int64_t>(first_expert(c, owner)) + local_experts(c, owner)) ++owner;
      if (id < 0 || !alive[owner]) {
        CHECK_EQ(plan.ids[at], Plan::kDropped);
        continue;
      }
      CHECK_EQ(plan.ids[at], static_cast<std::int32_t>(id));
      CHECK_EQ(plan.index[at], seen[static_cast<std::uint32_t>(id)]);
      ++seen[static_cast<std::uint32_t>(id)];
      wants[t].insert(receiver(owner));
    }
  CHECK_EQ(plan.counts.size(), std::size_t{c.num_experts});
  for (std::uint32_t e = 0; e < c.num_experts; ++e) CHECK_EQ(plan.counts[e], seen[e]);

  // Rows: one for each (token, rank that wants it), tokens ascending; and where each token's partial sums come back.
  std::uint32_t total = 0;
  for (std::uint32_t r = 0; r < c.world; ++r) {
    CHECK_EQ(plan.rows_begin[r], total);
    std::uint32_t row = 0;
    for (std::uint32_t t = 0; t < tokens; ++t) {
      if (wants[t].count(r) == 0) continue;
      CHECK_EQ(plan.row_token[total + row], t);
      bool found = false;
      for (std::uint32_t i = plan.token_begin[t]; i < plan.token_begin[t + 1]; ++i)
        if (plan.token_rows[i].rank == r) {
          CHECK(!found);
          found = true;
          CHECK_EQ(plan.token_rows[i].row, row);
        }
      CHECK(found);
      ++row;
    }
    CHECK_EQ(plan.rows(r), row);
    total += row;
  }
  CHECK_EQ(plan.row_token.size(), std::size_t{total});
  CHECK_EQ(plan.token_rows.size(), std::size_t{total});
  CHECK_EQ(plan.token_begin[0], 0u);
  for (std::uint32_t t = 0; t < tokens; ++t) {
    CHECK_EQ(plan.token_begin[t + 1] - plan.token_begin[t], static_cast<std::uint32_t>(wants[t].size()));
    for (std::uint32_t i = plan.token_begin[t] + 1; i < plan.token_begin[t + 1]; ++i)
      CHECK(plan.token_rows[i - 1].rank < plan.token_rows[i].rank);
  }

  // The blocks for remote peers fit the send area, whichever peers are remote; with relays those for the network's peers.
  Config with = c;
  std::vector<std::uint32_t> remote;
  for (std::uint32_t r = 0; r < c.world; ++r)
    if (nodes[r] != nodes[c.rank]) remote.push_back(r);
  with.remote_peers = static_cast<std::uint32_t>(remote.size());
  with.combine_fp8 = c.node_ranks != 0 && random.chance(0.5);
  const Heap heap = heap_of(with);
  RailArea area = rail_area(heap);
  std::size_t answered = remote.size();
  if (c.node_ranks != 0) {
    const auto is_none = [&](std::uint32_t r) { return rep[r] != r || !alive[r]; };
    remote.erase(std::remove_if(remote.begin(), remote.end(), is_none), remote.end());
    answered = rails.sources.size();
    area = rail_area(with, count_nodes(nodes), static_cast<std::uint32_t>(answered));
    CHECK(heap.send_bytes[0] + heap.send_bytes[1] + heap.send_bytes[2] == 0 && heap.mapped_slots == c.node_ranks);
  }
  std::uint64_t packed = 0;
  for (std::uint32_t r : remote) {
    CHECK(dispatch_block(with).bytes(plan.rows(r)) <= heap.slot_bytes[0]);
    packed += align_up(dispatch_block(with).bytes(plan.rows(r)), 64);
  }
  CHECK(packed <= area.send_bytes[0]);
  packed = 0;
  for (std::uint32_t r : remote) packed += align_up(weights_block(with).bytes(plan.rows(r)), 64);
  CHECK(packed <= area.send_bytes[2]);
  packed = answered * align_up(network_block(with, Op::Combine).bytes(with.max_tokens), 64);
  CHECK(network_block(with, Op::Combine).bytes(with.max_tokens) <= heap.slot_bytes[1]);
  CHECK(packed <= area.send_bytes[1]);
}

// Each token is sent by one living replica, in its turn; what each plans is what a lone rank plans that has only those tokens.
void check_replicas(check::Random& random) {
  Config c = random_config(random);
  c.replicas = static_cast<std::uint32_t>(random.integer(2, 5));
  c.world = c.replicas * static_cast<std::uint32_t>(random.integer(1, 4));
  CHECK(invalid(c) == nullptr);
  const auto group = c.replicas * static_cast<std::uint32_t>(random.integer(0, c.world / c.replicas - 1));
  std::vector<bool> alive(c.world, true);
  const bool deaths = random.chance(0.4);
  if (deaths)
    for (std::uint32_t r = 0; r < c.world; ++r) alive[r] = !random.chance(0.3);
  std::vector<std::uint32_t> members;
  for (std::uint32_t r = group; r < group + c.replicas; ++r)
    if (alive[r]) members.push_back(r);
  if (members.empty()) return;
  const auto tokens = static_cast<std::uint32_t>(random.integer(0, c.max_tokens));
  std::vector<std::int32_t> ids;
  for (std::uint32_t i = 0; i < tokens * c.top_k; ++i)
    ids.push_back(static_cast<std::int32_t>(random.chance(0.1) ? -random.integer(1, 9) : random.integer(0, c.num_experts - 1)));

  std::vector<std::uint32_t> senders(tokens, 0);
  std::uint64_t digest = 0;
  for (std::size_t m = 0; m < members.size(); ++m) {
    c.rank = members[m];
    const Plan plan = make_plan(c, ids.data(), tokens, deaths ? &alive : nullptr);
    CHECK_EQ(plan.slice.of, members.size());
    CHECK_EQ(plan.slice.number, m);
    if (m > 0) CHECK_EQ(plan.ids_digest, digest);
    digest = plan.ids_digest;
    std::vector<std::int32_t> own;
    std::vector<std::uint32_t> own_tokens;
    for (std::uint32_t t = 0; t < tokens; ++t) {
      const bool mine = t % members.size() == m;
      CHECK_EQ(plan.slice.has(t), mine);
      if (!mine) {
        CHECK_EQ(plan.token_begin[t], plan.token_begin[t + 1]);
        continue;
      }
      ++senders[t];
      CHECK_EQ(plan.slice.token(static_cast<std::uint32_t>(own_tokens.size())), t);
      own_tokens.push_back(t);
      own.insert(own.end(), ids.begin() + t * c.top_k, ids.begin() + (t + 1) * c.top_k);
    }
    CHECK_EQ(plan.slice.tokens(tokens), own_tokens.size());
    if (members.size() == c.replicas) CHECK(own_tokens.size() <= max_rows_of_block(c));
    Config lone = c;
    lone.replicas = 1;
    const Plan same = make_plan(lone, own.data(), static_cast<std::uint32_t>(own_tokens.size()), deaths ? &alive : nullptr);
    CHECK(same.counts == plan.counts && same.rows_begin == plan.rows_begin);
    for (std::size_t i = 0; i < same.row_token.size(); ++i) CHECK_EQ(plan.row_token[i], own_tokens[same.row_token[i]]);
    for (std::size_t i = 0; i < own.size(); ++i) {
      const std::size_t at = own_tokens[i / c.top_k] * c.top_k + i % c.top_k;
      CHECK(plan.ids[at] == same.ids[i] && plan.index[at] == same.index[i]);
    }
  }
  for (std::uint32_t n : senders) CHECK_EQ(n, 1u);
  // Another id anywhere is another digest; what kind of negative it is does not matter.
  if (ids.empty()) return;
  std::int32_t& changed = ids[random.bits() % ids.size()];
  const bool was_dropped = changed < 0;
  changed = was_dropped ? -77 : changed - 1;
  CHECK_EQ(make_plan(c, ids.data(), tokens).ids_digest == digest, was_dropped);
}

// An id may be repeated, so one source can send one expert every choice of every token: the route must carry the last one's
// number, or such a step must be refused.
void check_largest_step() {
  Config c;
  c.num_experts = 3;
  c.top_k = kMaxTopK;
  c.hidden = 8;
  c.max_tokens = 1u << 16;
  CHECK(invalid(c) == nullptr);
  const std::vector<std::int32_t> ids(std::size_t{c.max_tokens} * c.top_k, 1);
  const Plan plan = make_plan(c, ids.data(), c.max_tokens);
  CHECK_EQ(plan.counts[1], c.max_tokens * c.top_k);
  for (std::size_t i : {std::size_t{0}, ids.size() / 2, ids.size() - 1}) {
    CHECK_EQ(plan.index[i], static_cast<std::uint32_t>(i));
    CHECK_EQ(route_expert(route_place(1, plan.index[i])), 1u);
    CHECK_EQ(route_index(route_place(1, plan.index[i])), plan.index[i]);
  }
  c.max_tokens = (1u << 16) + 1;
  CHECK(invalid(c) != nullptr);
}

}  // namespace

int main() {
  check::Random random(check::seed());
  for (int i = 0; i < 4000; ++i) {
    const Config c = random_config(random);
    CHECK(invalid(c) == nullptr);
    check_ownership(c);
    if (random.chance(0.5))
      check_plan<std::int32_t>(c, random);
    else
      check_plan<std::int64_t>(c, random);
  }
  for (int i = 0; i < 2000; ++i) check_replicas(random);
  for (int i = 0; i < 1000; ++i) check_rails(random);
  for (int i = 0; i < 1000; ++i) check_rail_area(random);
  check_largest_step();
}
