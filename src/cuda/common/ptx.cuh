// All that kernels use of a GPU beyond C++: PTX for words that others see, for hardware barriers and for loads with hints, and the
// shared memory of a thread block. tests/emulation has all of it for a CPU.
#pragma once

#include <cstdint>

#ifdef PPLX_EMULATION
#include "emulation/device.h"
#else

namespace pplx::cuda {

// ---- words and counts ----

__device__ inline std::uint64_t load_acquire(const void* word) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline void store_release(void* word, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ inline std::uint64_t load_relaxed(const void* word) {
  std::uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline void store_relaxed(void* word, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
// Orders what this thread has stored, or has seen, before what it stores next: for every GPU and the host, or for this GPU.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ inline void fence_here() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Releases to threads of this GPU.
__device__ inline void store_release_here(void* word, std::uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
// Adds to a count among threads of this GPU: the thread that completes it sees all that others stored before they counted.
__device__ inline std::uint32_t count_in_order(std::uint32_t* count, std::uint32_t more) {
  std::uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(count), "r"(more) : "memory");
  return before;
}

// The same for a word of bits, and for a word that is put in the place of another; both give what was there.
__device__ inline std::uint32_t or_in_order(std::uint32_t* word, std::uint32_t bits) {
  std::uint32_t before;
  asm volatile("atom.or.acq_rel.gpu.global.b32 %0, [%1], %2;" : "=r"(before) : "l"(word), "r"(bits) : "memory");
  return before;
}
__device__ inline std::uint32_t swap_in_order(std::uint32_t* word, std::uint32_t expected, std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.cas.acq_rel.gpu.global.b32 %0, [%1], %2, %3;" : "=r"(before) : "l"(word), "r"(expected), "r"(value) : "memory");
  return before;
}

// Adds without a result to wait for.
__device__ inline void add_relaxed(unsigned long long* word, unsigned long long more) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(word), "l"(more) : "memory");
}

__device__ inline void add_relaxed(std::uint32_t* count, std::uint32_t more) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(more) : "memory");
}

// Words of 32 bits, for threads of this GPU.
__device__ inline void add_in_order(std::uint32_t* count, std::uint32_t more) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(count), "r"(more) : "memory");
}
__device__ inline std::uint32_t load_acquire_here(const std::uint32_t* word) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Subtracts without a result to wait for: a thread that sees the difference sees what was stored before.
__device__ inline void subtract_in_order(unsigned long long* word, unsigned long long less) {
  asm volatile("red.add.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(0ull - less) : "memory");
}

__device__ inline std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// ---- sixteen bytes ----

// Stores a vec16 whole or not at all, as any reader of the place sees it.
__device__ inline void store_vec16(char* to, const uint4& v) {
  const std::uint64_t low = v.x | std::uint64_t{v.y} << 32, high = v.z | std::uint64_t{v.w} << 32;
  asm volatile("{\n\t.reg .b128 vec16;\n\tmov.b128 vec16, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], vec16;\n\t}" ::"l"(to),
               "l"(low), "l"(high)
               : "memory");
}
__device__ inline uint4 load_vec16(const char* from) {
  std::uint64_t low, high;
  asm volatile("{\n\t.reg .b128 vec16;\n\tld.relaxed.sys.global.b128 vec16, [%2];\n\tmov.b128 {%0, %1}, vec16;\n\t}"
               : "=l"(low), "=l"(high)
               : "l"(from)
               : "memory");
  return make_uint4(static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32), static_cast<std::uint32_t>(high),
                    static_cast<std::uint32_t>(high >> 32));
}
// The caller's tensors: read once.
__device__ inline uint4 load_input(const char* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// ---- barriers of a thread block, for kOf of its threads ----

template <std::uint32_t kOf>
__device__ inline void barrier_sync(std::uint32_t barrier) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "n"(kOf) : "memory");
}
template <std::uint32_t kOf>
__device__ inline void barrier_arrive(std::uint32_t barrier) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "n"(kOf) : "memory");
}

// Says that a pointer is to shared memory, in a function that is not inlined: generic atomics take many times as long.
template <typename T>
__device__ inline T* known_shared(T* at) {
  __builtin_assume(__isShared(at));
  return at;
}
// Says that a pointer is to global memory, where it comes from another lane or lies in shared memory: else its stores are generic.
template <typename T>
__device__ inline T* known_global(T* at) {
  __builtin_assume(__isGlobal(at));
  return at;
}

// ---- mbarriers: a phase completes after `arrivals` arrivals and all expected bytes; the first one is 0 ----

