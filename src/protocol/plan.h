// The plan: a pure function from a step's expert ids to each row's destinations and each choice's place. Deterministic: everything
// is in (token, k) order. A relay stands for the ranks of its node. CUDA kernels compute the same numbers; this is their reference.
#pragma once

#include <algorithm>
#include <vector>

#include "replicas.h"

namespace pplx {

struct RowRef {
  std::uint32_t rank = 0;
  std::uint32_t row = 0;    // in the block between this rank and `rank`
};

struct Plan {
  static constexpr std::int32_t kDropped = -1;

  std::uint32_t tokens = 0;
  std::uint32_t top_k = 0;
  Slice slice;                                 // the tokens that this rank sends; choices of other tokens are dropped
  std::uint64_t ids_digest = 0;               // digest of all tokens' ids; without replicas 0
  std::vector<std::int32_t> ids;              // [tokens * top_k], kDropped where the choice goes nowhere
  std::vector<std::uint32_t> index;           // [tokens * top_k]: of this choice among those that go to its expert
  std::vector<std::uint32_t> counts;          // [num_experts]
  std::vector<std::uint32_t> rows_begin;      // [world + 1]: where each destination's rows start in row_token
  std::vector<std::uint32_t> row_token;       // tokens, by destination rank, ascending
  std::vector<std::uint32_t> token_begin;     // [tokens + 1]
  std::vector<RowRef> token_rows;             // indexed by token, ranks ascending: where its partial sums come back from

  std::uint32_t rows(std::uint32_t rank) const { return rows_begin[rank + 1] - rows_begin[rank]; }
};

// `ids` is [tokens, top_k], contiguous. A negative id drops the choice, an id twice is two choices, and choices of ranks
// that `alive` (null: all) names dead are dropped. Ids must be below num_experts. A replica plans what it sends itself. `rep`:
// the rank to which a rank's rows go (nodes.h); null: that rank itself.
template <typename Id>
Plan make_plan(const Config& c, const Id* ids, std::uint32_t tokens, const std::vector<bool>* alive = nullptr,
               const std::vector<std::uint32_t>* rep = nullptr) {
  const std::size_t choices = std::size_t{tokens} * c.top_k;
  const std::uint32_t per_rank = experts_per_rank(c);
  Plan plan;
  plan.tokens = tokens;
  plan.top_k = c.top_k;
  plan.slice = slice_of(c, c.rank, alive);
  plan.ids.resize(choices);
  plan.index.resize(choices);
  plan.counts.assign(c.num_experts, 0);
  plan.rows_begin.assign(c.world + 1, 0);
  plan.token_begin.resize(std::size_t{tokens} + 1);
  plan.token_rows.reserve(std::size_t{tokens} * std::min(c.top_k, c.world));

  std::vector<std::uint32_t> rows(c.world, 0);
  plan.token_begin[0] = 0;
  for (std::uint32_t t = 0; t < tokens; ++t) {
    std::uint32_t ranks[kMaxTopK];
    std::uint32_t distinct = 0;
    for (std::uint32_t k = 0; k < c.top_k; ++k) {
      const std::size_t at = std::size_t{t} * c.top_k + k;
      const std::int64_t id = ids[at];
      const std::uint32_t owner = id < 0 ? 0 : static_cast<std::uint32_t>(id) / per_rank;
      const std::uint32_t rank = rep != nullptr ? (*rep)[owner] : owner;
      if (id < 0 || !plan.slice.has(t) || (alive != nullptr && !(*alive)[owner])) {
        plan.ids[at] = Plan::kDropped;
        plan.index[at] = 0;
        continue;
      }
      plan.ids[at] = static_cast<std::int32_t>(id);
      plan.index[at] = plan.counts[static_cast<std::size_t>(id)]++;
      std::uint32_t place = distinct;
      while (place > 0 && ranks[place - 1] > rank) --place;
      if (place > 0 && ranks[place - 1] == rank) continue;
      for (std::uint32_t i = distinct; i > place; --i) ranks[i] = ranks[i - 1];
      ranks[place] = rank;
      ++distinct;
    }
    for (std::uint32_t i = 0; i < distinct; ++i) plan.token_rows.push_back({ranks[i], rows[ranks[i]]++});
    plan.token_begin[t + 1] = static_cast<std::uint32_t>(plan.token_rows.size());
  }
  for (std::uint32_t r = 0; r < c.world; ++r) plan.rows_begin[r + 1] = plan.rows_begin[r] + rows[r];
  if (c.replicas > 1)
    for (std::size_t i = 0; i < choices; ++i) plan.ids_digest += id_digest(static_cast<std::uint32_t>(i), ids[i]);
  plan.row_token.resize(plan.token_rows.size());
  for (std::uint32_t t = 0; t < tokens; ++t)
    for (std::uint32_t i = plan.token_begin[t]; i < plan.token_begin[t + 1]; ++i)
      plan.row_token[plan.rows_begin[plan.token_rows[i].rank] + plan.token_rows[i].row] = t;
  return plan;
}

}  // namespace pplx
