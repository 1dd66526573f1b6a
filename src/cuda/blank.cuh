// Rows of a combine show by themselves whether they have come. A row's place is blank, all ones, until the row is stored there in
// pieces of sixteen bytes, each whole or not at all; whoever reads a piece makes its place blank again. So nothing is released
// between a row's last byte and its reader, which would wait for the link: bare rows of 128 tokens take 21.0 us so, 24.6 with a
// release per part (bench/notes.md). What comes of an addition is never blank: arithmetic makes NaNs of one bit pattern only, and
// that has a zero.
//
// A place is written again only after its reader has made it blank: a peer answers the set's next dispatch, which this rank sends
// in a kernel after the one that read.
#pragma once

#include "words.cuh"

namespace pplx::cuda {

__device__ inline bool is_blank(const uint4& v) { return v.w == kBlank; }
__device__ inline void make_blank(char* place) { *reinterpret_cast<uint4*>(place) = make_uint4(kBlank, kBlank, kBlank, kBlank); }

// For a warp: look() loads what the lane still misses, and says whether it has all. waits_for(): the peer to blame. False: something
// failed.
template <typename Look, typename Peer>
__device__ inline bool await_pieces(const Common& k, Phase phase, std::uint32_t step, const Peer& waits_for, const Look& look) {
  if (!__all_sync(~0u, look())) {
    const std::uint64_t first = nanoseconds();
    std::uint64_t begun = first;
    for (std::uint32_t i = 1; !__all_sync(~0u, look()); ++i) {
      if (i % 64 != 0) continue;
      const std::uint32_t peer = waits_for();
      const Verdict verdict = ask(k, nullptr, i / 64, first, begun, phase, step, peer, 0);
      if (verdict == Verdict::Busy) begun = nanoseconds();
      if (__any_sync(~0u, verdict == Verdict::Failed)) return false;
      if (__any_sync(~0u, verdict == Verdict::Left) && !__all_sync(~0u, look())) {  // all that it sent was there before
        fail_of_leaving(k, phase, step, peer, 0);
        return false;
      }
    }
  }
  linger(k, step);
  return true;
}

}  // namespace pplx::cuda
