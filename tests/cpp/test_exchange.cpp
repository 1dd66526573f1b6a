// The whole protocol, production phases and production proxy, in one thread and in random order, over a network that
// reorders, splits, repeats and refuses; every output compared with a reference written as plain loops.
#include <cmath>

#include "local_ranks.h"

using namespace pplx;
using namespace pplx::cpu;
using namespace pplx::test;

namespace {

struct Totals {
  std::uint64_t steps = 0, refused = 0, repeated = 0, reordered = 0, replayed = 0, dropped = 0, duplicates = 0;
};

struct StepData {
  std::uint32_t tokens = 0;
  std::vector<std::int32_t> ids;
  std::vector<float> weights, x, y, late_weights, tail, tail_back;
  std::shared_ptr<const Plan> plan;
};

// One rank's way through a step: the four phases in turn, then the next step.
struct Walker {
  std::uint32_t next_step_index = 0;      // into the script
  std::uint32_t step_index = 0;
  int stage = 0;                          // 0 not begun, 1..4 in that phase
  std::uint32_t step = 0;
  std::unique_ptr<PhaseRun> phase;
  std::shared_ptr<Received> received;
  std::vector<float> out_x, out_weights, expert_out, out_topk_weights, tail;
  std::vector<std::int32_t> counts, offsets, src_rank, src_token, topk_ids;
  std::int32_t num_rows = 0;
};

Config random_config(check::Random& random) {
  Config c;
  c.world = static_cast<std::uint32_t>(random.integer(1, 6));
  c.num_experts = static_cast<std::uint32_t>(random.integer(1, 20));
  c.top_k = static_cast<std::uint32_t>(random.integer(1, 6));
  c.hidden = static_cast<std::uint32_t>(random.integer(1, 40)) * 4;
  c.max_tokens = static_cast<std::uint32_t>(random.integer(1, 24));
  c.in_flight = 1u << random.integer(0, 2);
  c.align = random.chance(0.5) ? 1 : 8;
  c.dtype = Dtype::Float32;
  c.layout = static_cast<LayoutKind>(random.integer(0, 2));
  c.first_step = random.chance(0.3) ? 0u - 5u : 1u;
  const std::uint32_t most = c.world * c.max_tokens * c.top_k;
  c.max_rows = c.layout == LayoutKind::Compact ? c.world * c.max_tokens : most + experts_per_rank(c) * c.align;
  c.max_per_expert = most;
  return c;
}

class Script {
 public:
  Script(const Config& config, std::uint32_t steps, check::Random& random) : c_(config), released(steps), late(steps), tailed(steps) {
    for (std::uint32_t s = 0; s < steps; ++s) {
      released[s] = random.chance(0.1);
      late[s] = c_.layout != LayoutKind::Compact && random.chance(0.2);
      tailed[s] = random.chance(0.4);
      std::vector<StepData> data(c_.world);
      for (StepData& d : data) {
        d.tokens = random.chance(0.2) ? 0 : static_cast<std::uint32_t>(random.integer(0, c_.max_tokens));
        const bool one_hot = random.chance(0.1);
        const auto hot = static_cast<std::int32_t>(random.integer(0, c_.num_experts - 1));
        for (std::uint32_t i = 0; i < d.tokens * c_.top_k; ++i) {
          d.ids.push_back(random.chance(0.1) ? -1 : one_hot ? hot : static_cast<std::int32_t>(random.integer(0, c_.num_experts - 1)));
          d.weights.push_back(random.real(-1, 1));
          d.late_weights.push_back(random.real(-1, 1));
          d.tail.push_back(random.real(-1, 1));
        }
        for (std::uint32_t i = 0; i < d.tokens * c_.hidden; ++i) d.x.push_back(random.real(-4, 4));
      }
      steps_.push_back(std::move(data));
    }
  }

  StepData& at(std::uint32_t step, std::uint32_t rank) { return steps_[step][rank]; }

 private:
  Config c_;
  std::vector<std::vector<StepData>> steps_;

