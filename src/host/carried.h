// The proxy's view of an AllToAll: its memory on this rank, and the listener for failures of the network.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../protocol/abort.h"
#include "../protocol/heap_layout.h"
#include "device_memory.h"

namespace pplx {

class Carried {
 public:
  virtual ~Carried() = default;
  virtual const Config& config() const = 0;
  virtual std::uint32_t generation() const = 0;
  virtual char* memory() const = 0;              // a Heap
  virtual std::size_t bytes() const = 0;
  // GPU memory that holds the blocks, at the offsets that they would have in memory(). The words stay in memory(). None: so do the
  // blocks.
  virtual std::optional<DeviceMemory> blocks() const { return {}; }
  // Memory that the network reads, and writes up to shared_bytes. Where that lies apart from memory(), its owner.
  struct Region {
    char* memory;
    std::size_t bytes, shared_bytes;
    std::shared_ptr<void> owner = {};
  };
  virtual Region region() const { return {memory(), bytes(), heap_of(config()).shared_bytes}; }
  // Number of this rank's slots in the remote peer's heap.
  virtual std::uint32_t slot_at(std::uint32_t) const { return config().rank; }
  // Where this rank's slots begin in remote peers' regions, by word_index.
  virtual std::vector<std::uint64_t> targets() const {
    const Heap heap = heap_of(config());
    std::vector<std::uint64_t> targets;
    for (std::uint32_t set = 0; set < config().in_flight; ++set)
      for (std::uint32_t op = 0; op < kOps; ++op)
        for (std::uint32_t peer = 0; peer < config().world; ++peer)
          targets.push_back(heap.remote_slot_at(set, Op(op), slot_at(peer)));
    return targets;
  }
  // GPU memory that holds the arrival words, at the offsets that they would have in memory(), mapped so that this process writes it
  // through PCIe. Null: the words are in memory().
  virtual char* arrivals() const { return nullptr; }
  // Called on the proxy's thread.
  virtual void lost_network(const Abort& abort, const std::string& message) = 0;
};

}  // namespace pplx
