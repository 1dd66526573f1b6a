// The send half of a plain large combine whose rows are only copied. The loader looks rows up, a run at a time, and asks for them far ahead;
// the storer copies each to its source; the teller raises the arrival words of a run once its rows are there. So neither lookups nor fences
// stand between two stores. None of these warps waits for a peer.
#pragma once

#include "combine_kernel.cuh"

namespace pplx::cuda {

inline constexpr std::uint32_t kCopiesBytes = kCopyPlaces * kCopyBytes;

// A part of a row on its way through shared memory.
struct CopiedPart {
  char* to = nullptr;  // null: there are no more
  char* run = nullptr;  // the rows of a run that ends with this part, and how many
  std::uint32_t rows = 0;
  std::uint32_t bytes = 0;
};

struct CopiedRun {
  char* rows = nullptr;  // null: there are no more
  std::uint32_t n = 0;
  std::uint32_t parts = 0;  // parts of all runs up to here
};

struct CopyRings {
  std::uint64_t loaded[kCopyPlaces], read[kCopyPlaces];  // turns: by the loader; by the storer
  std::uint64_t there[kCopiedRuns], told[kCopiedRuns];  // arrivals of the storer, and of the teller
  CopiedPart parts[kCopyPlaces];
  CopiedRun runs[kCopiedRuns];

  // Initialises the rings, by one thread, before the first `__syncthreads`.
  __device__ void init() {
    for (std::uint64_t& turns : loaded) mbarrier_init(&turns, 1);
    for (std::uint64_t& turns : read) mbarrier_init(&turns, 1);
    for (std::uint64_t& turns : there) mbarrier_init(&turns, 1);
    for (std::uint64_t& turns : told) mbarrier_init(&turns, 1);
    fence_mbarriers();
  }
};

template <typename T>
class CopyLoader {
 public:
  // ring: kCopiesBytes.
  __device__ CopyLoader(const CombineArguments& a, std::uint32_t step, CombineShared& s, CopyRings& rings, char* ring)
      : a_(a), k_(a.common), step_(step), s_(s), rings_(rings), ring_(ring) {}

  // Loads the block's own share of the runs, if it still has it, and those that no block has begun.
  __device__ void load() {
    const SpanTimer all(k_, Span::SendingSums);
    const RowRuns runs(k_, s_.rows_begin, k_.living - (a_.sums_own ? 1 : 0), told_together(s_.rows_begin[k_.c.world], gridDim.x));
    s_.claimed.wait();
    send_shares(k_, Op::Combine, step_, s_.mine, runs, [&](std::uint32_t n) { return look_up(runs, n); },
                [&](std::uint32_t n, std::uint32_t place) { load_run(runs.at(n), place); });
    if (threadIdx.x % 32 != 0) return;
    await_place();
    rings_.parts[place_.at] = {};
    mbarrier_arrive(rings_.loaded + place_.at);
  }

 private:
  // Each lane's row of a run: its place among those of the experts.
  __device__ std::uint32_t look_up(const RowRuns& runs, std::uint32_t n) const {
    if (n >= runs.all()) return 0;
    const RowRun run = runs.at(n);
    return threadIdx.x % 32 < run.rows ? a_.received.out_row[s_.rows_begin[run.source] + run.first + threadIdx.x % 32] : 0;
  }

  __device__ void load_run(const RowRun& run, std::uint32_t place) {
    const bool by_word = has_many(s_, run.source);
    if (!by_word || __any_sync(~0u, threadIdx.x % 32 < run.rows && place >= a_.expert_rows)) {
      send_run_alone<T, false>(a_, step_, run, run.first, arrival_word(k_.generation, step_), s_);
      return;
    }
    const char* const from = a_.expert_out + place * a_.expert_stride;
    char* const rows = block_for(k_, set_of(k_.c, step_), Op::Combine, run.source) + k_.combine.row_at(run.first);
    for (std::uint32_t i = 0; i < run.rows; ++i) {
      const char* const row = of_lane(from, static_cast<int>(i));
      for (std::uint32_t at = 0; at < k_.row_bytes; at += kCopyBytes) {
        CopiedPart part;
        part.to = rows + std::uint64_t{i} * k_.combine.row_bytes + at;
        part.bytes = min(kCopyBytes, k_.row_bytes - at);
        if (i + 1 == run.rows && at + part.bytes == k_.row_bytes) {
          part.run = rows;
          part.rows = run.rows;
        }
        ask(row + at, part);
      }
    }
  }