 public:
  std::vector<bool> released, late, tailed;
};

// What an expert does to a row: anything that depends on the expert and the value.
float expert(std::uint32_t global_expert, float value) { return value * 0.5f + static_cast<float>(global_expert); }

void check_dispatch(const Config& c, Script& script, std::uint32_t s, const Walker& w) {
  const std::uint32_t experts = local_experts(c, c.rank), first = first_expert(c, c.rank);
  std::uint64_t start = 0, compact = 0;
  for (std::uint32_t e = 0; e < experts; ++e) {
    std::uint32_t at = 0;
    if (c.layout == LayoutKind::Padded) start = std::uint64_t{e} * c.max_per_expert;
    for (std::uint32_t src = 0; src < c.world; ++src) {
      const StepData& d = script.at(s, src);
      for (std::uint32_t i = 0; i < d.ids.size(); ++i) {
        if (d.ids[i] != static_cast<std::int32_t>(first + e)) continue;
        const std::uint64_t row = start + at++;
        if (c.layout == LayoutKind::Compact) continue;
        CHECK_EQ(w.src_rank[row], static_cast<std::int32_t>(src));
        CHECK_EQ(w.src_token[row], static_cast<std::int32_t>(i / c.top_k));
        CHECK_EQ(w.out_weights[row], d.weights[i]);
        for (std::uint32_t h = 0; h < c.hidden; ++h)
          CHECK_EQ(w.out_x[row * c.hidden + h], d.x[std::size_t{i} / c.top_k * c.hidden + h]);
      }
    }
    CHECK_EQ(w.counts[e], static_cast<std::int32_t>(at));
    if (c.layout == LayoutKind::Ragged) {
      CHECK_EQ(w.offsets[e], static_cast<std::int32_t>(start));
      start = align_up(start + at, c.align);
    }
  }
  if (c.layout != LayoutKind::Compact) return;
  for (std::uint32_t src = 0; src < c.world; ++src) {
    const StepData& d = script.at(s, src);
    for (std::uint32_t t = 0; t < d.tokens; ++t) {
      bool here = false;
      for (std::uint32_t k = 0; k < c.top_k; ++k) {
        const std::int32_t id = d.ids[t * c.top_k + k] - static_cast<std::int32_t>(first);
        here |= d.ids[t * c.top_k + k] >= 0 && id >= 0 && id < static_cast<std::int32_t>(experts);
      }
      if (!here) continue;
      CHECK_EQ(w.src_rank[compact], static_cast<std::int32_t>(src));
      CHECK_EQ(w.src_token[compact], static_cast<std::int32_t>(t));
      for (std::uint32_t k = 0; k < c.top_k; ++k) {
        const std::int32_t id = d.ids[t * c.top_k + k] - static_cast<std::int32_t>(first);
        const bool local = d.ids[t * c.top_k + k] >= 0 && id >= 0 && id < static_cast<std::int32_t>(experts);
        CHECK_EQ(w.topk_ids[compact * c.top_k + k], local ? id : -1);
        CHECK_EQ(w.out_topk_weights[compact * c.top_k + k], local ? d.weights[t * c.top_k + k] : 0.0f);
      }
      ++compact;
    }
  }
  CHECK_EQ(w.num_rows, static_cast<std::int32_t>(compact));
}

void run_experts(const Config& c, Walker& w) {
  w.expert_out.assign(w.out_x.size(), std::nanf(""));
  const std::uint32_t first = first_expert(c, c.rank);
  if (c.layout == LayoutKind::Compact) {   // the caller sums over its experts
    for (std::int32_t row = 0; row < w.num_rows; ++row)
      for (std::uint32_t h = 0; h < c.hidden; ++h) {
        float sum = 0;
        for (std::uint32_t k = 0; k < c.top_k; ++k) {
          const std::int32_t id = w.topk_ids[row * c.top_k + k];
          if (id >= 0) sum += w.out_topk_weights[row * c.top_k + k] * expert(first + id, w.out_x[std::size_t(row) * c.hidden + h]);
        }
        w.expert_out[std::size_t(row) * c.hidden + h] = sum;
      }
    return;
  }
  for (std::uint32_t e = 0; e < local_experts(c, c.rank); ++e) {
    const std::uint64_t start = c.layout == LayoutKind::Padded ? std::uint64_t{e} * c.max_per_expert : w.offsets[e];
    for (std::uint64_t i = start * c.hidden; i < (start + w.counts[e]) * c.hidden; ++i) w.expert_out[i] = expert(first + e, w.out_x[i]);
  }
}

// The number of the choice that each received row is for; what must not travel is NaN.
void attach_tail(const Config& c, Script& script, std::uint32_t s, Walker& w) {
  const bool compact = c.layout == LayoutKind::Compact;
  w.tail.assign(compact ? w.topk_ids.size() : w.out_weights.size(), std::nanf(""));
  const std::uint32_t experts = local_experts(c, c.rank), first = first_expert(c, c.rank);
  if (compact) {
    for (std::size_t i = 0; i < std::size_t(w.num_rows) * c.top_k; ++i) {
      const std::size_t row = i / c.top_k;
      if (w.topk_ids[i] < 0) continue;
      const auto source = static_cast<std::uint32_t>(w.src_rank[row]);
      w.tail[i] = script.at(s, source).tail[static_cast<std::size_t>(w.src_token[row]) * c.top_k + i % c.top_k];
    }
    return;
  }
  for (std::uint32_t e = 0; e < experts; ++e) {
    std::uint64_t row = c.layout == LayoutKind::Padded ? std::uint64_t{e} * c.max_per_expert : static_cast<std::uint64_t>(w.offsets[e]);
    for (std::uint32_t src = 0; src < c.world; ++src) {
      const StepData& d = script.at(s, src);
      for (std::size_t i = 0; i < d.ids.size(); ++i)
        if (d.ids[i] == static_cast<std::int32_t>(first + e)) w.tail[row++] = d.tail[i];
    }
  }
}

void check_tail(Script& script, std::uint32_t s, std::uint32_t rank) {
  const StepData& d = script.at(s, rank);
  for (std::size_t i = 0; i < d.ids.size(); ++i) CHECK_EQ(d.tail_back[i], d.ids[i] < 0 ? 0.0f : d.tail[i]);
}

void check_combine(const Config& c, Script& script, std::uint32_t s) {
  const StepData& d = script.at(s, c.rank);
  const std::vector<float>& weights = script.late[s] ? d.late_weights : d.weights;
  for (std::uint32_t t = 0; t < d.tokens; ++t)
    for (std::uint32_t h = 0; h < c.hidden; ++h) {
      float total = 0;
      for (std::uint32_t rank = 0; rank < c.world; ++rank) {
        float part = 0;
        bool any = false;
        for (std::uint32_t k = 0; k < c.top_k; ++k) {
          const std::int32_t id = d.ids[t * c.top_k + k];
          if (id < 0 || rank_of_expert(c, static_cast<std::uint32_t>(id)) != rank) continue;
          part += weights[t * c.top_k + k] * expert(static_cast<std::uint32_t>(id), d.x[std::size_t{t} * c.hidden + h]);
          any = true;
        }
        if (any) total += part;
      }
      CHECK_EQ(d.y[std::size_t{t} * c.hidden + h], total);
    }
}

void poison(Walker& w, const Config& c) {
  const std::size_t rows = c.layout == LayoutKind::Padded ? std::size_t{experts_per_rank(c)} * c.max_per_expert : c.max_rows;
  w.out_x.assign(rows * c.hidden, std::nanf(""));
  w.out_weights.assign(rows, std::nanf(""));
  w.src_rank.assign(rows, -77);
  w.src_token.assign(rows, -77);
  w.topk_ids.assign(rows * c.top_k, -77);
  w.out_topk_weights.assign(rows * c.top_k, std::nanf(""));
  w.counts.assign(experts_per_rank(c), -77);
  w.offsets.assign(experts_per_rank(c) + 1, -77);
  w.num_rows = -77;
}

// Advances one phase of one step of one rank. True when the step is closed.
bool advance(LocalRank& rank, Walker& w, Script& script) {
  const Config& c = rank.config;
  StepData& d = script.at(w.step_index, c.rank);
  Exchange& e = *rank.exchange;
  if (!w.phase) {
    switch (w.stage) {
      case 0: {
        d.plan = std::make_shared<const Plan>(make_plan(c, d.ids.data(), d.tokens));
        DispatchInput in;
        in.plan = d.plan;
        in.x = {reinterpret_cast<const char*>(d.x.data()), std::uint64_t{c.hidden} * 4};
        in.weights = d.weights.data();
        in.keep_own_rows = w.step_index % 2 == 0;
        w.phase = e.start_dispatch_send(in, &w.step);
        break;
      }
      case 1: {
        poison(w, c);
        DispatchOutput out;
        out.x = reinterpret_cast<char*>(w.out_x.data());
        out.counts = w.counts.data();
        out.offsets = w.offsets.data();
        out.weights = w.out_weights.data();
        out.src_rank = w.src_rank.data();
        out.src_token = w.src_token.data();
        out.topk_ids = w.topk_ids.data();
        out.topk_weights = w.out_topk_weights.data();
        out.num_rows = &w.num_rows;
        w.received = std::make_shared<Received>();
        w.phase = e.start_dispatch_recv(w.step, out, w.received);
        break;
      }
      case 2: {
        CombineInput in;
        in.received = w.received;
        in.expert_out = {reinterpret_cast<const char*>(w.expert_out.data()), std::uint64_t{c.hidden} * 4};
        in.release = script.released[w.step_index];
        if (!in.release && script.late[w.step_index]) {
          in.uses_weights = true;
          in.weights = d.late_weights.data();
          in.plan = d.plan;
        }
        if (!in.release && script.tailed[w.step_index]) {
          attach_tail(c, script, w.step_index, w);
          in.has_tail = true;
          in.tail = w.tail.data();
        }
        w.phase = e.start_combine_send(w.step, in);
        break;
      }
      case 3: {
        d.y.assign(std::size_t{d.tokens} * c.hidden, std::nanf(""));
        d.tail_back.assign(d.ids.size(), std::nanf(""));
        const CombineOutput out{reinterpret_cast<char*>(d.y.data()), std::uint64_t{c.hidden} * 4, false, d.tail_back.data()};
        w.phase = e.start_combine_recv(w.step, out);
        break;
      }
    }
  }
  if (!w.phase->poll()) return false;
  w.phase.reset();
  switch (w.stage++) {
    case 1:
      e.finish_dispatch_recv(w.step, w.received);
      check_dispatch(c, script, w.step_index, w);
      run_experts(c, w);
      break;
    case 2: e.finish_combine_send(w.step); break;
    case 3:
      e.finish_combine_recv(w.step);
      if (script.released[w.step_index]) return true;
      check_combine(c, script, w.step_index);
      if (script.tailed[w.step_index]) check_tail(script, w.step_index, c.rank);
      return true;
    default: break;
  }
  return false;
}

void simulate(std::uint64_t seed, Totals& totals) {
  check::Random random(seed);
  const Config config = random_config(random);
  const auto node_size = static_cast<std::uint32_t>(random.integer(1, config.world));
  const auto endpoints = static_cast<int>(random.integer(1, 3));
  LocalRanks local(config, node_size, endpoints, static_cast<std::uint64_t>(random.integer(64, 4096)), random.bits());
  const std::uint32_t steps = 12;
  Script script(config, steps, random);

  std::vector<std::vector<std::unique_ptr<Walker>>> walkers(config.world);   // phases keep addresses of what they fill
  std::vector<std::uint32_t> begun(config.world, 0), closed(config.world, 0);
  for (std::uint64_t idle = 0;;) {
    bool all = true;
    for (std::uint32_t n : closed) all &= n == steps;
    if (all) break;
    CHECK(++idle < 5000000);   // a deadlock would end here
    const auto r = static_cast<std::uint32_t>(random.integer(0, config.world - 1));
    LocalRank& rank = local.ranks[r];
    if (rank.proxy && random.chance(0.6)) rank.proxy->step();
    // Up to in_flight steps are open; a new one begins when its turn has come.
    if (walkers[r].size() < config.in_flight && begun[r] < steps && begun[r] < closed[r] + config.in_flight && random.chance(0.3)) {
      bool turn = true;   // sends are one sequence, and the set must be free
      for (const auto& w : walkers[r]) turn &= w->stage > 0 && set_of(config, w->step) != set_of(config, rank.exchange->next_step());
      if (turn) {
        walkers[r].push_back(std::make_unique<Walker>());
        walkers[r].back()->step_index = begun[r]++;
      }
    }
    if (walkers[r].empty()) continue;
    const auto which = static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(walkers[r].size()) - 1));
    if (advance(rank, *walkers[r][which], script)) {
      walkers[r].erase(walkers[r].begin() + static_cast<long>(which));
      ++closed[r];
    }
  }
  totals.steps += steps;
  totals.refused += local.net.refused;
  totals.repeated += local.net.repeated;
  totals.reordered += local.net.reordered;
  totals.replayed += local.net.replayed;
  for (const LocalRank& rank : local.ranks) {
    CHECK(rank.failures.empty());
    if (!rank.proxy) continue;
    totals.dropped += rank.proxy->stats().dropped;
    totals.duplicates += rank.proxy->stats().duplicates;
  }
}

