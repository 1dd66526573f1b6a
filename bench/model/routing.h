// Random routing from a seed: how many rows each rank sends to each, counted by the library's own plan.
#pragma once

#include <cstdint>
#include <vector>

#include "protocol/config.h"

namespace pplx::model {

struct Shape {
  std::uint32_t ranks = 16, node_size = 8;
  std::uint32_t tokens = 128;          // per rank
  std::uint32_t experts = 256, top_k = 8, hidden = 7168;
  Wire wire = Wire::FP8;               // a dispatch's; a combine returns bfloat16

  bool same_node(std::uint32_t a, std::uint32_t b) const { return a / node_size == b / node_size; }
};

Config config_of(const Shape& shape, std::uint32_t rank);

struct Routing {
  std::uint32_t ranks = 0;
  std::vector<std::uint32_t> rows;     // [source][target]: tokens, each once per rank that wants it
  std::vector<std::uint32_t> copies;   // [source][target]: choices, a token as often as the rank's experts want it

  std::uint32_t rows_to(std::uint32_t source, std::uint32_t target) const { return rows[std::size_t{source} * ranks + target]; }
  std::uint32_t copies_to(std::uint32_t source, std::uint32_t target) const { return copies[std::size_t{source} * ranks + target]; }
};

// Every token chooses top_k different experts, uniformly.
Routing random_routing(const Shape& shape, std::uint64_t seed);

}  // namespace pplx::model
