// What a proxy carries for: one AllToAll's memory on this rank, and who hears when the network fails it.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "../src/protocol/config.h"
#include "../src/protocol/words.h"
#include "fabric.h"

namespace pplx {

class Carried {
 public:
  virtual ~Carried() = default;
  virtual const Config& config() const = 0;
  virtual std::uint32_t generation() const = 0;
  virtual char* memory() const = 0;              // a Heap
  virtual std::size_t bytes() const = 0;
  // GPU memory that has the blocks, at the places that they would have in memory(), where the words stay; none: all is there.
  virtual std::optional<DeviceMemory> blocks() const { return {}; }
  // GPU memory that has the arrival words, at the places that they would have in memory(), as this process writes it through PCIe;
  // null: they are there.
  virtual char* arrivals() const { return nullptr; }
  // Called on the proxy's thread.
  virtual void lost_network(const Abort& abort, const std::string& message) = 0;
};

}  // namespace pplx