__device__ inline std::uint32_t shared_address(const void* at) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(at)); }
__device__ inline void mbarrier_init(std::uint64_t* turns, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(turns)), "r"(arrivals) : "memory");
}
__device__ inline void mbarrier_arrive(std::uint64_t* turns) {
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared::cta.b64 state, [%0];\n\t}" ::"r"(shared_address(turns)) : "memory");
}
// Returns true if the phase of this parity is complete.
__device__ inline bool phase_test(std::uint64_t* turns, std::uint32_t parity) {
  std::uint32_t over;
  asm volatile("{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
               : "=r"(over)
               : "r"(shared_address(turns)), "r"(parity)
               : "memory");
  return over != 0;
}
// The same. From sm_90 on it sleeps for a while if it is not.
__device__ inline bool phase_wait(std::uint64_t* turns, std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t over;
  asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
               : "=r"(over)
               : "r"(shared_address(turns)), "r"(parity)
               : "memory");
  return over != 0;
#else
  return phase_test(turns, parity);
#endif
}

// ---- bulk copies between shared memory and any other, in multiples of sixteen bytes; from sm_90 on ----

// Kernels that have any are not launched elsewhere.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define PPLX_SM90(...) asm volatile(__VA_ARGS__)
#else
#define PPLX_SM90(...) __trap()
#endif

// Orders the initialisation of mbarriers before copies that complete them.
__device__ inline void fence_mbarriers() { PPLX_SM90("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void mbarrier_expect(std::uint64_t* turns, std::uint32_t bytes) {
  PPLX_SM90("{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n\t}" ::"r"(shared_address(turns)),
            "r"(bytes)
            : "memory");
}
__device__ inline void bulk_load(void* shared, const void* from, std::uint32_t bytes, std::uint64_t* turns) {
  PPLX_SM90("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
            "l"(from), "r"(bytes), "r"(shared_address(turns))
            : "memory");
}
// Stores belong to the group that their thread ends next.
__device__ inline void bulk_store(void* to, const void* shared, std::uint32_t bytes) {
  PPLX_SM90("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(shared)), "r"(bytes)
            : "memory");
}
__device__ inline void bulk_end_group() { PPLX_SM90("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all of this thread's groups but the last kBut have been read from shared memory, or are stored.
template <std::uint32_t kBut>
__device__ inline void bulk_await_read() {
  PPLX_SM90("cp.async.bulk.wait_group.read %0;" ::"n"(kBut) : "memory");
}
template <std::uint32_t kBut>
__device__ inline void bulk_await_stored() {
  PPLX_SM90("cp.async.bulk.wait_group %0;" ::"n"(kBut) : "memory");
}
// Orders what threads have stored in shared memory before copies of it. It waits for no store to other memory.
__device__ inline void fence_shared_copies() { PPLX_SM90("fence.proxy.async.shared::cta;" ::: "memory"); }
// Orders what threads have acquired before copies of it.
__device__ inline void fence_copies() { PPLX_SM90("fence.proxy.async.global;" ::: "memory"); }

}  // namespace pplx::cuda

// ---- shared memory of a thread block: an object, and what the launch asked for; both may hold anything ----

// Launched shared memory begins at a line of 128 bytes (kLine): a bulk copy that is not in line with lines takes two for each.
#define PPLX_SHARED(Type, name) __shared__ Type name
#define PPLX_LAUNCHED_SHARED(name) extern __shared__ __align__(128) std::uint32_t name[]

#endif

namespace pplx::cuda {

// The atomics of protocol functions that host and device share.
struct Atomics {
  __device__ static std::uint64_t load_acquire(const void* word) { return cuda::load_acquire(word); }
  __device__ static void store_release(void* word, std::uint64_t value) { cuda::store_release(word, value); }
};

// Arrives once for a warp, behind what its lanes have done.
__device__ inline void mbarrier_arrive_of_warp(std::uint64_t* turns) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(turns);
}

// Guards shared memory that one warp writes, once in a launch, for any warps to read.
struct Once {
  std::uint64_t word;
  // Called by one thread, before the first __syncthreads().
  __device__ void init() { mbarrier_init(&word, 1); }
  // Called by all lanes of the warp that has written.
  __device__ void set() { mbarrier_arrive_of_warp(&word); }
  __device__ void wait() {
    while (!phase_wait(&word, 0)) {
    }
  }
  __device__ bool is_set() { return phase_test(&word, 0); }
};

}  // namespace pplx::cuda
