// combine() of many tokens inside a node: one launch, or one per half.
#include <algorithm>

#include "copy.cuh"
#include "send_sums.cuh"
#include "receive_sums.cuh"
#include "../host/launch_table.h"
#include "combine_kernel.cuh"

namespace pplx::cuda {
namespace {

struct General {
  static constexpr std::uint32_t kThreads = kLargeCombineThreads, kBytes = kLargeCombineBytes;
  template <typename T>
  __device__ static __forceinline__ void run(const CombineArguments& a) {
    PPLX_LAUNCHED_SHARED(words);
    PPLX_SHARED(LargeCombineShared, s);
    const auto prepare = [&](std::uint32_t warp) {
      if (warp < kCombiners && threadIdx.x % 32 == 0) s.turns[warp].init();
    };
    run_combine_large(a, s.combine, prepare, [&](std::uint32_t warp, std::uint32_t step) {
      if (warp < kCombiners) {
        LargeCombiner<T, false> combiner(a, step, s.combine, reinterpret_cast<char*>(words) + warp * kCombinerBytes, s.turns[warp]);
        const std::uint32_t senders = a.recv ? senders_of(gridDim.x, kSumTilesOut * kSumTileBytes, kSendingCombiners) : kCombiners;
        if (a.send && warp < senders) combiner.send(senders);
        if (a.recv) combiner.receive();
      } else {
        if (a.send) begin_to_send(a, step, s.combine);
        if (a.recv) receive_all_headers(a, step);
      }
    });
  }
};

// Warps of a plain one whose rows are only copied: those of copies, adders, and the dealer, which sends and receives headers.
inline constexpr std::uint32_t kLoader = kAdders, kStorer = kLoader + 1, kCopyTeller = kStorer + 1, kDealer = kCopyTeller + 1;
inline constexpr std::uint32_t kPlainThreads = 32 * (kDealer + 1);
inline constexpr std::uint32_t kPlainBytes = kCombinerBytes + kCopiesBytes + kDealtParts * kDealtPart;

struct CombinePlainShared {
  CombineShared combine;
  CombinerTurns turns;
  CopyRings copies;
  DealtRows dealt;
  std::uint32_t next;  // the next of this thread block's tokens
};

struct Copies {
  static constexpr std::uint32_t kThreads = kPlainThreads, kBytes = kPlainBytes;
  template <typename T>
  __device__ static __forceinline__ void run(const CombineArguments& a) {
    PPLX_LAUNCHED_SHARED(words);
    PPLX_SHARED(CombinePlainShared, s);
    const auto prepare = [&](std::uint32_t warp) {
      if (threadIdx.x == 32 * kLoader) s.turns.init();
      if (threadIdx.x == 32 * kStorer) s.copies.init();
      if (threadIdx.x == 32 * kDealer) s.next = 0;
      if (warp == kDealer) s.dealt.init(kAdders);
    };
    run_combine_large(a, s.combine, prepare, [&](std::uint32_t warp, std::uint32_t step) {
      char* const memory = reinterpret_cast<char*>(words);
      char* const copies = memory + kCombinerBytes;
      const RingMemory dealt{copies + kCopiesBytes, kDealtParts};
      if (warp < kAdders) {
        if (a.recv) SumAdder<T, AddersOf<kAdders, kVectorsOfAdder>>(a, step, s.dealt, dealt, warp).add_up();
      } else if (warp == kLoader) {
        if (a.send) CopyLoader<T>(a, step, s.combine, memory, s.turns, s.copies, copies).load();
      } else if (warp == kStorer) {
        if (a.send) CopyStorer(a, s.copies, copies).store();
      } else if (warp == kCopyTeller) {
        if (a.send) tell_of_copies(a.common, step, s.copies);
      } else if (warp == kDealer) {
        if (a.send) begin_to_send(a, step, s.combine);
        if (a.recv) SumDealer<false>(a, step, s.combine, s.dealt, dealt, s.next).deal();
        if (a.recv) receive_all_headers(a, step);
      }
    });
  }
};

// Warps of a plain one whose rows are sums: two teams of adders and a dealer, and the teller, which sends headers. One team sends, and then receives as
// the other one does from the start.
using TeamAdders = AddersOf<kAddersOfTeam, kVectorsOfTeam>;
inline constexpr std::uint32_t kSendDealer = 2 * kAddersOfTeam, kSumDealer = kSendDealer + 1, kTeller = kSumDealer + 1;
inline constexpr std::uint32_t kSumsThreads = 32 * (kTeller + 1);
// The team that sends meets there when it is done: rows that it receives come to memory that rows to send were in.
inline constexpr std::uint32_t kInSendingTeam = 1, kSendingTeam = 32 * (kAddersOfTeam + 1);
inline constexpr std::uint32_t kSumsBytes = 2 * kPartsOfTeam * kDealtPart + kOutBytes;

struct CombineSumsShared {
  CombineShared combine;
  DealtRows to_send, dealt[2];  // rows that the sending team sends; then rows that each team receives
  PartsOut out;
  std::uint32_t next;  // the next of this thread block's tokens
};

struct SumsOfRows {
  static constexpr std::uint32_t kThreads = kSumsThreads, kBytes = kSumsBytes;
  template <typename T>
  __device__ static __forceinline__ void run(const CombineArguments& a) {
    PPLX_LAUNCHED_SHARED(words);
    PPLX_SHARED(CombineSumsShared, s);
    const auto prepare = [&](std::uint32_t warp) {
      if (warp == kSendDealer) s.to_send.init(kAddersOfTeam);
      if (warp == kSendDealer) s.dealt[0].init(kAddersOfTeam);
      if (warp == kSumDealer) s.dealt[1].init(kAddersOfTeam);
      if (threadIdx.x == 32 * kTeller) s.out.init(kAddersOfTeam);
      if (threadIdx.x == 32 * kTeller) s.next = 0;
    };
    run_combine_large(a, s.combine, prepare, [&](std::uint32_t warp, std::uint32_t step) {
      const bool dealer = warp == kSendDealer || warp == kSumDealer;
      const std::uint32_t team = warp == kSumDealer || (warp >= kAddersOfTeam && !dealer) ? 1 : 0;
      // Each team has half of the ring's memory. In a launch that receives nothing the team that sends has both halves.
      char *const out = reinterpret_cast<char*>(words), *const in = out + kOutBytes;
      const RingMemory to_send{in, a.recv ? kPartsOfTeam : 2 * kPartsOfTeam}, dealt{in + team * kPartsOfTeam * kDealtPart, kPartsOfTeam};
      if (warp == kTeller) {
        if (a.send) begin_to_send(a, step, s.combine);
        if (a.send) SendTeller(a, step, s.out, out).tell_all();
      } else if (dealer) {
        if (a.send && team == 0) {
          s.combine.claimed.wait();
          SendDealer(a, step, s.combine, s.to_send, to_send).deal();
          barrier_sync<kInSendingTeam, kSendingTeam>();
        }
        if (a.recv) SumDealer<false>(a, step, s.combine, s.dealt[team], dealt, s.next).deal();
        if (a.recv && team == 1) receive_all_headers(a, step);
      } else {
        if (a.send && team == 0) {
          SendAdder<T, TeamAdders>(a, step, s.to_send, to_send, warp, s.out, out).add_up();
          barrier_sync<kInSendingTeam, kSendingTeam>();
        }
        if (a.recv) SumAdder<T, TeamAdders>(a, step, s.dealt[team], dealt, warp - team * kAddersOfTeam).add_up();
      }
    });
  }
};

// Warps of one whose rows are offered: teams of adders and a dealer, of which each receives from the start, and one more that offers, and sends what must
// be sent.
using FetchingAdders = AddersOf<kAddersOfFetchingTeam, kVectorsOfFetchingTeam>;
inline constexpr std::uint32_t kFetchingAdders = kFetchingTeams * kAddersOfFetchingTeam, kOfferer = kFetchingAdders + kFetchingTeams;
inline constexpr std::uint32_t kFetchedThreads = 32 * (kOfferer + 1);
inline constexpr std::uint32_t kFetchedBytes = kCombinerBytes + kFetchingTeams * kPartsOfFetchingTeam * kDealtPart;

struct CombineFetchedShared {
  CombineShared combine;
  CombinerTurns turns;
  DealtRows dealt[kFetchingTeams];
  char* rows_at[kFetchingTeams][kMaxPeers];
  std::uint32_t next;  // the next of this thread block's tokens
};

struct Offers {
  static constexpr std::uint32_t kThreads = kFetchedThreads, kBytes = kFetchedBytes;
  template <typename T>
  __device__ static __forceinline__ void run(const CombineArguments& a) {
    PPLX_LAUNCHED_SHARED(words);
    PPLX_SHARED(CombineFetchedShared, s);
    const std::uint32_t warp = threadIdx.x / 32;
    const bool dealer = warp >= kFetchingAdders && warp < kOfferer;
    const std::uint32_t team = dealer ? warp - kFetchingAdders : warp / kAddersOfFetchingTeam;
    const auto prepare = [&](std::uint32_t) {
      if (dealer) s.dealt[team].init(kAddersOfFetchingTeam);
      if (threadIdx.x == 32 * kOfferer) s.turns.init();
      if (threadIdx.x == 32 * kOfferer) s.next = 0;
    };
    run_combine_large(a, s.combine, prepare, [&](std::uint32_t, std::uint32_t step) {
      char* const memory = reinterpret_cast<char*>(words);
      const RingMemory dealt{memory + kCombinerBytes + team * kPartsOfFetchingTeam * kDealtPart, kPartsOfFetchingTeam};
      if (warp == kOfferer) {
        if (a.send) {
          begin_to_offer(a, step, s.combine);
          LargeCombiner<T, true>(a, step, s.combine, memory, s.turns).send_rest();
        }
        if (a.recv) receive_all_headers(a, step);
      } else if (dealer) {
        if (a.recv) SumDealer<true>(a, step, s.combine, s.dealt[team], dealt, s.next, s.rows_at[team]).deal();
      } else {
        if (a.recv) SumAdder<T, FetchingAdders>(a, step, s.dealt[team], dealt, warp % kAddersOfFetchingTeam).add_up();
      }
    });
  }
};

}  // namespace

namespace large {
namespace {

template <typename T, typename How>
__global__ void __launch_bounds__(How::kThreads, 1) combine(const __grid_constant__ CombineArguments a) {
  How::template run<T>(a);
}

template <typename T, typename How>
Choice<CombineArguments> choice(const char* name) {
  return {name, combine<T, How>, How::kThreads, How::kBytes};
}

}  // namespace

Choice<CombineArguments> choose(const Config& c, const CombineCall& call) {
  return choose_type(c.dtype, [&](auto type) {
    using T = decltype(type);
    if (!call.mapped_only) return choice<T, General>("large::combine, general");
    if (call.fetches) return choice<T, Offers>("large::combine, rows are fetched");
    if (c.layout == LayoutKind::Compact) return choice<T, Copies>("large::combine, rows are copied");
    return choice<T, SumsOfRows>("large::combine, rows are sums");
  });
}

}  // namespace large

namespace {

constexpr std::size_t kMostBytes = std::max({kLargeCombineBytes + kBytesOfObject<LargeCombineShared>, kPlainBytes + kBytesOfObject<CombinePlainShared>,
                                             kFetchedBytes + kBytesOfObject<CombineFetchedShared>, kSumsBytes + kBytesOfObject<CombineSumsShared>});

}  // namespace

bool can_combine_large(const Config& c, std::uint32_t shared_bytes) {
  return (in_pieces(c) || (c.replicas == 1 && c.remote_peers == 0)) && kMostBytes <= shared_bytes;
}

}  // namespace pplx::cuda
