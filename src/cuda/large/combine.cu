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
  using Shared = LargeCombineShared;
  static constexpr std::uint32_t kThreads = kLargeCombineThreads, kBytes = kLargeCombineBytes;
  template <typename T>
  __device__ static __forceinline__ void work(const CombineArguments& a, std::uint32_t step, Shared& s, char* memory, std::uint32_t warp) {
    if (warp < kCombiners) {
      LargeCombiner<T, false> combiner(a, step, s, memory + warp * kCombinerBytes, s.turns[warp]);
      const std::uint32_t senders = a.recv ? senders_of(gridDim.x, kSumTilesOut * kSumTileBytes, kSendingCombiners) : kCombiners;
      if (a.send && warp < senders) combiner.send(senders);
      if (a.recv) combiner.receive();
    } else {
      if (a.send) begin_to_send(a, step, s);
      if (a.recv) receive_all_headers(a, step);
    }
  }
};

// Warps of a plain one whose rows are only copied: those of copies, adders, and the dealer, which sends and receives headers.
inline constexpr std::uint32_t kLoader = kAdders, kStorer = kLoader + 1, kCopyTeller = kStorer + 1, kDealer = kCopyTeller + 1;

struct Copies {
  struct Shared : CombineShared {
    CombinerTurns turns;
    CopyRings copies;
    DealtRows dealt;
    std::uint32_t next;  // the next of this thread block's tokens

    __device__ void prepare(std::uint32_t warp) {
      if (threadIdx.x == 32 * kLoader) turns.init();
      if (threadIdx.x == 32 * kStorer) copies.init();
      if (threadIdx.x == 32 * kDealer) next = 0;
      if (warp == kDealer) dealt.init(kAdders);
    }
  };
  static constexpr std::uint32_t kThreads = 32 * (kDealer + 1), kBytes = kCombinerBytes + kCopiesBytes + kDealtParts * kDealtPart;
  template <typename T>
  __device__ static __forceinline__ void work(const CombineArguments& a, std::uint32_t step, Shared& s, char* memory, std::uint32_t warp) {
    char* const copies = memory + kCombinerBytes;
    const RingMemory dealt{copies + kCopiesBytes, kDealtParts};
    if (warp < kAdders) {
      if (a.recv) SumAdder<T, AddersOf<kAdders, kVectorsOfAdder>>(a, step, s.dealt, dealt, warp).add_up();
    } else if (warp == kLoader) {
      if (a.send) CopyLoader<T>(a, step, s, memory, s.turns, s.copies, copies).load();
    } else if (warp == kStorer) {
      if (a.send) CopyStorer(a, s.copies, copies).store();
    } else if (warp == kCopyTeller) {
      if (a.send) tell_of_copies(a.common, step, s.copies);
    } else if (warp == kDealer) {
      if (a.send) begin_to_send(a, step, s);
      if (a.recv) SumDealer<false>(a, step, s, s.dealt, dealt, s.next).deal();
      if (a.recv) receive_all_headers(a, step);
    }
  }
};

// Warps of a plain one whose rows are sums: two teams of adders and a dealer, and the teller, which sends headers. One team sends before it
// receives.
using TeamAdders = AddersOf<kAddersOfTeam, kVectorsOfTeam>;
inline constexpr std::uint32_t kSendDealer = 2 * kAddersOfTeam, kSumDealer = kSendDealer + 1, kTeller = kSumDealer + 1;
// The team that sends meets there when it is done: rows that it receives come to memory that rows to send were in.
inline constexpr std::uint32_t kInSendingTeam = 1, kSendingTeam = 32 * (kAddersOfTeam + 1);

struct SumsOfRows {
  struct Shared : CombineShared {
    DealtRows to_send, dealt[2];  // rows that the sending team sends; then rows that each team receives
    PartsOut out;
    std::uint32_t next;  // the next of this thread block's tokens

