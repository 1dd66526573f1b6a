#include "routing.h"

#include <algorithm>
#include <functional>
#include <random>
#include <utility>

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

namespace {

// Not distributions of the standard's: those differ.
void choose(const Shape& shape, std::mt19937_64& random, std::int32_t* ids) {
  if (shape.groups == 0) {
    for (std::int32_t* id = ids; id != ids + shape.top_k;) {
      *id = static_cast<std::int32_t>(random() % shape.experts);
      if (std::find(ids, id, *id) == id) ++id;
    }
    return;
  }
  const std::uint32_t size = shape.experts / kGroups;
  std::vector<double> scores(shape.experts);
  for (double& score : scores) score = static_cast<double>(random() >> 11);
  std::pair<double, std::uint32_t> best[kGroups];   // with their signs changed, as sort ascends
  for (std::uint32_t group = 0; group < kGroups; ++group) {
    std::vector<double> of(scores.begin() + group * size, scores.begin() + (group + 1) * size);
    std::partial_sort(of.begin(), of.begin() + 2, of.end(), std::greater<>());
    best[group] = {-of[0] - of[1], group};
  }
  std::sort(best, best + kGroups);
  std::vector<std::int32_t> experts;
  for (std::uint32_t i = 0; i < shape.groups; ++i)
    for (std::uint32_t e = 0; e < size; ++e) experts.push_back(static_cast<std::int32_t>(best[i].second * size + e));
  std::partial_sort(experts.begin(), experts.begin() + shape.top_k, experts.end(),
                    [&](std::int32_t a, std::int32_t b) { return scores[a] > scores[b]; });
  std::copy_n(experts.begin(), shape.top_k, ids);
}

}  // namespace

Routing random_routing(const Shape& shape, std::uint64_t seed) {
  Routing routing;
  routing.ranks = shape.ranks;
  routing.nodes = shape.nodes();
  routing.rows.reserve(std::size_t{shape.ranks} * shape.ranks);
  routing.copies.reserve(std::size_t{shape.ranks} * shape.ranks);
  routing.node_rows.resize(std::size_t{shape.ranks} * shape.nodes());
  std::mt19937_64 random(seed);
  for (std::uint32_t source = 0; source < shape.ranks; ++source) {
    std::vector<std::int32_t> ids(std::size_t{shape.tokens} * shape.top_k);
    for (std::uint32_t t = 0; t < shape.tokens; ++t) choose(shape, random, &ids[std::size_t{t} * shape.top_k]);
    const Config c = config_of(shape, source);
    const Plan plan = make_plan(c, ids.data(), shape.tokens);
    for (std::uint32_t target = 0; target < shape.ranks; ++target) {
      std::uint32_t copies = 0;
      for (std::uint32_t e = 0; e < local_experts(c, target); ++e) copies += plan.counts[first_expert(c, target) + e];
      routing.rows.push_back(plan.rows(target));
      routing.copies.push_back(copies);
    }
    for (std::uint32_t t = 0; t < shape.tokens; ++t)
      for (std::uint32_t i = plan.token_begin[t]; i < plan.token_begin[t + 1]; ++i) {
        const std::uint32_t node = shape.node_of(plan.token_rows[i].rank);   // ascending
        if (i == plan.token_begin[t] || node != shape.node_of(plan.token_rows[i - 1].rank))
          ++routing.node_rows[std::size_t{source} * shape.nodes() + node];
      }
    routing.ids.push_back(std::move(ids));
  }
  return routing;
}

}  // namespace pplx::model
