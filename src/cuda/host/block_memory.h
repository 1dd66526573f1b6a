// GPU memory that NICs read and write: the blocks of ranks of other nodes, where the provider takes it.
#pragma once

#include "../../host/device_memory.h"

namespace pplx::cuda {

class BlockMemory {
 public:
  BlockMemory(int device, std::size_t bytes);   // zeroed
  ~BlockMemory();
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;

  char* data() const { return static_cast<char*>(memory_.base); }
  const DeviceMemory& description() const { return memory_; }

 private:
  DeviceMemory memory_;
};

}  // namespace pplx::cuda
