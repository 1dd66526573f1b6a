#include "timeline.h"

#include <algorithm>

#include "../../host/trace.h"
#include "../common/arguments.h"
#include "../common/stages.h"
#include "launch_table.h"
#include "runtime.h"

namespace pplx::cuda {
namespace {

constexpr std::size_t kStampsInAll = std::size_t{Timeline::kSteps} * kLaunchesOfStep * kStampWords;

constexpr std::uint64_t kAllBegin = 5000;   // nanoseconds in which the thread blocks of a launch begin: the stamp is of one

constexpr std::uint32_t phase_of(std::uint32_t launch) { return static_cast<std::uint32_t>(Traced::DispatchSend) + launch; }

}  // namespace

Timeline::Timeline(cudaStream_t stream) : stream_(stream) {
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

Timeline::~Timeline() {
  cudaFreeHost(memory_);
  cudaFree(stages_);
}

std::uint64_t* Timeline::stages(std::uint32_t warps) {
  if (stages_ != nullptr) return stages_;
  stage_warps_ = warps;
  const std::size_t bytes = (std::size_t{kStageSteps} * kStagesOfStep + kSpanNames) * warps * sizeof *stages_;
  check(cudaMalloc(reinterpret_cast<void**>(&stages_), bytes), "cudaMalloc");
  check(cudaMemsetAsync(stages_, 0, bytes, stream_), "cudaMemsetAsync");
  check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  return stages_;
}

void Timeline::tell(const Config& c) {
  std::uint32_t latest = 0;
  for (std::uint32_t i = 0; i < kSteps * kLaunchesOfStep; ++i)
    if (const std::uint64_t* const stamp = stamps() + std::size_t{i} * kStampWords; stamp[kStampEnded] != 0)
      latest = std::max(latest, static_cast<std::uint32_t>(stamp[kStampStep]));
  if (stages_ != nullptr) {
    read_.resize(std::size_t{kStageSteps} * kStagesOfStep * stage_warps_);
    check(cudaMemcpyAsync(read_.data(), stages_, read_.size() * sizeof *stages_, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  for (std::uint32_t i = 0; i < kSteps * kLaunchesOfStep; ++i) {
    std::uint64_t* const stamp = stamps() + std::size_t{i} * kStampWords;
    const std::uint64_t ended = __atomic_load_n(stamp + kStampEnded, __ATOMIC_ACQUIRE), begun = stamp[kStampBegun];
    if (ended == 0 || begun > ended) continue;
    const auto step = static_cast<std::uint32_t>(stamp[kStampStep]);
    const std::uint32_t launch = i % kLaunchesOfStep, set = set_of(c, step);
    Trace::of_module().add({begun + ahead_, ended + ahead_, 0, 0, Traced::Kernel, c.object, step, 0, set, phase_of(launch)});
    stamp[kStampEnded] = 0;
    if (stages_ == nullptr || step + kStageSteps <= latest) continue;
    const std::uint64_t* const other = stamp + kStampWords;   // a receive half that is apart begins where this one's stages end
    const bool apart = launch % 2 == 0 && other[kStampStep] == step && other[kStampBegun] > begun;
    tell_stages(c, step, launch, launch % 2 == 0 ? begun - kAllBegin : begun, apart ? other[kStampBegun] : ~0ull);
  }
}

// The stages of a launch that warps came to from `from` on, and before `until`.
void Timeline::tell_stages(const Config& c, std::uint32_t step, std::uint32_t launch, std::uint64_t from, std::uint64_t until) {
  const bool dispatch = launch < 2;
  const auto after = dispatch ? Stage::DispatchBegins : Stage::CombineBegins, end = dispatch ? Stage::DispatchEnds : Stage::CombineEnds;
  for (auto stage = static_cast<std::uint32_t>(after) + 1; stage <= static_cast<std::uint32_t>(end); ++stage) {
    const std::uint64_t* const warps = read_.data() + stage_word(step % kStageSteps, Stage{static_cast<int>(stage)}, stage_warps_, 0);
    std::uint64_t first = ~0ull, last = 0;
    for (std::uint32_t i = 0; i < stage_warps_; ++i) {
      if (warps[i] < from || warps[i] >= until) continue;
      first = std::min(first, warps[i]);
      last = std::max(last, warps[i]);
    }
    if (last == 0) continue;
    Trace::of_module().add({first + ahead_, last + ahead_, 0, 0, Traced::Stage, c.object, step, 0, set_of(c, step), stage});
  }
}

}  // namespace pplx::cuda
