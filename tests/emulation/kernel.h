// The language of CUDA kernels as far as src/cuda speaks it, for a CPU: included before everything else.
//
// A launch runs on one thread of the process. Each thread of its grid is a fiber with a stack of its own; one goes on when another
// waits at a barrier, in a shuffle or for memory, and now and then without cause, from a fixed seed. So all blocks of a grid are
// there at once, in some order that is not the hardware's: this finds wrong protocols and wrong barriers, and nothing about memory
// models or speed.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <utility>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __noinline__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulation {

inline constexpr unsigned kLanes = 32, kBarriers = 16;

struct Warp {
  std::uint64_t lanes[2][kLanes];    // each lane's value in a shuffle, and in the one after it
  unsigned votes[2] = {};            // and in a ballot
  unsigned arrived = 0;              // lanes that are at the warp's barrier
  unsigned turn = 0;
  unsigned runs = ~0u;               // lanes that neither wait at a barrier nor have ended
  unsigned again = 0;                // those of `runs` that may go on before other warps do
};
struct Barrier {
  unsigned arrived = 0;
  bool all = true, result = true;
  std::vector<unsigned> waiting;     // threads of the block
};
struct Block {
  unsigned index = 0, threads = 0;
  std::vector<Warp> warps;
  Barrier barriers[kBarriers];
  std::map<std::type_index, std::vector<char>> shared;
  std::vector<char> launched_shared;
  unsigned ended = 0;                // threads
  unsigned idle = 0;                 // turns in which its threads changed nothing
};
struct Index { unsigned x; };
struct Thread {
  void* stack_pointer = nullptr;
  Block* block = nullptr;
  Index in_block{}, in_grid{}, blocks{}, threads{};
  unsigned groups = 0;               // groups of bulk stores that it has ended
  unsigned rests = 0;                // turns that it lets pass, unless `turns` are over
  const std::uint64_t* turns = nullptr;
  unsigned parity = 0;

  Warp& warp() const { return block->warps[in_block.x / kLanes]; }
  unsigned lane() const { return in_block.x % kLanes; }
};

extern thread_local Thread* current; // the thread that runs
inline Thread& here() { return *current; }
void yield();                        // until memory may have changed
void yield_to_turns(const std::uint64_t* turns, unsigned parity);   // the same, or until they are over
void maybe_yield();                  // called where other threads may come in between
void come_to_change();               // the same, by a thread that does not wait: it is about to change memory
void warp_sync();
void barrier_arrive(unsigned barrier, unsigned threads, bool good = true);
bool barrier_sync(unsigned barrier, unsigned threads, bool good = true);   // true if all were good

// Copies beside the threads: made at any time, in any order, each in two halves.
struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
  std::uint64_t* turns;              // the mbarrier of a load
  Thread* thread;                    // the thread of a store
  unsigned group;
  std::vector<char> read;            // once it was read
  unsigned rests = 0;                // turns that it lets pass
};
void copy(Copy copy);
void await_groups(unsigned but, bool stored);
void mbarrier_init(std::uint64_t* turns, unsigned arrivals);
void mbarrier_arrive(std::uint64_t* turns, unsigned bytes);
bool phase_test(const std::uint64_t* turns, unsigned parity);

// Each launch finds something else than zeroes.
inline constexpr char kPoison = static_cast<char>(0xa5);

template <typename T>
T& shared() {
  std::vector<char>& memory = here().block->shared[typeid(T)];
  if (memory.empty()) memory.assign(sizeof(T) + alignof(T), kPoison);
  const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
  return *reinterpret_cast<T*>((at + alignof(T) - 1) / alignof(T) * alignof(T));
}

template <typename T>
T bits_to(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// All lanes contribute a value; pick() chooses from them.
template <typename T, typename Pick>
auto shuffle(T value, const Pick& pick) {
  Thread& thread = here();
  Warp& warp = thread.warp();
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  // A lane comes to the shuffle after the next one when all have picked here.
  std::uint64_t* const lanes = warp.lanes[warp.turn % 2];
  lanes[thread.lane()] = bits;
  warp_sync();
  return pick(lanes);
}

}  // namespace emulation

#define threadIdx (emulation::here().in_block)
#define blockIdx (emulation::here().in_grid)
#define blockDim (emulation::here().threads)
#define gridDim (emulation::here().blocks)