  __device__ void ask(const char* from, const CopiedPart& part) {
    fuzz_delay(k_, std::uint64_t{step_} << 32 | place_.at);
    if (threadIdx.x % 32 == 0) {
      await_place();
      rings_.parts[place_.at] = part;
      mbarrier_expect(rings_.loaded + place_.at, part.bytes);
      bulk_load(ring_ + place_.at * kCopyBytes, from, part.bytes, rings_.loaded + place_.at);
    }
    __syncwarp();
    place_.next();
  }
  __device__ void await_place() const {
    if (place_.turn != 0) await_turn(k_, Span::AwaitingPlaceOfSum, rings_.read + place_.at, place_.turn - 1);
  }

  const CombineArguments& a_;
  const Common& k_;
  const std::uint32_t step_;
  CombineShared& s_;
  CopyRings& rings_;
  char* const ring_;
  Ring place_{kCopyPlaces};
};

// The storer: one warp, of which the first lane stores and waits for its stores.
class CopyStorer {
 public:
  __device__ CopyStorer(const CombineArguments& a, std::uint32_t step, CopyRings& rings, const char* ring)
      : k_(a.common), step_(step), rings_(rings), ring_(ring),
        under_way_(a.recv ? senders_of(gridDim.x, min(kCopyBytes, k_.row_bytes), kMostUnderWay) : kMostUnderWay) {}

  __device__ void store() {
    const SpanTimer all(k_, Span::SendingSums);
    for (;; place_.next()) {
      await_turn(k_, Span::AwaitingInputs, rings_.loaded + place_.at, place_.turn);
      const CopiedPart part = rings_.parts[place_.at];
      if (part.to == nullptr) break;
      const SpanTimer stores(k_, Span::StoringSums);
      if (threadIdx.x % 32 == 0) bulk_await_all_but<kMostUnderWay - 1>(under_way_ - 1);
      __syncwarp();
      tell_of(sent_ - min(under_way_ - 1, sent_));
      fuzz_delay(k_, sent_);
      if (threadIdx.x % 32 == 0) {
        bulk_store(part.to, ring_ + place_.at * kCopyBytes, part.bytes);
        bulk_end_group();
        bulk_await_read<1>();
        if (sent_ != 0) mbarrier_arrive(rings_.read + last_);
      }
      __syncwarp();
      last_ = place_.at;
      ++sent_;
      if (part.run != nullptr) end_run(part.run, part.rows);
      mark_stage(k_, step_, Stage::Sent);
    }
    if (threadIdx.x % 32 == 0) bulk_await_stored<0>();
    tell_of(sent_);
    end_run(nullptr, 0);
    tell_of(sent_);
  }

 private:
  static constexpr std::uint32_t kMostUnderWay = 8;  // parts
  static_assert(kMostUnderWay <= kCopiedRuns, "a run's place is told of before it is wanted again");

  // The run ends with the part that was stored last.
  __device__ void end_run(char* rows, std::uint32_t n) {
    const std::uint32_t at = runs_ % kCopiedRuns;
    if (runs_ >= kCopiedRuns) await_turn(rings_.told + at, runs_ / kCopiedRuns - 1);
    if (threadIdx.x % 32 == 0) rings_.runs[at] = {rows, n, sent_};
    __syncwarp();
    ++runs_;
  }

  // Tells the teller of runs whose parts are all among the first `parts`.
  __device__ void tell_of(std::uint32_t parts) {
    for (; told_ != runs_ && rings_.runs[told_ % kCopiedRuns].parts <= parts; ++told_)
      mbarrier_arrive_of_warp(rings_.there + told_ % kCopiedRuns);
  }

  const Common& k_;
  const std::uint32_t step_;
  CopyRings& rings_;
  const char* const ring_;
  const std::uint32_t under_way_;
  Ring place_{kCopyPlaces};
  std::uint32_t sent_ = 0, last_ = 0;  // parts; the last one's place
  std::uint32_t runs_ = 0, told_ = 0;
};

// The teller: one warp.
__device__ inline void tell_of_copies(const Common& k, std::uint32_t step, CopyRings& rings) {
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t n = 0;; ++n) {
    await_turn(rings.there + n % kCopiedRuns, n / kCopiedRuns);
    const CopiedRun run = rings.runs[n % kCopiedRuns];
    if (run.rows == nullptr) return;
    const SpanTimer tells(k, Span::TellingOfSums);
    if (lane < run.n) {
      fence_system();
      fuzz_delay(k, std::uint64_t{step} << 32 | n);
      store_relaxed(run.rows + std::uint64_t{lane} * k.combine.row_bytes + k.combine.arrival_at, arrival_word(k.generation, step));
    }
    mbarrier_arrive_of_warp(rings.told + n % kCopiedRuns);
  }
}

}  // namespace pplx::cuda
