// How a blocked call ends: the rank that it blames, the time, and what it ignores.
#include "check.h"
#include "local_ranks.h"

using namespace pplx;
using namespace pplx::cpu;
using namespace pplx::test;

namespace {

// Rank 0 of two on one node, without the other one. The test is its clock.
struct Lonely {
  explicit Lonely(Clock clock) {
    config.num_experts = config.world = 2;
    config.top_k = 1;
    config.hidden = 64;
    config.max_tokens = 4;
    Memory memory;
    for (auto& heap : heaps) {
      heap = std::make_unique<std::uint64_t[]>(heap_of(config).bytes / 8);
      memory.peers.push_back(reinterpret_cast<char*>(heap.get()));
    }
    memory.own = memory.peers[0];
    exchange = std::make_unique<Exchange>(config, memory, 1, 10.0, std::move(clock));
  }

  // Dispatches no tokens, which waits for rank 1, and returns the failure.
  AbortReason dispatch(const Exchange::Interrupted& meanwhile) {
    try {
      Tokens in;
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

// A rank that was stopped for longer than its timeout blames no rank for that: it first reads what came meanwhile.
void stopped_for_a_while() {
  double time = 1;
  int reads = 0, asked = 0;
  Lonely rank([&] { return time += ++reads == 200 ? 100 : 0.01; });
  CHECK(rank.dispatch([&] {
    if (time > 100 && ++asked == 3) rank.exchange->failures().fail(kDeath, "");
  }) == AbortReason::Death);
  // But it does not wait for ever.
  rank.exchange->reset(2, {true, true});
  CHECK(rank.dispatch(nullptr) == AbortReason::Timeout);
}

// A failed write is mostly the first sign of a death, and the report of the death names the rank. Without a report the network is
// to blame.
void a_lost_network_may_be_a_death() {
  for (const bool died : {true, false}) {
    double time = 1;
    Lonely rank([&] { return time += 0.01; });
    double lost = 0;
    const AbortReason reason = rank.dispatch([&] {
      if (lost == 0) rank.exchange->failures().lost_network(kLost, ""), lost = time;
      if (died && time > lost + 0.1) rank.exchange->failures().fail(kDeath, "");
    });
    CHECK(reason == (died ? AbortReason::Death : AbortReason::Fabric));
    CHECK(time < lost + 1);
  }
}

// The cause may also be a peer that left: writes to it fail before the grace of its goodbye is over.
void a_lost_network_may_be_a_goodbye() {
  double time = 1, lost = 0;
  Lonely rank([&] { return time += 0.01; });
  const AbortReason reason = rank.dispatch([&] {
    if (lost == 0) rank.exchange->failures().lost_network(kLost, ""), lost = time;
    if (time > lost + 0.1) rank.exchange->failures().peer_left(1);
  });
  CHECK(reason == AbortReason::Closed);
  CHECK(time < lost + 1);
}

// A rank between two calls knows of its network for longer than the others have waited for it.
void a_lost_network_comes_before_what_it_led_to() {
  double time = 1;
  Lonely rank([&] { return time; });
  Failures& failures = rank.exchange->failures();
  failures.lost_network(kLost, "");
  time += 10;
  failures.fail({AbortReason::Timeout, Phase::CombineRecv, 1, 1, 1}, "");
  AbortReason reason = AbortReason::None;
  try {
    failures.raise();
  } catch (const PeerFailure& failure) {
    reason = failure.reason;
  }
  CHECK(reason == AbortReason::Fabric);
}

// A rank that was left out at a reset wakes up in an old step and aborts it: the survivors do not hear that.
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
      local.ranks[rank].exchange->failures().raise();
    } catch (const PeerFailure&) {
      return true;
    }
    return false;
  };
  const Abort late{AbortReason::Interrupted, Phase::DispatchRecv, 2, 2, 7};
  for (std::uint32_t rank : {0u, 1u}) local.ranks[rank].exchange->reset(2, {true, true, false});
  local.ranks[2].exchange->failures().fail(late, "");
  CHECK(aborted(2));
  CHECK(!aborted(0) && !aborted(1));
  // It left no trace that would hide the next one.
  local.ranks[1].exchange->failures().fail({AbortReason::Interrupted, Phase::CombineRecv, 1, 1, 1}, "");
  CHECK(aborted(0) && aborted(1));
}

// One of two peers has sent. The wait for the other is counted, and a rank's own part is no wait.
void waits_are_counted() {
  Config config;
  config.num_experts = config.world = 3;
  config.top_k = 1;
  config.hidden = 64;
  config.max_tokens = 4;
  std::vector<std::unique_ptr<std::uint64_t[]>> heaps;
  Memory memory;
  for (std::uint32_t r = 0; r < config.world; ++r) {
    heaps.push_back(std::make_unique<std::uint64_t[]>(heap_of(config).bytes / 8));
    memory.peers.push_back(reinterpret_cast<char*>(heaps.back().get()));
  }
  double time = 1;
  std::vector<std::unique_ptr<Exchange>> ranks;
  for (std::uint32_t r = 0; r < config.world; ++r) {
    config.rank = r;
    memory.own = memory.peers[r];
    ranks.push_back(std::make_unique<Exchange>(config, memory, 1, 100.0, [&] { return time += 0.001; }));
  }
  const auto send = [&](std::uint32_t rank) {
    Tokens in;
    in.plan = std::make_shared<const Plan>(make_plan(config, static_cast<const std::int32_t*>(nullptr), 0));
    return ranks[rank]->dispatch_send(in, nullptr);
  };
  const std::uint32_t step = send(0);
  send(1);
  const double begun = time;
  int asked = 0;
  ranks[0]->dispatch_recv(step, {}, [&] {
    if (++asked == 10) send(2);
  });
  const double waited = 1e-9 * static_cast<double>(ranks[0]->counters().peers[2].waited[0]);
  CHECK(waited > 0.1 && waited < time - begun);
  for (std::uint32_t peer : {0u, 1u}) CHECK_EQ(ranks[0]->counters().peers[peer].waited[0], 0u);
  for (std::uint32_t peer : {0u, 1u, 2u}) CHECK_EQ(ranks[0]->counters().peers[peer].waited[1], 0u);
  std::uint64_t received = 0;
  for (const std::uint64_t count : ranks[0]->counters().times[1].counts) received += count;
  CHECK_EQ(received, 1u);
}

void times_have_buckets() {
  CHECK_EQ(time_bucket(999), 0u);
  for (std::uint32_t i = 0; i + 1 < kTimeBuckets; ++i) {
    CHECK_EQ(time_bucket((1000ull << i) - 1), i);
    CHECK_EQ(time_bucket(1000ull << i), i + 1);
  }
  CHECK_EQ(time_bucket(~0ull), kTimeBuckets - 1);
}

}  // namespace

int main() {
  times_have_buckets();
  waits_are_counted();
  abort_of_one_left_out();
  stopped_for_a_while();
  a_lost_network_may_be_a_death();
  a_lost_network_may_be_a_goodbye();
  a_lost_network_comes_before_what_it_led_to();
}
