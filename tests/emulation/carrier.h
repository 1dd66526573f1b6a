// The stand-in for the five calls of src/cuda/remote/carrier.cuh: see network.h.
#pragma once

#include "emulation/network.h"

namespace pplx::cuda::carrier {

inline void post(const Common& k, std::uint32_t peer, std::uint32_t ctx, char* to, const char* from, std::uint64_t bytes,
                 char* signal) {
  emulation::maybe_yield();
  emulation::post({k.blocks, k.c.rank, peer, ctx, to, from, bytes, signal});
}

inline void put(const Common& k, std::uint32_t peer, std::uint32_t ctx, char* to, const char* from, std::uint64_t bytes,
                char* signal) {
  post(k, peer, ctx, to, from, bytes, signal);
}
inline void signal(const Common& k, std::uint32_t peer, std::uint32_t ctx, char* signal) {
  post(k, peer, ctx, nullptr, nullptr, 0, signal);
}
inline bool reached(const char* signal, std::uint64_t n) { return static_cast<std::int64_t>(load_acquire(signal) - n) >= 0; }
inline bool left(const Common& k, std::uint32_t peer, std::uint32_t ctx) { return emulation::has_left(k.blocks, peer, ctx); }
inline std::uint64_t error(const Common& k, std::uint32_t peer) { return emulation::error_of(k.blocks, peer); }

}  // namespace pplx::cuda::carrier
