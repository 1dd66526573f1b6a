// A phase that several threads poll: every unit once, stages in order, waits respected; and asked for what it waits at any
// time, also when helpers have just finished it.
#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../src/cpu/thread_pool.h"
#include "check.h"

using namespace pplx;
using namespace pplx::cpu;

namespace {

class Counting final : public StagedRun {
 public:
  explicit Counting(std::vector<std::vector<std::uint32_t>> stages) : stages_(std::move(stages)), open_(8), done_(stages_.size()) {
    for (std::atomic<bool>& open : open_) open = false;
    for (std::atomic<std::uint32_t>& n : done_) n = 0;
  }

  using PhaseRun::waiting;
  void open(std::uint32_t group) { open_[group].store(true); }
  std::uint32_t units(int stage) const { return done_[static_cast<std::size_t>(stage)]; }
  std::atomic<std::uint32_t> finished_groups{0};
  int fail_at = -1;

 private:
  bool begin(int stage, std::vector<std::uint32_t>& units) override {
    for (int before = 0; before < stage && before < static_cast<int>(stages_.size()); ++before)
      CHECK_EQ(done_[before].load(), total(before));
    if (stage >= static_cast<int>(stages_.size())) return false;
    units = stages_[static_cast<std::size_t>(stage)];
    return true;
  }
  bool ready(int, std::uint32_t group) override { return open_[group].load(); }
  void run(int stage, std::uint32_t group, std::uint32_t unit) override {
    CHECK(open_[group].load());
    CHECK(unit < stages_[static_cast<std::size_t>(stage)][group]);
    if (stage == fail_at) throw std::runtime_error("planted");
    ++done_[static_cast<std::size_t>(stage)];
  }
  void finished(int, std::uint32_t) override { ++finished_groups; }
  Waiting waiting_of(int, std::uint32_t group) const override {
    Waiting w;
    w.peer = group;
    return w;
  }
  std::uint32_t total(int stage) const {
    std::uint32_t n = 0;
    for (std::uint32_t units : stages_[static_cast<std::size_t>(stage)]) n += units;
    return n;
  }

  const std::vector<std::vector<std::uint32_t>> stages_;
  std::vector<std::atomic<bool>> open_;
  std::vector<std::atomic<std::uint32_t>> done_;
};

void one_thread() {
  Counting phase({{2, 0, 3}, {}, {1}});
  CHECK_EQ(phase.waiting().peer, kNoRank);   // not begun
  CHECK(!phase.poll());
  CHECK_EQ(phase.waiting().peer, 0u);
  phase.open(0);
  phase.open(2);
  CHECK(!phase.poll());
  CHECK_EQ(phase.units(0), 5u);
  CHECK_EQ(phase.waiting().peer, 1u);   // a group without units is waited for like any other
  phase.open(1);
  CHECK(phase.poll());
  CHECK_EQ(phase.units(2), 1u);
  CHECK_EQ(phase.finished_groups.load(), 4u);
  CHECK_EQ(phase.waiting().peer, kNoRank);   // finished: it waits for no peer
  CHECK(phase.poll());
}

void failing() {
  Counting phase({{3}, {3}});
  phase.open(0);
  phase.fail_at = 1;
  for (int again = 0; again < 3; ++again) {
    bool thrown = false;
    try {
      phase.poll();
    } catch (const std::runtime_error& error) {
      thrown = error.what() == std::string("planted");
    }
    CHECK(thrown);
  }
}

// As Exchange::run does it: helpers poll, the caller asks what is waited for in between.
void several_threads(check::Random& random) {
  ThreadPool pool(3);
  for (int i = 0; i < 3000; ++i) {
    Counting phase({{7, 1, 0, 5}, {2, 2, 2, 2}, {40}});
    const auto late = static_cast<std::uint32_t>(random.integer(0, 3));
    for (std::uint32_t group = 0; group < 4; ++group)
      if (group != late) phase.open(group);
    std::thread opener([&] { phase.open(late); });
    {
      const ThreadPool::Help help(pool, phase);
      while (!phase.poll()) {
        const Waiting w = phase.waiting();
        CHECK(w.peer == kNoRank || w.peer == late);
      }
    }
    opener.join();
    CHECK_EQ(phase.units(0) + phase.units(1) + phase.units(2), 61u);
    CHECK_EQ(phase.finished_groups.load(), 9u);
  }
}

}  // namespace

int main() {
  check::Random random(check::seed());
  one_thread();
  failing();
  several_threads(random);
}
