// The counts of kernels, by adds that nothing waits for: those of the last thread block of a launch, which is the least likely to have
// sent anything. One warp counts the waits for a peer: where all have a word in common to wait for, thousands of adds would meet at one
// address.
#pragma once

#include "arrival.cuh"

namespace pplx::cuda {

__device__ inline bool counts_here(const Common& k) { return k.counters != nullptr && blockIdx.x == gridDim.x - 1; }

__device__ inline unsigned long long* rows_of_experts(const Common& k) { return reinterpret_cast<unsigned long long*>(k.counters + 1); }

__device__ inline void count_wait(const Common& k, Op op, std::uint32_t peer, std::uint64_t ns) {
  if (k.counters != nullptr && peer != k.c.rank)
    add_relaxed(&k.counters->waited[static_cast<int>(op)][peer], static_cast<unsigned long long>(ns));
}

// A lane's wait, until the look that finds what it waits for: the lanes of a warp that wait for a peer each go on together.
class WaitTimer {
 public:
  __device__ void look() { last_ = now(); }
  __device__ void count(const Common& k, Op op, std::uint32_t peer) const { count_wait(k, op, peer, std::uint64_t{last_ - first_} << 8); }

 private:
  // In units of 256 ns: two numbers of 64 bits would not stay in registers.
  __device__ static std::uint32_t now() { return static_cast<std::uint32_t>(nanoseconds() >> 8); }
  std::uint32_t first_ = now(), last_ = first_;
};

// Counts a step at its end: a dispatch has no time for it. rows_begin: of what it got, by source.
__device__ inline void count_step(const CombineArguments& a, const std::uint32_t* rows_begin) {
  const Common& k = a.common;
  if (!a.recv || !counts_here(k)) return;
  const std::uint32_t peer = threadIdx.x;
  for (std::uint32_t expert = threadIdx.x; expert < k.experts; expert += blockDim.x)
    add_relaxed(rows_of_experts(k) + expert, static_cast<unsigned long long>(a.counts[expert]));
  if (peer >= k.c.world) return;
  if (peer == k.c.rank) {
    add_relaxed(&k.counters->steps, 1ull);
    add_relaxed(&k.counters->tokens, static_cast<unsigned long long>(a.tokens));
    return;
  }
  const unsigned long long sent = a.plan.rows[peer], received = rows_begin[peer + 1] - rows_begin[peer];
  add_relaxed(&k.counters->dispatched[peer].sent, sent);
  add_relaxed(&k.counters->dispatched[peer].received, received);
  if (a.release) return;
  add_relaxed(&k.counters->combined[peer].sent, received);
  add_relaxed(&k.counters->combined[peer].received, sent);
}

// Counts a launch, at the end of the thread block that counts: the thread of its LaunchTime.
static __device__ __noinline__ void count_launch(const Common& k, Op op, bool sends, bool receives, bool large, std::uint64_t begun) {
  const bool combines = op == Op::Combine;
  const Timed send = combines ? Timed::CombineSend : Timed::DispatchSend, recv = combines ? Timed::CombineRecv : Timed::DispatchRecv;
  const auto timed = static_cast<int>(!receives ? send : !sends ? recv : combines ? Timed::Combine : Timed::Dispatch);
  const std::uint64_t ns = nanoseconds() - begun, us = ns / 1000;
  const std::uint32_t bucket = us == 0 ? 0 : min(64 - static_cast<std::uint32_t>(__clzll(static_cast<long long>(us))), kTimeBuckets - 1);
  add_relaxed(&k.counters->times[timed][bucket], 1ull);
  add_relaxed(&k.counters->nanoseconds[timed], static_cast<unsigned long long>(ns));
  if (large) add_relaxed(&k.counters->large[combines], 1ull);
}

// When a launch begins and ends: for the counts in the last thread block, and for what is kept in the first one, which has a part of most
// steps and so works for as long as any. One thread of a block looks: that of a warp which releases nothing soon, since that would wait for
// what it has stored.
class LaunchTime {
 public:
  struct Begun {   // in shared memory: registers are for all threads
    std::uint64_t at;
  };
  __device__ LaunchTime(const Common& k, Begun& begun, std::uint32_t warp) : k_(k), begun_(begun.at), thread_(32 * warp) {
    if (looks()) begun_ = nanoseconds();
  }

  // Once the step is known: until the launch ends this is all that there is of it.
  __device__ void keep(Op op, std::uint32_t step, bool sends, bool receives) const {
    if (!looks() || blockIdx.x != 0) return;
    KeptStep& kept = k_.kept[step % kKeptSteps];
    if (op == Op::Dispatch && sends) store_relaxed(&kept.number, step);
    if (sends) store_relaxed(&kept.begun[half_of(op, true)], begun_);
    if (receives) store_relaxed(&kept.begun[half_of(op, false)], begun_);
  }
  __device__ void end(Op op, std::uint32_t step, bool sends, bool receives, bool large) const {
    if (!looks()) return;
    if (blockIdx.x == 0) {
      KeptStep& kept = k_.kept[step % kKeptSteps];
      const std::uint64_t ended = nanoseconds();
      if (sends) store_relaxed(&kept.ended[half_of(op, true)], ended);
      if (receives) store_relaxed(&kept.ended[half_of(op, false)], ended);
    }
    if (counts_here(k_)) count_launch(k_, op, sends, receives, large, begun_);
  }

 private:
  __device__ bool looks() const {
    return threadIdx.x == thread_ && (blockIdx.x == 0 || blockIdx.x == gridDim.x - 1) && k_.counters != nullptr;
  }
  const Common& k_;
  std::uint64_t& begun_;
  const std::uint32_t thread_;
};

}  // namespace pplx::cuda
