// Rows of several sources in runs, dealt out in the order in which all sources send: the first run of each, the second of each. What
// some have more of follows, by source. A source whose thread blocks send a stretch each sends the first of all stretches first.
#pragma once

#include "../common/step.cuh"

namespace pplx::cuda {

struct RowRun {
  std::uint32_t source, first, rows;
};

// How many runs all sources have together, and how many every source has.
struct RunCounts {
  std::uint32_t all, common;
};

class RowRuns {
 public:
  // Takes counts that were made before, in any thread.
  __device__ RowRuns(const Common& k, const std::uint32_t* rows_begin, std::uint32_t sources, std::uint32_t most, std::uint32_t stretches,
                     const RunCounts& counts)
      : order_(k.order), begin_(rows_begin), sources_(sources), most_(most), stretches_(stretches), counts_(counts) {}
  // Counts runs, by all lanes of a warp. sources: of the order, from number `first` on; most: rows of a run; stretches: of each source.
  __device__ RowRuns(const Common& k, const std::uint32_t* rows_begin, std::uint32_t sources, std::uint32_t most,
                     std::uint32_t stretches = 1, std::uint32_t first = 0)
      : order_(k.order + first), begin_(rows_begin), sources_(sources), most_(most), stretches_(stretches) {
    std::uint32_t all = 0, least = kNone;
    for (std::uint32_t i = threadIdx.x % 32; i < sources; i += 32) {
      const std::uint32_t n = runs_of(order_[i]);
      least = min(least, n);
      all += n;
    }
    counts_ = {__reduce_add_sync(~0u, all), __reduce_min_sync(~0u, least)};
  }

  __device__ const RunCounts& counts() const { return counts_; }
  __device__ std::uint32_t all() const { return counts_.all; }

  __device__ RowRun at(std::uint32_t n) const {
    std::uint32_t source;
    const std::uint32_t common = counts_.common;
    if (n / sources_ < common) {
      source = order_[n % sources_];
      n /= sources_;
    } else {
      n -= common * sources_;
      for (std::uint32_t i = 0;; ++i) {
        source = order_[i];
        const std::uint32_t more = runs_of(source) - common;
        if (n < more) break;
        n -= more;
      }
      n += common;
    }
    n = in_time(n, runs_of(source));
    return {source, n * most_, min(most_, rows_of(source) - n * most_)};
  }

 private:
  __device__ std::uint32_t rows_of(std::uint32_t source) const { return begin_[source + 1] - begin_[source]; }
  __device__ std::uint32_t runs_of(std::uint32_t source) const { return (rows_of(source) + most_ - 1) / most_; }

  // Returns the nth of `runs` runs that comes: those of a stretch lie together.
  __device__ std::uint32_t in_time(std::uint32_t n, std::uint32_t runs) const {
    const std::uint32_t each = runs / stretches_, more = runs % stretches_;  // the first stretches have one more
    const std::uint32_t stretch = n < each * stretches_ ? n % stretches_ : n - each * stretches_, nth = n < each * stretches_ ? n / stretches_ : each;
    return stretch * each + min(stretch, more) + nth;
  }

  const std::uint8_t* const order_;
  const std::uint32_t* const begin_;
  const std::uint32_t sources_, most_, stretches_;
  RunCounts counts_;
};

// Sends this block's own share of the runs, if it is `mine`, and those that no block has begun: a warp. look_up(n): loads what the nth run
// needs, if there is one, ahead of send(n, that). op: whose shares they are.
template <typename LookUp, typename Send>
__device__ inline void send_shares(const Common& k, Op op, std::uint32_t step, bool mine, const RowRuns& runs, const LookUp& look_up,
                                   const Send& send) {
  const std::uint32_t shares = min(gridDim.x, runs.all());
  for (std::uint32_t share = mine ? blockIdx.x : take_another_share(k, op, step, shares); share != kNone;
       share = take_another_share(k, op, step, shares)) {
    auto next = look_up(share);
    for (std::uint32_t n = share; n < runs.all(); n += gridDim.x) {
      const auto now = next;
      next = look_up(n + gridDim.x);
      send(n, now);
    }
  }
}

}  // namespace pplx::cuda
