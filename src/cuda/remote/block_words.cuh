// Arrival words and headers of blocks, for peers of other nodes, for replicas and for weights.
#pragma once

#include "../common/wait.cuh"

namespace pplx::cuda {

__device__ inline const char* arrival(const Common& k, std::uint32_t step, Signal signal, std::uint32_t peer) {
  return k.peers[k.c.rank] + k.heap.arrival_at(k.c, set_of(k.c, step), signal, peer);
}
__device__ inline void raise_at_peer(const Common& k, std::uint32_t step, Signal signal, std::uint32_t peer) {
  fuzz_delay(k, arrival_word(k.generation, step));
  raise_arrival<Atomics>(k.peers[peer], k.heap, k.c, signal, k.c.rank, k.generation, step);
}

__device__ inline BlockHeader load_header(const char* block) {
  BlockHeader h;
  const auto* from = reinterpret_cast<const std::uint32_t*>(block);
  h.step = __ldcg(from);
  h.generation = __ldcg(from + 1);
  h.rows = __ldcg(from + 2);
  h.flags = __ldcg(from + 3);
  h.source = __ldcg(from + 4);
  return h;
}

// Returns true if a header is what this step's block of that peer must have; fails otherwise.
__device__ inline bool check_header(const Common& k, const BlockHeader& h, Phase phase, std::uint32_t step, std::uint32_t peer) {
  if (h.step == step && h.generation == k.generation && h.source == peer && h.rows <= k.most_rows) return true;
  fail(k, {AbortReason::Protocol, phase, k.c.rank, peer, step}, arrival_word(k.generation, step),
       arrival_word(h.generation, h.step));
  return false;
}

__device__ inline BlockHeader read_header(const Common& k, const char* block, Phase phase, std::uint32_t step, std::uint32_t peer,
                                          bool& good) {
  const BlockHeader h = load_header(block);
  good = check_header(k, h, phase, step, peer);
  return h;
}

// Writes a header: the threads of a group of 16 or more together, before the peer is told.
__device__ inline void write_header(const Common& k, char* block, std::uint32_t step, std::uint32_t rows, std::uint32_t flags,
                                    std::uint32_t thread) {
  const std::uint32_t words[5] = {step, k.generation, rows, flags, k.c.rank};
  if (thread < sizeof(BlockHeader) / 4)
    reinterpret_cast<std::uint32_t*>(block)[thread] = thread == 0   ? words[0]
                                                      : thread == 1 ? words[1]
                                                      : thread == 2 ? words[2]
                                                      : thread == 3 ? words[3]
                                                      : thread == 4 ? words[4]
                                                                    : 0;
}

}  // namespace pplx::cuda