// Rank 0 of two on one node, alone in the world, whose clock the test is.
struct Lonely {
  explicit Lonely(Exchange::Clock clock) {
    config.num_experts = config.world = 2;
    config.top_k = 1;
    config.hidden = 64;
    config.max_tokens = 4;
    Exchange::Memory memory;
    for (auto& heap : heaps) {
      heap = std::make_unique<std::uint64_t[]>(heap_of(config).bytes / 8);
      memory.peers.push_back(reinterpret_cast<char*>(heap.get()));
    }
    memory.own = memory.peers[0];
    exchange = std::make_unique<Exchange>(config, memory, 1, 10.0, std::move(clock));
  }

  // Why a dispatch without tokens failed, which waits for rank 1.
  AbortReason dispatch(const Exchange::Interrupted& meanwhile) {
    try {
      DispatchInput in;
      in.plan = std::make_shared<const Plan>(make_plan(config, static_cast<const std::int32_t*>(nullptr), 0));
      exchange->dispatch_recv(exchange->dispatch_send(in, nullptr), {}, meanwhile);
    } catch (const PeerFailure& failure) {
      CHECK_EQ(failure.peer, 1u);
      return failure.reason;
    }
    return AbortReason::None;
  }

  Config config;
  std::unique_ptr<std::uint64_t[]> heaps[2];
  std::unique_ptr<Exchange> exchange;
};

