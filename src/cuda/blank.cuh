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

inline constexpr std::uint32_t kBlank = 0xffffffffu;

__device__ inline void store_piece(char* to, const uint4& v) {
  const std::uint64_t low = v.x | std::uint64_t{v.y} << 32, high = v.z | std::uint64_t{v.w} << 32;
  asm volatile("{\n\t.reg .b128 piece;\n\tmov.b128 piece, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], piece;\n\t}" ::"l"(to),
               "l"(low), "l"(high)
               : "memory");
}
__device__ inline uint4 load_piece(const char* from) {
  std::uint64_t low, high;
  asm volatile("{\n\t.reg .b128 piece;\n\tld.relaxed.sys.global.b128 piece, [%2];\n\tmov.b128 {%0, %1}, piece;\n\t}"
               : "=l"(low), "=l"(high)
               : "l"(from)
               : "memory");
  return make_uint4(static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32), static_cast<std::uint32_t>(high),
                    static_cast<std::uint32_t>(high >> 32));
}
__device__ inline bool is_blank(const uint4& v) { return v.w == kBlank; }
__device__ inline void make_blank(char* place) { *reinterpret_cast<uint4*>(place) = make_uint4(kBlank, kBlank, kBlank, kBlank); }

// For a warp: look() loads what the lane still misses, and says whether it has all. waits_for(): the peer to blame. False: something
// failed.
template <typename Look, typename Peer>
__device__ inline bool await_pieces(const Common& k, Phase phase, std::uint32_t step, const Peer& waits_for, const Look& look) {
  if (!__all_sync(~0u, look())) {
    const std::uint64_t begun = nanoseconds();
    for (std::uint32_t i = 1; !__all_sync(~0u, look()); ++i) {
      if (i % 64 != 0) continue;
      const std::uint32_t peer = waits_for();
      const Verdict verdict = ask(k, i / 64, begun, phase, step, peer, 0);
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
