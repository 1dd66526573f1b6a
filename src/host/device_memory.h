// GPU memory of this process, for a fabric to register.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pplx {

struct DeviceMemory {
  void* base = nullptr;
  std::size_t bytes = 0;
  std::size_t shared_bytes = 0;              // leading bytes that peers may write
  int device = 0;                            // as CUDA counts
  int dmabuf = -1;                           // a file descriptor of it, -1: none
  std::uint64_t dmabuf_offset = 0;           // offset of `base` within it
};

}  // namespace pplx
