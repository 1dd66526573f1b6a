// The proxy's view of an AllToAll: its memory on this rank, and the listener for failures of the network.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "../protocol/abort.h"
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
  // Number of this rank's slots in the remote peer's heap.
  virtual std::uint32_t slot_at(std::uint32_t) const { return config().rank; }
  // GPU memory that holds the arrival words, at the offsets that they would have in memory(), mapped so that this process writes it
  // through PCIe. Null: the words are in memory().
  virtual char* arrivals() const { return nullptr; }
  // Called on the proxy's thread.
  virtual void lost_network(const Abort& abort, const std::string& message) = 0;
};

}  // namespace pplx
