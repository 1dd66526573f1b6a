// A failure reaches the ranks that map each other's memory without control connections, through the abort word that every wait
// reads.
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../src/cpu/exchange.h"
#include "check.h"

using namespace pplx;
using namespace pplx::cpu;

namespace {

struct Node {
  explicit Node(std::uint32_t ranks) {
    Config config;
    config.world = config.num_experts = ranks;
    config.hidden = 8;
    config.max_rows = ranks;
    for (std::uint32_t r = 0; r < ranks; ++r) heaps.push_back(std::make_unique<std::uint64_t[]>(heap_of(config).bytes / 8 + 8));
    Memory memory;
    for (const auto& heap : heaps) memory.peers.push_back(reinterpret_cast<char*>(heap.get()));
    for (std::uint32_t r = 0; r < ranks; ++r) {
      config.rank = r;
      memory.own = memory.peers[r];
      const auto clock = [this] {
        if (time > 5 && meanwhile) std::exchange(meanwhile, {})();   // it is waiting by then
        return time += 0.1;
      };
      exchanges.push_back(std::make_unique<Exchange>(config, memory, 1, 10.0, clock));
    }
  }

  // Sends to all and waits for all, in vain. Returns the failure that ends it.
  PeerFailure wait_in_vain(std::uint32_t rank) {
    Exchange& e = *exchanges[rank];
    Tokens in;
    in.plan = std::make_shared<const Plan>(make_plan(e.config(), static_cast<const std::int32_t*>(nullptr), 0));
    std::int32_t counts[1], offsets[2], from[8], token[8];
    float weights[8];
    std::uint16_t x[64];
    DispatchOutput out;
    out.x = reinterpret_cast<char*>(x);
    out.counts = counts;
    out.offsets = offsets;
    out.weights = weights;
    out.src_rank = from;
    out.src_token = token;
    try {
      e.dispatch_recv(e.dispatch_send(in, {}), out, {});
    } catch (const PeerFailure& failure) {
      return failure;
    }
    check::fail(__FILE__, __LINE__, "nothing was raised");
  }

  PeerFailure heard(std::uint32_t rank) {
    try {
      exchanges[rank]->failures().raise();
    } catch (const PeerFailure& failure) {
      return failure;
    }
    check::fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + " heard nothing");
  }

  double time = 0;
  std::function<void()> meanwhile;   // happens once, while a rank waits
  std::vector<std::unique_ptr<std::uint64_t[]>> heaps;
  std::vector<std::unique_ptr<Exchange>> exchanges;
};

bool says(const PeerFailure& failure, const std::string& words) {
  return std::string(failure.what()).find(words) != std::string::npos;
}

// A rank that gives up tells all others, names both ranks, and keeps that failure.
void own_failure() {
  Node node(4);
  const PeerFailure first = node.wait_in_vain(0);
  CHECK(first.reason == AbortReason::Timeout);
  CHECK_EQ(first.peer, 1u);
  for (std::uint32_t r = 1; r < 4; ++r) {
    const PeerFailure heard = node.heard(r);
    CHECK(heard.reason == AbortReason::Timeout);
    CHECK_EQ(heard.peer, 1u);
    CHECK(heard.phase == Phase::DispatchRecv);
    CHECK_EQ(heard.step, 1u);
    CHECK(says(heard, "rank 0 gave up waiting for rank 1"));
  }
  CHECK(says(node.heard(0), "rank 0 gave up"));
}

// A rank passes on a failure unchanged: the messenger is not its origin.
void told_failure() {
  Node node(4);
  const Abort abort{AbortReason::Fabric, Phase::CombineRecv, 3, 0, 5};
  node.meanwhile = [&] { node.exchanges[2]->failures().fail(abort, "in more words than a word has"); };
  const PeerFailure told = node.wait_in_vain(2);
  CHECK_EQ(told.peer, 0u);
  CHECK(says(told, "in more words"));
  for (std::uint32_t r : {0u, 1u, 3u}) {
    const PeerFailure heard = node.heard(r);
    CHECK(heard.reason == AbortReason::Fabric && heard.phase == Phase::CombineRecv);
    CHECK_EQ(heard.peer, 0u);
    CHECK_EQ(heard.step, 5u);
    CHECK(says(heard, "rank 3 lost the network to rank 0"));
  }
}

// A damaged abort word never names a rank that does not exist as an error's peer.
void damaged_word() {
  Node node(4);
  Abort abort{AbortReason::Death, Phase::CombineRecv, 3000, 4, 5};
  store_release(node.heaps[1].get() + Heap::abort_at(1) / kWordBytes, abort_word(abort));
  const PeerFailure heard = node.heard(1);
  CHECK_EQ(heard.peer, kNoRank);
  CHECK(says(heard, "an unknown rank died"));
  abort.peer = 3;   // the last one that there is
  store_release(node.heaps[2].get() + Heap::abort_at(1) / kWordBytes, abort_word(abort));
  CHECK_EQ(node.heard(2).peer, 3u);
}

// The first failure wins.
void two_failures() {
  Node node(3);
  node.exchanges[1]->failures().fail({AbortReason::Death, Phase::None, 1, 0, 0}, "");
  node.exchanges[1]->failures().fail({AbortReason::Death, Phase::None, 1, 2, 0}, "");
  CHECK_EQ(node.heard(1).peer, 0u);
  node.wait_in_vain(2);
  CHECK_EQ(node.heard(1).peer, 0u);
}

// A rank that said goodbye is not waited for until the timeout, and not given up while its last blocks may still be in flight.
void goodbye() {
  Node node(3);
  node.meanwhile = [&] { node.exchanges[0]->failures().peer_left(1); };
  const PeerFailure left = node.wait_in_vain(0);
  CHECK(left.reason == AbortReason::Closed);
  CHECK_EQ(left.peer, 1u);
  CHECK(says(left, "rank 1 closed"));
  CHECK(node.time > 6 && node.time < 7);
}

// No rank writes to a dead rank's memory, and after a reset no trace of the abort is left.
void reset() {
  Node node(3);
  node.wait_in_vain(0);
  for (const std::uint32_t r : {0u, 1u, 2u}) node.exchanges[r]->reset(2, {true, false, true});
  for (const std::uint32_t r : {0u, 1u, 2u}) node.exchanges[r]->failures().raise();
  CHECK_EQ(node.wait_in_vain(0).peer, 2u);
  CHECK_EQ(node.heard(2).peer, 2u);
  node.exchanges[1]->failures().raise();
}

}  // namespace

int main() {
  own_failure();
  told_failure();
  damaged_word();
  two_failures();
  goodbye();
  reset();
}
