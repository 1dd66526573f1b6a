#include "routing.h"

#include <algorithm>
#include <random>

#include "protocol/plan.h"

namespace pplx::model {

Config config_of(const Shape& shape, std::uint32_t rank) {
  Config c;
  c.rank = rank;
  c.world = shape.ranks;
  c.num_experts = shape.experts;
  c.top_k = shape.top_k;
  c.hidden = shape.hidden;
  c.max_tokens = shape.tokens;
  c.wire = shape.wire;
  c.on_gpu = true;
  return c;
}

Routing random_routing(const Shape& shape, std::uint64_t seed) {
  Routing routing;
  routing.ranks = shape.ranks;
  routing.rows.reserve(std::size_t{shape.ranks} * shape.ranks);
  routing.copies.reserve(std::size_t{shape.ranks} * shape.ranks);
  std::mt19937_64 random(seed);
  std::vector<std::int32_t> ids(std::size_t{shape.tokens} * shape.top_k);
  for (std::uint32_t source = 0; source < shape.ranks; ++source) {
    for (std::uint32_t t = 0; t < shape.tokens; ++t) {
      const auto first = ids.begin() + static_cast<std::ptrdiff_t>(t) * shape.top_k;
      for (auto id = first; id != first + shape.top_k;) {
        *id = static_cast<std::int32_t>(random() % shape.experts);   // not a distribution of the standard's: those differ
        if (std::find(first, id, *id) == id) ++id;
      }
    }
    const Config c = config_of(shape, source);
    const Plan plan = make_plan(c, ids.data(), shape.tokens);
    for (std::uint32_t target = 0; target < shape.ranks; ++target) {
      std::uint32_t copies = 0;
      for (std::uint32_t e = 0; e < local_experts(c, target); ++e) copies += plan.counts[first_expert(c, target) + e];
      routing.rows.push_back(plan.rows(target));
      routing.copies.push_back(copies);
    }
  }
  return routing;
}

}  // namespace pplx::model
