// When an AllToAll's kernels began and ended, on this host's clock, for a timeline (src/host/trace.h): what they keep in any case. With
// PPLX_CUDA_STAGES, when warps came to the stages between, too.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <vector>

#include "../common/arguments.h"

namespace pplx::cuda {

class Timeline {
 public:
  explicit Timeline(cudaStream_t stream);   // finds out how the GPU's clock goes, on that stream
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  static constexpr std::uint32_t kStageSteps = 32;   // the latest whose stages are kept
  std::uint64_t* stages(std::uint32_t warps);     // device memory for launches of at most that number of warps
  void begin(const std::vector<KeptStep>& kept);   // tells nothing of what has ended by then
  void tell(const Config& c, const std::vector<KeptStep>& kept);   // those that were not told yet, to this module's Trace

 private:
  void tell_stages(const Config& c, std::uint32_t step, std::uint32_t half, std::uint64_t from, std::uint64_t until);

  cudaStream_t stream_;
  std::vector<std::array<std::uint64_t, kHalves>> told_;   // when what was told last had ended, by place
  std::uint64_t ahead_ = 0;                       // nanoseconds that the host's clock is ahead of the GPU's, modulo 2^64
  std::uint64_t* stages_ = nullptr;
  std::uint32_t stage_warps_ = 0;
  std::vector<std::uint64_t> read_;               // stages, as they were when they were last told
};

}  // namespace pplx::cuda
