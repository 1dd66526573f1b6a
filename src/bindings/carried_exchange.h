// An Exchange together with the memory that it works in, which the proxy keeps alive with it.
#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "cpu/exchange.h"
#include "host/carried.h"
#include "host/mapping.h"

namespace pplx {

struct CarriedExchange : Carried {
  CarriedExchange(const Config& config, cpu::Memory memory, std::vector<std::shared_ptr<Mapping>> mappings, unsigned threads,
                 double timeout, bool counts)
      : mappings(std::move(mappings)), own(memory.own), outputs(cpu_output_layout(config)),
          exchange(config, std::move(memory), threads, timeout, cpu::Exchange::steady_clock, counts) {}

  const Config& config() const override { return exchange.config(); }
  std::uint32_t generation() const override { return exchange.generation(); }
  char* memory() const override { return own; }
  std::size_t bytes() const override { return mappings.front()->bytes(); }
  Region region() const override {
    const cpu::Blocks::Region region = exchange.blocks().region();
    const auto own_rails = rails.find(config().rank);
    return {region.memory, region.bytes, region.shared_bytes, own_rails == rails.end() ? nullptr : own_rails->second};
  }
  std::vector<std::uint64_t> targets() const override { return exchange.blocks().targets_there(); }
  void lay_relays(std::map<std::uint32_t, std::shared_ptr<Mapping>> by_rank) {
    std::vector<char*> areas(config().world, nullptr);
    for (const auto& [rank, mapping] : by_rank) {
      if (mapping->bytes() < exchange.blocks().relay_bytes(rank)) throw Misuse("the mapped memory is smaller than the rails");
      areas.at(rank) = mapping->data();
    }
    exchange.lay_relays(std::move(areas));
    rails = std::move(by_rank);
  }
  Standing standing() const { return exchange.standing(); }
  void lost_network(const Abort& abort, const std::string& message) override { exchange.failures().lost_network(abort, message); }

  std::vector<std::shared_ptr<Mapping>> mappings;   // this rank's first
  std::map<std::uint32_t, std::shared_ptr<Mapping>> rails;   // indexed by rank of this node; empty without node_ranks
  char* own;
  const OutputLayout outputs;
  cpu::Exchange exchange;
};

}  // namespace pplx
