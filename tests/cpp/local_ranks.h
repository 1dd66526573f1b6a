// Several ranks in one process and one thread, mapped inside a node, the proxy between nodes, for tests that look into blocks
// between two phases. proxy/sim runs whole steps.
#pragma once

#include <memory>
#include <vector>

#include "../../proxy/proxy.h"
#include "../../src/cpu/exchange.h"
#include "shuffle_fabric.h"

namespace pplx::test {

struct LocalRank {
  Config config;
  std::unique_ptr<std::uint64_t[]> heap;
  std::vector<std::uint64_t> rails;   // see Blocks::lay_relays()
  std::unique_ptr<cpu::Exchange> exchange;
  std::unique_ptr<ShuffleFabric> fabric;
  std::unique_ptr<Proxy> proxy;
  std::vector<ProxyFailure> failures;

  char* memory() const { return reinterpret_cast<char*>(heap.get()); }
};

class LocalRanks {
 public:
  LocalRanks(Config config, std::uint32_t node_size, int endpoints, std::uint64_t shard_bytes, std::uint64_t seed)
      : net(seed), ranks(config.world) {
    const auto same_node = [&](std::uint32_t a, std::uint32_t b) { return a / node_size == b / node_size; };
    for (std::uint32_t r = 0; r < config.world; ++r) {
      LocalRank& rank = ranks[r];
      rank.config = config;
      rank.config.rank = r;
      for (std::uint32_t p = 0; p < config.world; ++p) rank.config.remote_peers += !same_node(r, p);
      rank.heap = std::make_unique<std::uint64_t[]>(heap_of(rank.config).bytes / 8 + 8);
    }
    for (LocalRank& rank : ranks) {
      cpu::Memory memory;
      memory.own = rank.memory();
      for (std::uint32_t p = 0; p < config.world; ++p) {
        memory.peers.push_back(same_node(rank.config.rank, p) ? ranks[p].memory() : nullptr);
        memory.nodes.push_back(static_cast<std::uint16_t>(p / node_size));
      }
      rank.exchange = std::make_unique<cpu::Exchange>(rank.config, memory, 1, 10.0);
      if (config.node_ranks != 0) rank.rails.resize(rank.exchange->blocks().relay_bytes(rank.config.rank) / 8);
    }
    for (LocalRank& rank : ranks) {
      std::vector<char*> areas(config.world, nullptr);
      for (std::uint32_t p = 0; p < config.world; ++p)
        if (same_node(rank.config.rank, p)) areas[p] = reinterpret_cast<char*>(ranks[p].rails.data());
      rank.exchange->lay_relays(areas);
    }
    for (LocalRank& rank : ranks) {
      if (rank.config.remote_peers == 0) continue;
      const cpu::Blocks& blocks = rank.exchange->blocks();
      rank.fabric = std::make_unique<ShuffleFabric>(net, static_cast<int>(rank.config.rank), endpoints);
      rank.proxy = std::make_unique<Proxy>(*rank.fabric, shard_bytes);
      ProxyObject object;
      object.config = rank.config;
      object.memory = rank.memory();
      object.region = rank.fabric->register_memory(blocks.region().memory, blocks.region().bytes, blocks.region().shared_bytes);
      object.targets = blocks.targets_there();
      object.peers.resize(config.world);
      for (std::uint32_t p : blocks.network_peers()) {
        object.peers[p] = std::make_unique<RemoteRegion>();
        object.peers[p]->base = reinterpret_cast<std::uint64_t>(ranks[p].exchange->blocks().region().memory);
      }
      object.on_failure = [&rank](const ProxyFailure& f) { rank.failures.push_back(f); };
      rank.proxy->attach(std::move(object));
    }
  }

  // Runs the proxies until all announced blocks are there.
  void run_network() {
    for (int i = 0; i < 200; ++i)
      for (LocalRank& rank : ranks)
        if (rank.proxy) rank.proxy->step();
  }

  ShuffleNet net;
  std::vector<LocalRank> ranks;
};

}  // namespace pplx::test
