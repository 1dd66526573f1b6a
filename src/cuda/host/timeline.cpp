#include "timeline.h"

#include <algorithm>

#include "../../host/trace.h"
#include "../common/arguments.h"
#include "../common/stages.h"
#include "launch_table.h"
#include "runtime.h"

namespace pplx::cuda {
namespace {

constexpr std::uint64_t kAllBegin = 5000;   // nanoseconds in which the thread blocks of a launch begin: what is kept is of one

}  // namespace

Timeline::Timeline(cudaStream_t stream) : stream_(stream) {
  std::uint64_t* clock = nullptr;
  check(cudaHostAlloc(reinterpret_cast<void**>(&clock), sizeof *clock, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  std::uint64_t quickest = ~0ull;
  for (int i = 0; i < 8; ++i) {   // the first one loads the kernel
    const std::uint64_t before = Trace::now();
    check(launch_clock(clock, stream), "launching the clock");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    const std::uint64_t took = Trace::now() - before;
    if (took >= quickest) continue;
    quickest = took;
    ahead_ = before + took / 2 - *clock;
  }
  cudaFreeHost(clock);
}

Timeline::~Timeline() { cudaFree(stages_); }

void Timeline::begin(const std::vector<KeptStep>& kept) {
  told_.resize(kept.size());
  for (std::size_t place = 0; place < kept.size(); ++place) std::copy_n(kept[place].ended, kHalves, told_[place].begin());
}

std::uint64_t* Timeline::stages(std::uint32_t warps) {
  if (stages_ != nullptr) return stages_;
  stage_warps_ = warps;
  const std::size_t bytes = (std::size_t{kStageSteps} * kStagesOfStep + kSpanNames) * warps * sizeof *stages_;
  check(cudaMalloc(reinterpret_cast<void**>(&stages_), bytes), "cudaMalloc");
  set_now(stages_, 0, bytes, stream_);
  return stages_;
}

void Timeline::tell(const Config& c, const std::vector<KeptStep>& kept) {
  std::uint32_t latest = 0;
  for (const KeptStep& step : kept)
    if (step.has_ended(0)) latest = std::max(latest, static_cast<std::uint32_t>(step.number));
  if (stages_ != nullptr) {
    read_.resize(std::size_t{kStageSteps} * kStagesOfStep * stage_warps_);
    copy_now(read_.data(), stages_, read_.size() * sizeof *stages_, stream_);
  }
  for (std::size_t place = 0; place < kept.size(); ++place) {
    const KeptStep& s = kept[place];
    const auto step = static_cast<std::uint32_t>(s.number);
    for (std::uint32_t half = 0; half < kHalves; ++half) {
      const bool sends = half % 2 == 0, of_both = !sends && s.begun[half] == s.begun[half - 1];   // that launch is told already
      if (of_both || !s.has_ended(half) || told_[place][half] == s.ended[half]) continue;
      told_[place][half] = s.ended[half];
      const std::uint64_t begun = s.begun[half];
      Trace::of_module().add({begun + ahead_, s.ended[half] + ahead_, 0, 0, Traced::Kernel, c.object, step, 0, set_of(c, step),
                              static_cast<std::uint32_t>(Traced::DispatchSend) + half});
      if (stages_ == nullptr || step + kStageSteps <= latest) continue;
      const bool apart = sends && s.has_begun(half + 1) && s.begun[half + 1] > begun;   // its stages begin where this one's end
      tell_stages(c, step, half, sends ? begun - kAllBegin : begun, apart ? s.begun[half + 1] : ~0ull);
    }
  }
}

// The stages of a launch that warps came to from `from` on, and before `until`.
void Timeline::tell_stages(const Config& c, std::uint32_t step, std::uint32_t half, std::uint64_t from, std::uint64_t until) {
  const bool dispatch = half < 2;
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