// ---- a warp, all of whose lanes take part ----

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return emulation::shuffle(value, [&](const std::uint64_t* lanes) { return emulation::bits_to<T>(lanes[lane & 31]); });
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return __shfl_sync(~0u, value, static_cast<int>(emulation::here().lane()) ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  const unsigned lane = emulation::here().lane();
  return __shfl_sync(~0u, value, static_cast<int>(lane >= delta ? lane - delta : lane));
}
// The warp's votes, which lanes that wait for memory ask for all the time: counted as they come.
inline unsigned __ballot_sync(unsigned, bool vote) {
  emulation::Thread& thread = emulation::here();
  emulation::Warp& warp = thread.warp();
  const unsigned turn = warp.turn % 2, lane = 1u << thread.lane();
  unsigned& votes = warp.votes[turn];
  votes = vote ? votes | lane : votes & ~lane;
  emulation::warp_sync();
  return warp.votes[turn];
}
template <typename Join>
inline unsigned reduce_sync(unsigned value, const Join& join) {
  return emulation::shuffle(value, [&](const std::uint64_t* lanes) {
    unsigned all = static_cast<unsigned>(lanes[0]);
    for (unsigned lane = 1; lane < emulation::kLanes; ++lane) all = join(all, static_cast<unsigned>(lanes[lane]));
    return all;
  });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) { return reduce_sync(value, [](unsigned a, unsigned b) { return a | b; }); }
inline unsigned __reduce_add_sync(unsigned, unsigned value) { return reduce_sync(value, [](unsigned a, unsigned b) { return a + b; }); }
inline unsigned __reduce_min_sync(unsigned, unsigned value) { return reduce_sync(value, [](unsigned a, unsigned b) { return a < b ? a : b; }); }
inline unsigned __reduce_max_sync(unsigned, unsigned value) { return reduce_sync(value, [](unsigned a, unsigned b) { return a > b ? a : b; }); }
inline unsigned __match_any_sync(unsigned, unsigned value) {
  return emulation::shuffle(std::uint64_t{value}, [&](const std::uint64_t* lanes) {
    unsigned same = 0;
    for (unsigned lane = 0; lane < emulation::kLanes; ++lane) same |= static_cast<unsigned>(lanes[lane] == value) << lane;
    return same;
  });
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) == ~0u; }
inline void __syncwarp() { emulation::warp_sync(); }

// ---- a block ----

inline void __syncthreads() { emulation::barrier_sync(0, blockDim.x); }
inline bool __syncthreads_and(bool good) { return emulation::barrier_sync(0, blockDim.x, good); }
inline bool __syncthreads_or(bool any) { return !emulation::barrier_sync(0, blockDim.x, !any); }
inline void __threadfence_block() {}
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffffu, b & 0xffffu);
}
inline void __threadfence_system() {}
inline void __threadfence() {}
// Lets all other threads have turns, the more the longer it is. A turn takes microseconds here: the pauses of a fuzz build would be
// seconds.
inline void __nanosleep(unsigned nanoseconds) {
  for (unsigned turns = 1 + nanoseconds / 4096; turns > 0; --turns) emulation::yield();
}

// ---- memory ----

template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T, typename V>
T atomicAdd(T* at, V value) {
  emulation::come_to_change();
  return __atomic_fetch_add(at, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
template <typename T, typename V>
T atomicOr(T* at, V value) {
  return __atomic_fetch_or(at, static_cast<T>(value), __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicExch(T* at, T value) {
  emulation::come_to_change();
  return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicCAS(T* at, T expected, T value) {
  __atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <typename T>
T atomicCAS_system(T* at, T expected, T value) {
  return atomicCAS(at, expected, value);
}
// Only in a block's shared memory, whose threads take turns.
template <typename T, typename V>
T atomicMin(T* at, V value) {
  const T before = *at;
  *at = std::min(before, static_cast<T>(value));
  return before;
}
template <typename T, typename V>
T atomicMax(T* at, V value) {
  const T before = *at;
  *at = std::max(before, static_cast<T>(value));
  return before;
}

// ---- arithmetic ----

inline int __clzll(long long value) { return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value)); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline float __uint_as_float(unsigned bits) { return emulation::bits_to<float>(bits); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
// A GPU's NaNs are all one, which is not that of a blank place.
inline float __fadd_rn(float a, float b) { return a + b == a + b ? a + b : std::numeric_limits<float>::quiet_NaN(); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
template <typename A, typename B>
auto min(A a, B b) {
  using Both = std::common_type_t<A, B>;
  return std::min(static_cast<Both>(a), static_cast<Both>(b));
}
template <typename A, typename B>
auto max(A a, B b) {
  using Both = std::common_type_t<A, B>;
  return std::max(static_cast<Both>(a), static_cast<Both>(b));
}
