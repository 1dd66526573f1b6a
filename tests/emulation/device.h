// src/cuda/common/ptx.cuh for a CPU. Between any two of these another thread of the grid, of another block or of another rank may
// come in.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>

#include "emulation/kernel.h"

namespace pplx::cuda {

inline std::uint64_t load_acquire(const void* word) {
  emulation::maybe_yield();
  return __atomic_load_n(static_cast<const std::uint64_t*>(word), __ATOMIC_ACQUIRE);
}
inline void store_release(void* word, std::uint64_t value) {
  emulation::come_to_change();
  __atomic_store_n(static_cast<std::uint64_t*>(word), value, __ATOMIC_RELEASE);
}
inline std::uint64_t load_relaxed(const void* word) { return load_acquire(word); }
inline void store_relaxed(void* word, std::uint64_t value) { store_release(word, value); }
inline void store_release_here(void* word, std::uint64_t value) { store_release(word, value); }
inline std::uint32_t count_in_order(std::uint32_t* count, std::uint32_t more) {
  emulation::come_to_change();
  return __atomic_fetch_add(count, more, __ATOMIC_ACQ_REL);
}
inline std::uint32_t or_in_order(std::uint32_t* word, std::uint32_t bits) {
  emulation::come_to_change();
  return __atomic_fetch_or(word, bits, __ATOMIC_ACQ_REL);
}
inline std::uint32_t swap_in_order(std::uint32_t* word, std::uint32_t expected, std::uint32_t value) {
  emulation::come_to_change();
  __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}
inline void add_relaxed(unsigned long long* word, unsigned long long more) {
  emulation::come_to_change();
  __atomic_fetch_add(word, more, __ATOMIC_RELAXED);
}
inline void add_relaxed(std::uint32_t* count, std::uint32_t more) {
  emulation::come_to_change();
  __atomic_fetch_add(count, more, __ATOMIC_RELAXED);
}
inline void add_in_order(std::uint32_t* count, std::uint32_t more) {
  emulation::come_to_change();
  __atomic_fetch_add(count, more, __ATOMIC_ACQ_REL);
}
inline std::uint32_t load_acquire_here(const std::uint32_t* word) {
  emulation::maybe_yield();
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
inline void subtract_in_order(unsigned long long* word, unsigned long long less) {
  emulation::come_to_change();
  __atomic_fetch_sub(word, less, __ATOMIC_ACQ_REL);
}

// A thread that waits asks for the time, so this lets others go on.
inline std::uint64_t nanoseconds() {
  emulation::yield();
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count());
}

inline void store_vec16(char* to, const uint4& v) {
  emulation::come_to_change();
  __int128 piece;
  std::memcpy(&piece, &v, sizeof piece);
  __atomic_store_n(reinterpret_cast<__int128*>(to), piece, __ATOMIC_RELEASE);
}
inline uint4 load_vec16(const char* from) {
  emulation::maybe_yield();
  const __int128 piece = __atomic_load_n(reinterpret_cast<const __int128*>(from), __ATOMIC_ACQUIRE);
  uint4 v;
  std::memcpy(&v, &piece, sizeof v);
  return v;
}
inline uint4 load_input(const char* from) {
  uint4 v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <std::uint32_t kOf>
void barrier_sync(std::uint32_t barrier) {
  emulation::barrier_sync(barrier, kOf);
}
template <std::uint32_t kOf>
void barrier_arrive(std::uint32_t barrier) {
  emulation::barrier_arrive(barrier, kOf);
}

template <typename T>
T* known_shared(T* at) {
  return at;
}
template <typename T>
T* known_global(T* at) {
  return at;
}

inline void mbarrier_init(std::uint64_t* turns, std::uint32_t arrivals) { emulation::mbarrier_init(turns, arrivals); }
inline void mbarrier_arrive(std::uint64_t* turns) {
  emulation::come_to_change();
  emulation::mbarrier_arrive(turns, 0);
}
inline void mbarrier_expect(std::uint64_t* turns, std::uint32_t bytes) { emulation::mbarrier_arrive(turns, bytes); }
inline bool phase_wait(std::uint64_t* turns, std::uint32_t parity) {
  if (emulation::phase_test(turns, parity)) return true;
  emulation::yield_to_turns(turns, parity);
  return false;
}
inline bool phase_test(std::uint64_t* turns, std::uint32_t parity) {
  emulation::maybe_yield();
  return emulation::phase_test(turns, parity);
}
inline void bulk_load(void* shared, const void* from, std::uint32_t bytes, std::uint64_t* turns) {
  emulation::copy({shared, from, bytes, turns, nullptr, 0, {}, 0});
}
inline void bulk_store(void* to, const void* shared, std::uint32_t bytes) {
  emulation::copy({to, shared, bytes, nullptr, &emulation::here(), 0, {}, 0});
}
inline void bulk_end_group() { ++emulation::here().groups; }
template <std::uint32_t kBut>
void bulk_await_read() {
  emulation::await_groups(kBut, false);
}
template <std::uint32_t kBut>
void bulk_await_stored() {
  emulation::await_groups(kBut, true);
}
inline void fence_mbarriers() {}
inline void fence_system() {}
inline void fence_here() {}
inline void fence_shared_copies() { emulation::maybe_yield(); }
inline void fence_copies() { emulation::maybe_yield(); }

}  // namespace pplx::cuda

#define PPLX_SHARED(Type, name) Type& name = emulation::shared<Type>()
#define PPLX_LAUNCHED_SHARED(name) \
  auto* const name = reinterpret_cast<std::uint32_t*>(emulation::here().block->launched_shared.data())
