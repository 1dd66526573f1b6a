// Random routing from a seed: how many rows each rank sends to each rank and node, counted by the library's own plan.
#pragma once

#include <cstdint>
#include <vector>

#include "protocol/block.h"

namespace pplx::model {

struct Shape {
  std::uint32_t ranks = 16, node_size = 8;
  std::uint32_t tokens = 128;          // per rank
  std::uint32_t experts = 256, top_k = 8, hidden = 7168;
  std::uint32_t groups = 0;            // groups of experts, of kGroups, that a token's choices lie in; 0: any
  Wire wire = Wire::FP8;               // a dispatch's; a combine returns bfloat16

  std::uint32_t nodes() const { return ranks / node_size; }
  std::uint32_t node_of(std::uint32_t rank) const { return rank / node_size; }
  bool same_node(std::uint32_t a, std::uint32_t b) const { return node_of(a) == node_of(b); }
};

constexpr std::uint32_t kGroups = 8;   // DeepSeek-V3's

Config config_of(const Shape& shape, std::uint32_t rank);

struct Routing {
  std::uint32_t ranks = 0, nodes = 0;
  std::vector<std::vector<std::int32_t>> ids;   // indexed by source: the experts of its tokens, top_k each
  std::vector<std::uint32_t> rows;              // [source][target]: tokens, each once per rank that wants it
  std::vector<std::uint32_t> node_rows;         // [source][node]: tokens, each once per node that wants it
  std::vector<std::uint32_t> copies;            // [source][target]: choices, a token as often as the rank's experts want it

  std::uint32_t rows_to(std::uint32_t source, std::uint32_t target) const { return rows[std::size_t{source} * ranks + target]; }
  std::uint32_t rows_to_node(std::uint32_t source, std::uint32_t node) const {
    return node_rows[std::size_t{source} * nodes + node];
  }
  std::uint32_t copies_to(std::uint32_t source, std::uint32_t target) const { return copies[std::size_t{source} * ranks + target]; }
};

// Every token chooses top_k different experts: uniformly, or, with groups, those of the highest scores in the groups whose two
// highest add up to most.
Routing random_routing(const Shape& shape, std::uint64_t seed);

}  // namespace pplx::model
