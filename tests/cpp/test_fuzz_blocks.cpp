// Blocks are checked before they are used: they are damaged between the phases, and a rank either raises a PeerFailure or finishes
// the step. Its outputs are exactly as large as the configuration says, so that a sanitizer sees any byte outside.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "local_ranks.h"

using namespace pplx;
using namespace pplx::cpu;
using namespace pplx::test;

namespace {

struct Totals {
  std::uint64_t raised = 0, finished = 0;
};

// With relays there are two nodes, or three, of which the last one may be smaller.
Config random_config(check::Random& random) {
  Config c;
  c.world = static_cast<std::uint32_t>(random.integer(2, 4));
  if (random.chance(0.4)) {
    c.node_ranks = static_cast<std::uint32_t>(random.integer(2, 3));
    c.world = static_cast<std::uint32_t>(random.integer(c.node_ranks + 1, 6));
  }
  c.num_experts = static_cast<std::uint32_t>(random.integer(1, 12));
  c.top_k = static_cast<std::uint32_t>(random.integer(1, 5));
  c.hidden = static_cast<std::uint32_t>(random.integer(1, 20)) * 8;
  c.max_tokens = static_cast<std::uint32_t>(random.integer(1, 12));
  c.align = random.chance(0.5) ? 1 : 8;
  c.dtype = static_cast<Dtype>(random.integer(0, 2));
  c.wire = random.chance(0.4) ? Wire::Native : static_cast<Wire>(random.integer(1, 3));
  c.layout = static_cast<LayoutKind>(random.integer(0, 2));
  c.zero_pad = random.chance(0.5);
  const std::uint32_t most = c.world * c.max_tokens * c.top_k;
  // Sometimes too small: an overflow by damage is an overflow like any other.
  const auto some = static_cast<std::uint32_t>(random.integer(1, most));
  c.max_rows = random.chance(0.5)                  ? some
               : c.layout == LayoutKind::Compact ? c.world * c.max_tokens
                                                 : most + experts_per_rank(c) * c.align;
  c.max_per_expert = random.chance(0.5) ? some : most;
  return c;
}

struct Rank {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<char> x, out_x, expert_out, y;
  std::vector<char> out_scales;
  std::vector<float> out_weights, topk_weights, tail, tail_out;
  std::vector<std::int32_t> counts, offsets, src_rank, src_token, topk_ids;
  std::int32_t num_rows = 0;
  std::uint32_t tokens = 0, step = 0;
  std::shared_ptr<const Plan> plan;
  std::shared_ptr<Received> received;
  bool failed = false;
};

constexpr std::uint32_t kExtremes[] = {0, 1, 2, 0x7f, 0xff, 0xffff, 0x100000, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff};

// Changes some words of a block: to anything, to an extreme, or by a little.
void damage(char* block, std::uint64_t bytes, std::uint32_t interesting, check::Random& random) {
  for (std::int64_t n = random.integer(1, 4); n > 0; --n) {
    // The header and its counts are where most of the meaning is.
    const std::uint64_t most = random.chance(0.5) ? std::min<std::uint64_t>(bytes, interesting) : bytes;
    const auto at = static_cast<std::uint64_t>(random.integer(0, static_cast<std::int64_t>(most) - 4)) & ~std::uint64_t{3};
    std::uint32_t word;
    std::memcpy(&word, block + at, 4);
    switch (random.integer(0, 3)) {
      case 0: word = static_cast<std::uint32_t>(random.bits()); break;
      case 1: word = kExtremes[random.integer(0, 10)]; break;
      case 2: word += static_cast<std::uint32_t>(random.integer(-2, 2)); break;
      default: word ^= 1u << random.integer(0, 31);
    }
    std::memcpy(block + at, &word, 4);
  }
}

// With relays blocks of other nodes lie in their areas.
void damage_blocks(LocalRank& rank, Op op, check::Random& random) {
  const Blocks& b = rank.exchange->blocks();
  for (std::uint32_t source : b.rails().sources)
    for (std::uint32_t mate : b.rails().mates)
      if (op == Op::Combine && mate != rank.config.rank && random.chance(0.3))
        damage(b.relay_slot(0, source, mate), combine_block(b.config()).bytes(b.config().max_tokens), sizeof(BlockHeader), random);
  const Config& c = rank.config;
  const BlockLayout layout = block_layout(c, op);
  for (std::uint32_t peer = 0; peer < c.world; ++peer) {
    if (peer == c.rank || random.chance(0.5) || (op != Op::Combine && b.rails().holder[peer] != c.rank)) continue;
    damage(rank.exchange->blocks().own_slot(0, op, peer), layout.bytes(c.max_tokens), layout.header_bytes + layout.row_bytes,
           random);
  }
}

// Polls to the end, together with the network. False: it raised.
bool finish(LocalRanks& local, PhaseRun& phase, Totals& totals) {
  try {
    for (int tries = 0; !phase.poll(); ++tries) {
      CHECK(tries < 100000);
      for (LocalRank& r : local.ranks)
        if (r.proxy) r.proxy->step();
    }
    ++totals.finished;
    return true;
  } catch (const PeerFailure& failure) {
    ++totals.raised;
    CHECK(failure.peer < local.ranks.size());
    CHECK(std::string(failure.what()).find("rank " + std::to_string(failure.peer)) != std::string::npos);
    return false;
  }
}

DispatchOutput prepare(const Config& c, Rank& r) {
  const std::size_t rows = c.layout == LayoutKind::Padded ? std::size_t{local_experts(c, c.rank)} * c.max_per_expert : c.max_rows;
  const std::size_t experts = local_experts(c, c.rank);
  r.out_x.assign(rows * payload_bytes(c), 0);
  r.out_scales.assign(rows * scale_bytes(c), 0);
  r.tail.assign(c.layout == LayoutKind::Compact ? rows * c.top_k : rows, 0);
  r.out_weights.assign(rows, 0);
  r.src_rank.assign(rows, 0);
  r.src_token.assign(rows, 0);
  r.topk_ids.assign(rows * c.top_k, -1);
  r.topk_weights.assign(rows * c.top_k, 0);
  r.counts.assign(experts, 0);
  r.offsets.assign(experts + 1, 0);
  r.expert_out.assign(rows * c.hidden * dtype_bytes(c.dtype), 0);
  DispatchOutput out;
  out.x = r.out_x.data();
  out.scales = r.out_scales.data();
  out.scale.row = scale_bytes(c);
  out.scale.scale = scale_bytes_each(c.wire);
  out.counts = r.counts.data();
  out.offsets = r.offsets.data();
  out.weights = r.out_weights.data();
  out.src_rank = r.src_rank.data();
  out.src_token = r.src_token.data();
  out.topk_ids = r.topk_ids.data();
  out.topk_weights = r.topk_weights.data();
  out.num_rows = &r.num_rows;
  return out;
}

void one_case(std::uint64_t seed, Totals& totals) {
  check::Random random(seed);
  const Config config = random_config(random);
  const std::uint32_t node_size = config.node_ranks != 0 ? config.node_ranks : random.chance(0.5) ? config.world : 1;
  LocalRanks local(config, node_size, 2, 256, random.bits());
  std::vector<Rank> ranks(config.world);
  const Op target = Op(random.integer(0, 2));
  const bool late = target == Op::Weights && config.layout != LayoutKind::Compact;
  const bool tail = random.chance(0.5);

  for (LocalRank& at : local.ranks) {
    Rank& r = ranks[at.config.rank];
    r.tokens = static_cast<std::uint32_t>(random.integer(0, config.max_tokens));
    for (std::uint32_t i = 0; i < r.tokens * config.top_k; ++i) {
      r.ids.push_back(static_cast<std::int32_t>(random.integer(-1, config.num_experts - 1)));
      r.weights.push_back(random.real(-1, 1));
    }
    r.x.assign(std::size_t{r.tokens} * config.hidden * dtype_bytes(config.dtype), 1);
    r.plan = std::make_shared<const Plan>(
        make_plan(at.config, r.ids.data(), r.tokens, nullptr, &at.exchange->blocks().rails().rep));
    Tokens in;
    in.plan = r.plan;
    in.x = {r.x.data(), std::uint64_t{config.hidden} * dtype_bytes(config.dtype)};
    in.weights = r.weights.data();
    const auto phase = at.exchange->start_dispatch_send(in, &r.step);
    CHECK(finish(local, *phase, totals));
  }
  // Everything is in, so nothing that follows waits for a rank that gave up.
  local.run_network();
  if (target == Op::Dispatch)
    for (LocalRank& at : local.ranks) damage_blocks(at, Op::Dispatch, random);

  for (LocalRank& at : local.ranks) {
    Rank& r = ranks[at.config.rank];
    r.received = std::make_shared<Received>();
    const auto phase = at.exchange->start_dispatch_recv(r.step, prepare(at.config, r), r.received);
    r.failed = !finish(local, *phase, totals);
    if (!r.failed) at.exchange->finish_dispatch_recv(r.step, r.received);
  }
  // A rank that raised sends nothing more, and the others would wait for it.
  for (const Rank& r : ranks)
    if (r.failed) return;
  std::vector<std::unique_ptr<PhaseRun>> sends(config.world);
  for (LocalRank& at : local.ranks) {
    Rank& r = ranks[at.config.rank];
    ExpertOutputs in;
    in.received = r.received;
    in.expert_out = {r.expert_out.data(), std::uint64_t{config.hidden} * dtype_bytes(config.dtype)};
    in.uses_weights = late;
    in.has_tail = tail;
    in.tail = r.tail.data();
    in.weights = r.weights.data();
    in.plan = r.plan;
    sends[at.config.rank] = at.exchange->start_combine_send(r.step, in);
  }
  bool any_failed = false;
  for (LocalRank& at : local.ranks) {
    Rank& r = ranks[at.config.rank];
    if (late) break;
    r.failed = !finish(local, *sends[at.config.rank], totals);
    any_failed |= r.failed;
    if (!r.failed) at.exchange->finish_combine_send(r.step);
  }
  if (late) {
    // Polled in turns; the damage falls between the first turn, in which weights are written, and the rest.
    for (std::uint32_t turn = 0; turn < 2000; ++turn) {
      bool all = true;
      for (LocalRank& at : local.ranks) {
        Rank& r = ranks[at.config.rank];
        std::unique_ptr<PhaseRun>& send = sends[at.config.rank];
        if (at.proxy) at.proxy->step();
        if (!send || r.failed) continue;
        if (turn == 1) damage_blocks(at, Op::Weights, random);
        try {
          if (send->poll()) {
            send.reset();
            at.exchange->finish_combine_send(r.step);
            ++totals.finished;
          } else {
            all = false;
          }
        } catch (const PeerFailure&) {
          r.failed = any_failed = true;
          ++totals.raised;
        }
      }
      if (all) break;
    }
  }
  if (any_failed) return;
  local.run_network();
  if (target == Op::Combine)
    for (LocalRank& at : local.ranks) damage_blocks(at, Op::Combine, random);
  for (LocalRank& at : local.ranks) {
    Rank& r = ranks[at.config.rank];
    r.y.assign(std::size_t{r.tokens} * config.hidden * dtype_bytes(config.dtype), 0);
    r.tail_out.assign(std::size_t{r.tokens} * config.top_k, 0);
    const Result out{r.y.data(), std::uint64_t{config.hidden} * dtype_bytes(config.dtype), false,
                            tail ? r.tail_out.data() : nullptr};
    sends[at.config.rank] = at.exchange->start_combine_recv(r.step, out);
  }
  // In turns, as ranks answer for each other; one that raised sends no more answers.
  for (int tries = 0; !any_failed; ++tries) {
    CHECK(tries < 100000);
    bool all = true;
    for (LocalRank& at : local.ranks) {
      std::unique_ptr<PhaseRun>& add = sends[at.config.rank];
      if (at.proxy) at.proxy->step();
      try {
        if (add && !add->poll()) {
          all = false;
        } else if (add) {
          add.reset();
          at.exchange->finish_combine_recv(ranks[at.config.rank].step);
          ++totals.finished;
        }
      } catch (const PeerFailure& failure) {
        any_failed = true;
        ++totals.raised;
        CHECK(failure.peer < config.world);
      }
    }
    if (all) break;
  }
}

}  // namespace

int main() {
  const std::uint64_t seed = check::seed();
  Totals totals;
  for (std::uint64_t i = 0; i < 6000; ++i) one_case(seed * 1000003 + i, totals);
  std::printf("%llu phases raised, %llu finished\n", static_cast<unsigned long long>(totals.raised),
              static_cast<unsigned long long>(totals.finished));
  CHECK(totals.raised > 1000 && totals.finished > 1000);
}
