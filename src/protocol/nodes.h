// The node of each rank, and its relays on other nodes. A combine first adds the rows of a node's ranks, and rounds their sum as a
// row that is sent; then it adds the sums of nodes, in ascending order. All ranks have the same table, whatever carries between
// them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "heap.h"

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
  std::vector<std::uint32_t> nth_there;  // [world]: this rank's number among the sources of a relay of its
  std::vector<std::uint32_t> other;      // [world]: number of a remote rank's node among those other than this one
  std::vector<std::uint32_t> other_there;   // [world]: number of this node among those other than a remote rank's
  std::vector<std::uint32_t> number;     // [world]: a rank's number on its node
  std::vector<std::uint32_t> mates;      // the living ranks of this node, ascending, this one among them
  std::vector<std::uint32_t> sources;    // those of which this rank is the relay, ascending
};

inline Rails make_rails(const Config& c, const Nodes& nodes, const std::vector<bool>& alive) {
  Rails rails;
  rails.rep.resize(c.world);
  rails.holder.assign(c.world, c.rank);
  rails.nth = rails.other = rails.number = rails.rep;
  rails.nth_there = rails.other_there = rails.holder;
  for (std::uint32_t rank = 0; rank < c.world; ++rank) rails.rep[rank] = rails.number[rank] = rank;
  if (c.node_ranks == 0) return rails;
  std::vector<std::vector<std::uint32_t>> living(count_nodes(nodes));
  std::vector<std::uint32_t> ranks(living.size()), before(c.world), count(c.world);
  for (std::uint32_t rank = 0; rank < c.world; ++rank) {
    rails.number[rank] = ranks[nodes[rank]]++;
    before[rank] = static_cast<std::uint32_t>(living[nodes[rank]].size());
    if (alive[rank]) living[nodes[rank]].push_back(rank);
  }
  const auto relay = [&](std::uint32_t source, std::uint32_t node) { return living[node][before[source] % living[node].size()]; };
  const auto sources_before_this = [&](std::uint32_t its_relay) {
    std::uint32_t n = 0;
    for (std::uint32_t rank = 0; rank < c.rank; ++rank)
      n += alive[rank] && nodes[rank] != nodes[its_relay] && relay(rank, nodes[its_relay]) == its_relay;
    return n;
  };
  const std::uint32_t node = nodes[c.rank];
  rails.mates = living[node];
  for (std::uint32_t rank = 0; rank < c.world; ++rank) {
    const std::uint32_t its_node = nodes[rank];
    if (!alive[rank] || its_node == node) continue;
    rails.rep[rank] = relay(c.rank, its_node);
    const std::uint32_t holder = rails.holder[rank] = relay(rank, node);
    rails.nth[rank] = count[holder]++;
    if (rails.rep[rank] == rank) rails.nth_there[rank] = sources_before_this(rank);
    rails.other[rank] = its_node - (its_node > node);
    rails.other_there[rank] = node - (node > its_node);
    if (holder == c.rank) rails.sources.push_back(rank);
  }
  return rails;
}

// Returns the peers with which each of up to 64 ranks exchanges blocks over the network, a bit each: its relays, and those whose relay
// it is.
inline std::vector<std::uint64_t> rail_peers(Config c, const Nodes& nodes, const std::vector<bool>& alive) {
  std::vector<std::uint64_t> peers(c.world);
  for (c.rank = 0; c.rank < c.world; ++c.rank) {
    if (!alive[c.rank]) continue;
    const Rails rails = make_rails(c, nodes, alive);
    for (std::uint32_t peer = 0; peer < c.world; ++peer)
      if (alive[peer] && nodes[peer] != nodes[c.rank] && rails.rep[peer] == peer) {
        peers[c.rank] |= 1ull << peer;
        peers[peer] |= 1ull << c.rank;
      }
  }
  return peers;
}

// The memory of a relay in which its mates leave what they return.
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

// The memory in which the network brings and takes a rank's blocks. With node_ranks it lies apart from the heap, and is laid anew
// in each generation: reset() may give a relay other sources. No rank of another node can write into the heap then.
//
//   answers[set][other node] | for each source: its node blocks[set], weights[set] || RelayArea || send areas
//
// The network writes into shared_bytes, mates into mapped_bytes.
struct RailArea {
  std::uint64_t slots[kOps] = {}, set_bytes[kOps] = {}, nth_bytes[kOps] = {};
  std::uint64_t shared_bytes = 0, mapped_bytes = 0, bytes = 0;
  std::uint64_t relay_at = 0;
  RelayArea relay;
  std::uint64_t send[kOps] = {}, send_bytes[kOps] = {};

  // Depends on no number of sources: ranks know where their slots lie at others.
  constexpr std::uint64_t slot_at(std::uint32_t set, Op op, std::uint32_t nth) const {
    return slots[std::uint32_t(op)] + set_bytes[std::uint32_t(op)] * set + nth_bytes[std::uint32_t(op)] * nth;
  }
  constexpr std::uint64_t send_at(std::uint32_t set, Op op) const {
    return send[std::uint32_t(op)] + send_bytes[std::uint32_t(op)] * set;
  }
};

constexpr RailArea rail_area(const Config& c, std::uint32_t nodes, std::uint32_t sources) {
  constexpr std::uint64_t page = 4096;
  const std::uint32_t most = max_rows_of_block(c), others = nodes - 1;
  const std::uint64_t rows_out = std::uint64_t{most} * std::min(c.top_k, others);
  RailArea area;
  std::uint64_t rail = 0;
  const auto slot_bytes = [&](Op op) { return align_up(network_block(c, op).bytes(most), block_alignment(c)); };
  const std::uint64_t answer = slot_bytes(Op::Combine);
  area.nth_bytes[1] = answer;
  area.set_bytes[1] = answer * others;
  for (const Op op : {Op::Dispatch, Op::Weights}) {
    const auto i = std::uint32_t(op);
    area.slots[i] = area.set_bytes[1] * c.in_flight + rail;
    area.set_bytes[i] = slot_bytes(op);
    rail += area.set_bytes[i] * c.in_flight;
  }
  area.nth_bytes[0] = area.nth_bytes[2] = rail;
  area.shared_bytes = area.relay_at = align_up(area.slot_at(0, Op::Dispatch, sources), page);
  area.relay = relay_area(c, sources);
  std::uint64_t at = area.mapped_bytes = align_up(area.relay_at + area.relay.bytes, page);
  for (std::uint32_t op = 0; op < kOps; ++op) {
    const BlockLayout block = network_block(c, Op(op));
    area.send[op] = at;
    area.send_bytes[op] = Op(op) == Op::Combine ? packed_bytes(block, sources, std::uint64_t{most} * sources)
                                                : packed_bytes(block, others, rows_out);
    at = align_up(at + area.send_bytes[op] * c.in_flight, page);
  }
  area.bytes = at;
  return area;
}

// Without relays: all of it lies in the heap. Slots have the numbers of ranks.
constexpr RailArea rail_area(const Heap& h) {
  RailArea area;
  for (std::uint32_t op = 0; op < kOps; ++op) {
    area.slots[op] = h.remote_blocks[op];
    area.nth_bytes[op] = h.slot_bytes[op];
    area.set_bytes[op] = h.slot_bytes[op] * h.remote_slots;
    area.send[op] = h.send[op];
    area.send_bytes[op] = h.send_bytes[op];
  }
  area.shared_bytes = area.mapped_bytes = h.shared_bytes;
  area.bytes = h.bytes;
  return area;
}

}  // namespace pplx
