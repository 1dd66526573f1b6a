// The five calls of src/cuda/remote/carrier.cuh on NVSHMEM 3.4.5. docs/carriers.md says why none of them
// waits without end, and why what has been answered has left.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

namespace pplx::cuda::carrier {

__device__ inline std::uint64_t* word_of(char* signal) { return reinterpret_cast<std::uint64_t*>(signal); }

__device__ inline void put(const Common& k, std::uint32_t peer, std::uint32_t, char* to, const char* from, std::uint64_t bytes,
                           char* signal) {
  // Other thread blocks have stored it, and a NIC reads it.
  __threadfence_system();
  nvshmem_putmem_signal_nbi(to, from, bytes, word_of(signal), 1, NVSHMEM_SIGNAL_ADD, static_cast<int>(k.pe[peer]));
}

__device__ inline void signal(const Common& k, std::uint32_t peer, std::uint32_t, char* signal) {
  __threadfence_system();
  nvshmemx_signal_op(word_of(signal), 1, NVSHMEM_SIGNAL_ADD, static_cast<int>(k.pe[peer]));
}

__device__ inline bool reached(const char* signal, std::uint64_t n) { return static_cast<std::int64_t>(load_acquire(signal) - n) >= 0; }

// A signal is raised after the data has landed, so the NIC has read what the peer has answered.
__device__ inline bool left(const Common&, std::uint32_t, std::uint32_t) { return true; }

// NVSHMEM has no call for it: a completion with an error looks to it like one that has yet to come. Our waits have a limit.
__device__ inline std::uint64_t error(const Common&, std::uint32_t) { return 0; }

}  // namespace pplx::cuda::carrier