const Abort kDeath{AbortReason::Death, Phase::None, 1, 1, 0}, kLost{AbortReason::Fabric, Phase::DispatchRecv, 0, 1, 1};

// A rank that was stopped for longer than its timeout blames nobody for that: it first hears what was said meanwhile.
void stopped_for_a_while() {
  double time = 1;
  int reads = 0, asked = 0;
  Lonely rank([&] { return time += ++reads == 200 ? 100 : 0.01; });
  CHECK(rank.dispatch([&] {
    if (time > 100 && ++asked == 3) rank.exchange->fail(kDeath, "");
  }) == AbortReason::Death);
  // It does not wait for ever either.
  rank.exchange->reset(2, {true, true});
  CHECK(rank.dispatch(nullptr) == AbortReason::Timeout);
}

// A write that fails is mostly a death's first sign, and the death names its rank. If none is told, the network is to blame.
void a_lost_network_may_be_a_death() {
  for (const bool died : {true, false}) {
    double time = 1;
    Lonely rank([&] { return time += 0.01; });
    double lost = 0;
    const AbortReason reason = rank.dispatch([&] {
      if (lost == 0) rank.exchange->lost_network(kLost, ""), lost = time;
      if (died && time > lost + 0.1) rank.exchange->fail(kDeath, "");
    });
    CHECK(reason == (died ? AbortReason::Death : AbortReason::Fabric));
    CHECK(time < lost + 1);
  }
}

