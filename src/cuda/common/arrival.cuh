// A vec16 shows by itself whether it has come, all sixteen bytes or none. So no release, which would wait
// for the link, stands between a row's last byte and its reader.
//
//   tagged   its last word is the step's: counts, routes, headers. What lay there before has another tag.
//   blank    rows. A place is blank, all ones, until its vec16 is stored there; its reader makes it blank again. A sum is never
//            blank: arithmetic makes NaNs of one bit pattern only, and that has a zero. Numbers that are copied may look blank, and become
//            such a NaN (store_numbers). A dispatch carries any bits: a row of which some vec16 looks blank gets an arrival word, and a
//            reader that waits for long looks at that.
//
// A place is written again only after its reader has made it blank: a peer answers the set's next dispatch, which this rank sends
// in a kernel after the one that read; and a dispatch's places are read before its combine is sent.
#pragma once

#include "wait.cuh"

namespace pplx::cuda {

__device__ inline bool is_blank(const uint4& v) { return v.w == kBlank; }
__device__ inline void make_blank(char* place) { *reinterpret_cast<uint4*>(place) = make_uint4(kBlank, kBlank, kBlank, kBlank); }

// Stores numbers of the caller's. What looks blank is a NaN, and stays one.
__device__ inline void store_numbers(char* place, uint4 v) {
  if (is_blank(v)) v.w = 0x7fffffffu;
  store_vec16(place, v);
}

// Looks of a wait between two calls of poll_failure().
inline constexpr std::uint32_t kLooksBetween = 64;

inline constexpr std::uint32_t kLooksAtWord = 16;  // between two at the arrival word of a row that may look blank

// The vec16s that a look loads, of those that a lane misses: a bit each.
__device__ inline std::uint32_t looked_at(std::uint32_t missing, bool all) { return all ? missing : missing & ~(missing - 1); }

// Waits, all lanes of a warp, for the vec16s that they miss. look(all) loads all of them or one, and returns true if that has come.
// One is enough while nothing has: a hundred blocks that load all of their rows again and again are in the way of the stores that
// they wait for. waits_for(): the peer to blame. False: something failed.
template <typename Look, typename Peer>
__device__ inline bool await_vec16s(const Common& k, Phase phase, std::uint32_t step, const Peer& waits_for, const Look& look) {
  if (!__all_sync(~0u, look(true))) {
    const std::uint64_t first = nanoseconds();
    std::uint64_t begun = first;
    for (std::uint32_t i = 1;; ++i) {
      if (__all_sync(~0u, look(false)) && __all_sync(~0u, look(true))) break;
      if (i % kLooksBetween != 0) continue;
      const std::uint32_t peer = waits_for();
      const Verdict verdict = poll_failure(k, nullptr, i / kLooksBetween, first, begun, phase, step, peer, 0);
      if (verdict == Verdict::Busy) begun = nanoseconds();
      if (__any_sync(~0u, verdict == Verdict::Failed)) return false;
      if (__any_sync(~0u, verdict == Verdict::Left) && !__all_sync(~0u, look(true))) {  // all that it sent was there before
        fail(k, {AbortReason::Closed, phase, k.c.rank, peer, step}, arrival_word(k.generation, step), 0);
        return false;
      }
    }
  }
  fuzz_delay(k, step);
  return true;
}

__device__ inline bool is_tagged(const Common& k, const uint4& vec16, std::uint32_t step) {
  return vec16.w == tag_of(k.generation, step);
}

// Waits, by one thread, for a tagged vec16. False: something failed.
static __device__ __noinline__ bool await_tagged(const Common& k, const char* place, Phase phase, std::uint32_t step,
                                                 std::uint32_t peer, uint4& vec16) {
  // A tag does not tell generation and step apart, so an error takes what was seen for this generation's.
  const auto seen = [&] {
    return is_blank(vec16) || vec16.w == 0 ? 0 : arrival_word(k.generation, vec16.w - tag_of(k.generation, 0));
  };
  const auto came = [&] { return is_tagged(k, vec16 = load_vec16(place), step); };
  if (!keep_looking<kLooksBetween>(k, place, phase, step, peer, seen, came)) return false;
  fuzz_delay(k, step);
  return true;
}

__device__ inline void store_tagged(const Common& k, char* to, std::uint32_t step, std::uint32_t x, std::uint32_t y,
                                    std::uint32_t z) {
  store_vec16(to, make_uint4(x, y, z, tag_of(k.generation, step)));
}

}  // namespace pplx::cuda
