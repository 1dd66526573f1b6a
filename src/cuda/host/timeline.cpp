#include "timeline.h"

#include <algorithm>

#include "../../host/trace.h"
#include "../common/arguments.h"
#include "launch_table.h"
#include "runtime.h"

namespace pplx::cuda {
namespace {

constexpr std::size_t kStampsInAll = std::size_t{Timeline::kSteps} * kLaunchesOfStep * kStampWords;

}  // namespace

Timeline::Timeline(cudaStream_t stream) {
  const std::size_t bytes = (1 + kStampsInAll) * sizeof *memory_;
  check(cudaHostAlloc(reinterpret_cast<void**>(&memory_), bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  std::fill_n(memory_, 1 + kStampsInAll, 0);
  std::uint64_t quickest = ~0ull;
  for (int i = 0; i < 8; ++i) {   // the first one loads the kernel
    const std::uint64_t before = Trace::now();
    check(launch_clock(memory_, stream), "launching the clock");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    const std::uint64_t took = Trace::now() - before;
    if (took >= quickest) continue;
    quickest = took;
    ahead_ = before + took / 2 - *memory_;
  }
}

void Timeline::tell(const Config& c) {
  for (std::uint32_t i = 0; i < kSteps * kLaunchesOfStep; ++i) {
    std::uint64_t* const stamp = stamps() + std::size_t{i} * kStampWords;
    const std::uint64_t ended = __atomic_load_n(stamp + kStampEnded, __ATOMIC_ACQUIRE), begun = stamp[kStampBegun];
    if (ended == 0 || begun > ended) continue;
    const auto step = static_cast<std::uint32_t>(stamp[kStampStep]);
    const std::uint32_t phase = 1 + i % kLaunchesOfStep;   // a Traced
    const std::uint32_t set = set_of(c, step);
    Trace::of_module().add({begun + ahead_, ended + ahead_, 0, 0, Traced::Kernel, c.object, step, 0, set, phase});
    stamp[kStampEnded] = 0;
  }
}

}  // namespace pplx::cuda