// Who was left out at a reset wakes up in an old step and aborts it: nobody who is left hears that.
void abort_of_one_left_out() {
  Config config;
  config.world = 3;
  config.num_experts = 6;
  config.top_k = 2;
  config.hidden = 64;
  config.max_tokens = 4;
  LocalRanks local(config, 3, 1, 1024, 1);
  const auto aborted = [&](std::uint32_t rank) {
    try {
      local.ranks[rank].exchange->raise_failure();
    } catch (const PeerFailure&) {
      return true;
    }
    return false;
  };
  const Abort late{AbortReason::Interrupted, Phase::DispatchRecv, 2, 2, 7};
  for (std::uint32_t rank : {0u, 1u}) local.ranks[rank].exchange->reset(2, {true, true, false});
  local.ranks[2].exchange->fail(late, "");
  CHECK(aborted(2));
  CHECK(!aborted(0) && !aborted(1));
  // It left no trace that would hide the next one.
  local.ranks[1].exchange->fail({AbortReason::Interrupted, Phase::CombineRecv, 1, 1, 1}, "");
  CHECK(aborted(0) && aborted(1));
}

}  // namespace

int main() {
  abort_of_one_left_out();
  stopped_for_a_while();
  a_lost_network_may_be_a_death();
  const std::uint64_t seed = check::seed();
  Totals totals;
  for (std::uint64_t i = 0; i < 400; ++i) {
    if (std::getenv("PPLX_TRACE") != nullptr) std::printf("case %llu\n", static_cast<unsigned long long>(i)), std::fflush(stdout);
    simulate(seed * 1000003 + i, totals);
  }
  std::printf("%llu steps; refused %llu, repeated %llu, reordered %llu, replayed %llu; dropped %llu, duplicates %llu\n",
              static_cast<unsigned long long>(totals.steps), static_cast<unsigned long long>(totals.refused),
              static_cast<unsigned long long>(totals.repeated), static_cast<unsigned long long>(totals.reordered),
              static_cast<unsigned long long>(totals.replayed), static_cast<unsigned long long>(totals.dropped),
              static_cast<unsigned long long>(totals.duplicates));
  CHECK(totals.refused > 100 && totals.repeated > 100 && totals.reordered > 100 && totals.replayed > 100);
  CHECK(totals.dropped > 100 && totals.duplicates > 100);
}
