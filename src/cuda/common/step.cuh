// Sets of memory: the step that has each, and whether it is closed there. Host calls, captures and replays share this one truth: a
// step's number is known on the device alone, and so is whether the memory that it takes is free.
//
//   a dispatch    takes the set if the step before it there is closed, and says so in the set's word. It waits while thread blocks
//                 that run are about to close that step; else it is refused: nothing is written, and all ranks fail with a sentence
//   a combine     works on a step that is open. Each of its thread blocks counts down when it has received all, and the last one
//                 has closed the step
#pragma once

#include "wait.cuh"

namespace pplx::cuda {

__device__ inline unsigned long long* closed_at(const Common& k, std::uint32_t step) {
  return &k.control->closed[set_of(k.c, step)];
}

// One warp loads these first: the words of all sets, since the step is not known yet, and the failure.
struct ClosedWords {
  unsigned long long by_set[kMaxInFlight];
  bool failed;
};

struct EarlyClosed {
  std::uint64_t word = 0;
  __device__ void load(const Common& k, std::uint32_t lane) {
    const unsigned long long* at = lane == kMaxInFlight ? &k.control->failure : &k.control->closed[lane];
    if (lane < k.c.in_flight || lane == kMaxInFlight) word = load_relaxed(at);
  }
  __device__ void keep(const Common& k, std::uint32_t lane, ClosedWords& words) const {
    if (lane < k.c.in_flight) words.by_set[lane] = word;
    if (lane == kMaxInFlight) words.failed = word != 0;
  }
};

// Asks again, and waits if that can help. False: this dispatch has failed.
[[maybe_unused]] static __device__ __noinline__ bool may_take_later(const Common& k, std::uint32_t step) {
  for (std::uint32_t i = 1;; ++i) {
    if (stopped(k, i % 256 == 0)) return false;
    const std::uint64_t word = load_acquire(closed_at(k, step));
    if (may_take(k.c, word, step)) break;
    if (!is_closing(k.c, word, step)) {
      fail(k, {AbortReason::Refused, Phase::DispatchSend, k.c.rank, k.c.rank, step}, step - k.c.in_flight, word);
      return false;
    }
    __nanosleep(100);
  }
  __threadfence_system();  // the peers that hear of this step write where another thread block has just read
  return true;
}
// Returns true if this dispatch may write, to all lanes of a warp. words: as they were when its thread block began.
__device__ inline bool may_take_set(const Common& k, std::uint32_t step, const ClosedWords& words) {
  const bool at_once = !words.failed && may_take(k.c, words.by_set[set_of(k.c, step)], step);
  return at_once || of_first_lane([&] { return may_take_later(k, step); }) != 0;
}

__device__ inline void take_set(const Common& k, std::uint32_t step) {
  store_relaxed(closed_at(k, step), taken_word(step, k.combine_blocks));
}

// Loads the word of a set, by each of the first threads of a block, for a step that is known.
__device__ inline std::uint64_t load_closed(const Common& k) {
  return threadIdx.x < k.c.in_flight ? load_relaxed(&k.control->closed[threadIdx.x]) : 0;
}
__device__ inline bool is_not_open(const Common& k, std::uint32_t step, std::uint64_t closed) {
  return threadIdx.x == set_of(k.c, step) && !is_open(closed, step);
}
// Fails: the thread that has seen the refusal, after the vote that tells its block. A call before that would hold up every launch.
__device__ inline void refuse(const Common& k, std::uint32_t step, std::uint64_t closed, Phase phase) {
  fail(k, {AbortReason::Refused, phase, k.c.rank, k.c.rank, step}, step, closed);
}

__device__ inline void begin_to_close(const Common& k, std::uint32_t step) {
  if (blockIdx.x == 0 && threadIdx.x == 0) atomicOr(closed_at(k, step), kClosing);
}

// Closes the set: all threads of a block, when it has received all. A kernel that waits beside this one must be told in order.
__device__ inline void close_set(const Common& k, std::uint32_t step) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  fuzz_delay(k, step);
  if (k.c.in_flight > 1)
    subtract_in_order(closed_at(k, step), 1);
  else
    atomicAdd(closed_at(k, step), ~0ull);
}

// ---- shares of send units ----

// The send units of a launch are dealt out in shares, one for each thread block: unit u belongs to share u modulo the number of
// blocks. A thread block takes its own, so it knows its first unit at once. Then it looks for those of blocks not yet resident.
//
// A share's word has the step that took it last, so none is ever reset.
//
// The step: every thread block of a dispatch that sends reads it on entry, then adds its part of 2^32 to the same word. The last
// part carries into the number above, after every block has read it. No thread waits for the sum.
__device__ inline std::uint32_t step_of(unsigned long long word) { return static_cast<std::uint32_t>(word >> 32); }

// Adds this block's part: one thread, once it has read the step.
__device__ inline void pass_step(const Common& k) {
  add_relaxed(&k.control->step, blockIdx.x == 0 ? (1ull << 32) - (gridDim.x - 1) : 1ull);
}

__device__ inline std::uint32_t* shares_of(const Common& k, Op op) { return k.control->shares[static_cast<int>(op)]; }

// Claims the share; true if it was untaken.
__device__ inline bool take_share(const Common& k, Op op, std::uint32_t share, std::uint32_t step) {
  return atomicExch(shares_of(k, op) + share, step) != step;
}

// Returns an untaken share, or kNone, to all lanes of a warp. It loads all words at once.
__device__ inline std::uint32_t find_share(const Common& k, Op op, std::uint32_t step, std::uint32_t shares) {
  constexpr int kAtOnce = 8;
  std::uint32_t found = kNone;
  for (std::uint32_t begin = 0; begin < gridDim.x; begin += 32 * kAtOnce) {
    std::uint32_t share[kAtOnce], taken_in[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::uint32_t nth = begin + 32 * i + threadIdx.x % 32;
      // Begins behind this block, so that not all blocks find the same share.
      share[i] = nth < gridDim.x ? nth + blockIdx.x + 1 : kNone;
      if (nth < gridDim.x && share[i] >= gridDim.x) share[i] -= gridDim.x;
      taken_in[i] = share[i] < shares ? __ldcg(shares_of(k, op) + share[i]) : step;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (taken_in[i] != step) found = share[i];
  }
  const std::uint32_t who = __ballot_sync(~0u, found != kNone);
  return who == 0 ? kNone : __shfl_sync(~0u, found, __ffs(static_cast<int>(who)) - 1);
}

// Claims another share for a warp whose block has sent its own; kNone: all are taken. It waits a while: a new block takes its own.
__device__ inline std::uint32_t take_another_share(const Common& k, Op op, std::uint32_t step, std::uint32_t shares) {
  for (std::uint32_t looks = 1;; ++looks) {
    const std::uint32_t share = find_share(k, op, step, shares);
    if (share == kNone) return kNone;
    if (looks < kPatientLooks) {
      __nanosleep(kBetweenLooksNs);
      continue;
    }
    if (of_first_lane([&] { return take_share(k, op, share, step); }) != 0) return share;
  }
}

}  // namespace pplx::cuda
