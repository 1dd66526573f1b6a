// Rank 0's proxy over a fabric whose every answer the test chooses.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../../proxy/proxy.h"
#include "check.h"
#include "plain_fabric.h"

namespace pplx::test {

class ScriptedFabric final : public PlainFabric {
 public:
  explicit ScriptedFabric(int endpoints) : endpoints_(endpoints) {}

  int endpoints() const override { return endpoints_; }
  std::string describe_error(const Completion& c) const override { return "error " + std::to_string(c.error); }

  Post write(const Write& w) override {
    attempts.push_back(w);
    if (broken.count(w.peer) != 0) throw FabricError("no route to peer " + std::to_string(w.peer));
    if (busy.count(w.peer) != 0) {
      ++refused;
      return Post::Again;
    }
    writes.push_back(w);
    return Post::Accepted;
  }
  int poll(Completion* out, int capacity) override {
    int n = 0;
    for (; n < capacity && !completions.empty(); completions.pop_front()) out[n++] = completions.front();
    return n;
  }

  void arrive(std::uint32_t immediate) {
    Completion c;
    c.kind = Completion::Kind::Arrived;
    c.immediate = immediate;
    completions.push_back(c);
  }
  void finish(const Write& w, int error = 0) {
    Completion c;
    c.kind = error == 0 ? Completion::Kind::Sent : Completion::Kind::Failed;
    c.context = w.context;
    c.error = error;
    c.endpoint = w.endpoint;
    completions.push_back(c);
  }

  std::set<int> busy, broken;
  std::vector<Write> writes, attempts;
  std::deque<Completion> completions;
  int refused = 0;

 private:
  int endpoints_;
};

inline constexpr std::uint64_t kShardBytes = 1024;
inline constexpr std::uint64_t kBase = 0x1000000;   // base of every peer's heap

// Rank 0 of five. Rank 1 is on its node; 2, 3 and 4 are remote.
struct World {
  explicit World(int endpoints = 4, std::uint32_t first_step = 1, std::uint32_t in_flight = 2)
      : fabric(endpoints), proxy(fabric, kShardBytes, &stopped) {
    config.world = 5;
    config.num_experts = 10;
    config.top_k = 2;
    config.hidden = 64;
    config.max_tokens = 64;
    config.in_flight = in_flight;
    config.first_step = first_step;
    config.remote_peers = 3;
    attach(config);
  }

  void attach(const Config& c) {
    config = c;
    heap = heap_of(c);
    memory = std::make_unique<std::uint64_t[]>(heap.bytes / 8);
    ProxyObject o;
    o.config = c;
    o.generation = generation;
    o.memory = reinterpret_cast<char*>(memory.get());
    o.peers.resize(c.world);
    o.targets = targets;
    for (std::uint32_t peer = 2; peer < c.world; ++peer) {
      o.peers[peer] = std::make_unique<RemoteRegion>();
      o.peers[peer]->base = kBase * peer;
    }
    o.on_failure = [this](const ProxyFailure& f) { failures.push_back(f); };
    proxy.attach(std::move(o));
  }

  std::uint64_t& word(std::uint64_t at) { return memory[at / 8]; }
  // Plays the device: the block is written, then announced.
  void mail(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows, std::uint64_t at) {
    const std::uint64_t index = heap.word_index(config, set_of(config, step), op, peer);
    word(heap.outgoing + 8 * index) = at;
    word(heap.mailbox + 8 * index) = mail_word({step, rows});
  }
  bool sent(std::uint32_t step, Op op, std::uint32_t peer) {
    return word(heap.sent + 8 * heap.word_index(config, set_of(config, step), op, peer)) == arrival_word(generation, step);
  }
  bool has(std::uint32_t step, Op op, std::uint32_t peer) {
    return word(heap.arrival_at(config, set_of(config, step), signal_of(op), peer)) == arrival_word(generation, step);
  }
  std::uint32_t immediate(Op op, std::uint32_t source, std::uint32_t step, std::uint32_t shard = 0, std::uint32_t shards = 1) {
    return pack({op, config.object, source, step, shard, shards});
  }
  void run() {
    while (proxy.step()) {}
  }
  std::vector<Write> take_writes() {
    run();
    return std::exchange(fabric.writes, {});
  }

  std::uint32_t generation = 1;
  std::vector<std::uint64_t> targets;   // see ProxyObject
  Config config;
  Heap heap;
  std::unique_ptr<std::uint64_t[]> memory;
  ScriptedFabric fabric;
  std::atomic<bool> stopped{false};
  Proxy proxy;
  std::vector<ProxyFailure> failures;
};

}  // namespace pplx::test
