// When an AllToAll's kernels began and ended, on this host's clock, for a timeline (src/host/trace.h). They write it to host memory as
// they end, so that nothing waits for them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../protocol/config.h"

namespace pplx::cuda {

class Timeline {
 public:
  explicit Timeline(cudaStream_t stream);   // finds out how the GPU's clock goes, on that stream
  ~Timeline() { cudaFreeHost(memory_); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  static constexpr std::uint32_t kSteps = 4096;   // the latest that are kept
  std::uint64_t* stamps() const { return memory_ + 1; }
  void tell(const Config& c);                     // those that were not told yet, to this module's Trace

 private:
  std::uint64_t* memory_ = nullptr;               // the GPU's clock, then the stamps
  std::uint64_t ahead_ = 0;                       // nanoseconds that the host's clock is ahead of the GPU's, modulo 2^64
};

}  // namespace pplx::cuda
