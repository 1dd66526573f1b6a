// The node of each rank, and its relays on other nodes. A combine first adds the rows of a node's ranks, and rounds their sum as a
// row that is sent; then it adds the sums of nodes, in ascending order. All ranks have the same table, whatever carries between
// them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "block.h"

namespace pplx {

// Indexed by rank; nodes are numbered in the order of their first ranks, so nodes of one rank keep ranks' order. Empty: one node.
using Nodes = std::vector<std::uint16_t>;

inline std::uint32_t count_nodes(const Nodes& nodes) {
  return nodes.empty() ? 1 : 1u + *std::max_element(nodes.begin(), nodes.end());
}

// True if sums depend on the table: there are several nodes, and some have several ranks.
inline bool groups_sums(const Nodes& nodes) {
  const std::uint32_t count = count_nodes(nodes);
  return count > 1 && count < nodes.size();
}

// Null if the table can be that of the configuration, else what is wrong with it.
inline const char* invalid_nodes(const Config& c, const Nodes& nodes) {
  if (nodes.empty()) return nullptr;
  if (nodes.size() != c.world) return "the table of nodes must have an entry for each rank";
  std::uint32_t next = 0;
  for (const std::uint16_t node : nodes) {
    if (node > next) return "nodes must be numbered in the order of their first ranks";
    next += node == next;
  }
  return nullptr;
}

// The ranks to which rows go. With node_ranks a row for another node goes there once, to the relay of its source: of that node's
// living ranks the one whose number, among them, is the source's on its own node, modulo their count. All ranks of the node, the
// relay's mates, read it there. They return their sums to the relay, which adds them up and answers the source.
struct Rails {
  std::vector<std::uint32_t> rep;        // [world]: the rank to which this one sends a rank's rows: itself, or its relay there
  std::vector<std::uint32_t> holder;     // [world]: the rank of this node to which a source's rows come: this one, or a relay
  std::vector<std::uint32_t> nth;        // [world]: a remote source's number among those of its relay here
  std::vector<std::uint32_t> number;     // [world]: a rank's number on its node
  std::vector<std::uint32_t> mates;      // the living ranks of this node, ascending, this one among them
  std::vector<std::uint32_t> sources;    // those of which this rank is the relay, ascending
};

inline Rails make_rails(const Config& c, const Nodes& nodes, const std::vector<bool>& alive) {
  Rails rails;
  rails.rep.resize(c.world);
  rails.holder.assign(c.world, c.rank);
  rails.nth.resize(c.world);
  rails.number.resize(c.world);
  for (std::uint32_t rank = 0; rank < c.world; ++rank) rails.rep[rank] = rank;
  if (c.node_ranks == 0) return rails;
  std::vector<std::vector<std::uint32_t>> living(count_nodes(nodes));
  std::vector<std::uint32_t> ranks(living.size()), before(c.world), count(c.world);
  for (std::uint32_t rank = 0; rank < c.world; ++rank) {
    rails.number[rank] = ranks[nodes[rank]]++;
    before[rank] = static_cast<std::uint32_t>(living[nodes[rank]].size());
    if (alive[rank]) living[nodes[rank]].push_back(rank);
  }
  const auto relay = [&](std::uint32_t source, std::uint32_t node) { return living[node][before[source] % living[node].size()]; };
  const std::uint32_t here = nodes[c.rank];
  rails.mates = living[here];
  for (std::uint32_t rank = 0; rank < c.world; ++rank) {
    if (!alive[rank] || nodes[rank] == here) continue;
    rails.rep[rank] = relay(c.rank, nodes[rank]);
    const std::uint32_t holder = rails.holder[rank] = relay(rank, here);
    rails.nth[rank] = count[holder]++;
    if (holder == c.rank) rails.sources.push_back(rank);
  }
  return rails;
}

// The memory of a relay in which its mates leave what they return, apart from its heap: reset() may give it other sources.
//
//   arrival[set][source][mate] | combine block[set][source][mate]
struct RelayArea {
  std::uint32_t sources = 0, mates = 0;
  std::uint64_t blocks = 0, block_bytes = 0, bytes = 0;

  constexpr std::uint64_t index(std::uint32_t set, std::uint32_t source, std::uint32_t mate) const {
    return (std::uint64_t{set} * sources + source) * mates + mate;
  }
  constexpr std::uint64_t arrival_at(std::uint32_t set, std::uint32_t source, std::uint32_t mate) const {
    return kWordBytes * index(set, source, mate);
  }
  constexpr std::uint64_t block_at(std::uint32_t set, std::uint32_t source, std::uint32_t mate) const {
    return blocks + block_bytes * index(set, source, mate);
  }
};

constexpr RelayArea relay_area(const Config& c, std::uint32_t sources) {
  RelayArea area;
  area.sources = sources;
  area.mates = c.node_ranks;
  area.blocks = align_up(kWordBytes * area.index(c.in_flight, 0, 0), 4096);
  area.block_bytes = align_up(combine_block(c).bytes(max_rows_of_block(c)), block_alignment(c));
  area.bytes = area.block_at(c.in_flight, 0, 0);
  return area;
}

}  // namespace pplx