    __device__ void prepare(std::uint32_t warp) {
      if (warp == kSendDealer) to_send.init(kAddersOfTeam);
      if (warp == kSendDealer) dealt[0].init(kAddersOfTeam);
      if (warp == kSumDealer) dealt[1].init(kAddersOfTeam);
      if (threadIdx.x == 32 * kTeller) out.init(kAddersOfTeam);
      if (threadIdx.x == 32 * kTeller) next = 0;
    }
  };
  static constexpr std::uint32_t kThreads = 32 * (kTeller + 1), kBytes = 2 * kPartsOfTeam * kDealtPart + kOutBytes;
  template <typename T>
  __device__ static __forceinline__ void work(const CombineArguments& a, std::uint32_t step, Shared& s, char* memory, std::uint32_t warp) {
    const bool dealer = warp == kSendDealer || warp == kSumDealer;
    const std::uint32_t team = warp == kSumDealer || (warp >= kAddersOfTeam && !dealer) ? 1 : 0;
    // Each team has half of the ring's memory. In a launch that receives nothing the team that sends has both halves.
    char *const out = memory, *const in = out + kOutBytes;
    const RingMemory to_send{in, a.recv ? kPartsOfTeam : 2 * kPartsOfTeam}, dealt{in + team * kPartsOfTeam * kDealtPart, kPartsOfTeam};
    if (warp == kTeller) {
      if (a.send) begin_to_send(a, step, s);
      if (a.send) SendTeller(a, step, s.out, out).tell_all();
    } else if (dealer) {
      if (a.send && team == 0) {
        s.claimed.wait();
        SendDealer(a, step, s, s.to_send, to_send).deal();
        barrier_sync<kInSendingTeam, kSendingTeam>();
      }
      if (a.recv) SumDealer<false>(a, step, s, s.dealt[team], dealt, s.next).deal();
      if (a.recv && team == 1) receive_all_headers(a, step);
    } else {
      if (a.send && team == 0) {
        SendAdder<T, TeamAdders>(a, step, s.to_send, to_send, warp, s.out, out).add_up();
        barrier_sync<kInSendingTeam, kSendingTeam>();
      }
      if (a.recv) SumAdder<T, TeamAdders>(a, step, s.dealt[team], dealt, warp - team * kAddersOfTeam).add_up();
    }
  }
};

// Warps of one whose rows are offered: teams of adders and a dealer, which receive, and one more that offers, and sends what must be sent.
using FetchingAdders = AddersOf<kAddersOfFetchingTeam, kVectorsOfFetchingTeam>;
inline constexpr std::uint32_t kFetchingAdders = kFetchingTeams * kAddersOfFetchingTeam, kOfferer = kFetchingAdders + kFetchingTeams;

struct Offers {
  __device__ static bool is_dealer(std::uint32_t warp) { return warp >= kFetchingAdders && warp < kOfferer; }
  __device__ static std::uint32_t team_of(std::uint32_t warp) { return is_dealer(warp) ? warp - kFetchingAdders : warp / kAddersOfFetchingTeam; }
  struct Shared : CombineShared {
    CombinerTurns turns;
    DealtRows dealt[kFetchingTeams];
    char* rows_at[kFetchingTeams][kMaxPeers];
    std::uint32_t next;  // the next of this thread block's tokens

    __device__ void prepare(std::uint32_t warp) {
      if (is_dealer(warp)) dealt[team_of(warp)].init(kAddersOfFetchingTeam);
      if (threadIdx.x == 32 * kOfferer) turns.init();
      if (threadIdx.x == 32 * kOfferer) next = 0;
    }
  };
  static constexpr std::uint32_t kThreads = 32 * (kOfferer + 1), kBytes = kCombinerBytes + kFetchingTeams * kPartsOfFetchingTeam * kDealtPart;
  template <typename T>
  __device__ static __forceinline__ void work(const CombineArguments& a, std::uint32_t step, Shared& s, char* memory, std::uint32_t warp) {
    const std::uint32_t team = team_of(warp);
    const RingMemory dealt{memory + kCombinerBytes + team * kPartsOfFetchingTeam * kDealtPart, kPartsOfFetchingTeam};
    if (warp == kOfferer) {
      if (a.send) {
        begin_to_offer(a, step, s);
        LargeCombiner<T, true>(a, step, s, memory, s.turns).send_rest();
      }
      if (a.recv) receive_all_headers(a, step);
    } else if (is_dealer(warp)) {
      if (a.recv) SumDealer<true>(a, step, s, s.dealt[team], dealt, s.next, s.rows_at[team]).deal();
    } else {
      if (a.recv) SumAdder<T, FetchingAdders>(a, step, s.dealt[team], dealt, warp % kAddersOfFetchingTeam).add_up();
    }
  }
};

}  // namespace

namespace large {
namespace {

template <typename T, typename How>
__global__ void __launch_bounds__(How::kThreads, 1) combine(const __grid_constant__ CombineArguments a) {
  run_combine_large<T, How>(a);
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

template <typename How>
inline constexpr std::size_t kBytesOf = How::kBytes + kBytesOfObject<typename How::Shared>;

bool can_combine_large(const Config& c, std::uint32_t shared_bytes) {
  return (in_pieces(c) || (c.replicas == 1 && c.remote_peers == 0)) &&
         std::max({kBytesOf<General>, kBytesOf<Copies>, kBytesOf<SumsOfRows>, kBytesOf<Offers>}) <= shared_bytes;
}

}  // namespace pplx::cuda
