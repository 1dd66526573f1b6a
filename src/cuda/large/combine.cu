// combine() of many tokens, and its release() in pieces: one launch, or one per half. In pieces the receive half
// sends the rounds for which the send half would have to wait.
#include <algorithm>

#include "../host/launch_table.h"
#include "copy.cuh"
#include "receive_sums.cuh"
#include "send_sums.cuh"

namespace pplx::cuda {
namespace {

// Warps of a plain one whose rows are only copied: those of copies, adders, and the dealer, which sends and receives headers.
inline constexpr std::uint32_t kLoader = kAdders, kStorer = kLoader + 1, kCopyTeller = kStorer + 1, kDealer = kCopyTeller + 1;

struct Copies {
  struct Shared : CombineShared {
    CopyRings copies;
    DealtRows dealt;

    __device__ void prepare(std::uint32_t warp) {
      if (threadIdx.x == 32 * kStorer) copies.init();
      if (warp == kDealer) dealt.init(kAdders);
    }
  };
  static constexpr std::uint32_t kThreads = 32 * (kDealer + 1), kBytes = kCopiesBytes + kDealtParts * kDealtPart;
  template <typename T>
  __device__ static __forceinline__ void work(const CombineArguments& a, std::uint32_t step, Shared& s, char* memory, std::uint32_t warp) {
    const RingMemory dealt{memory + kCopiesBytes, kDealtParts};
    if (warp < kAdders) {
      if (a.recv) SumAdder<T, AddersOf<kAdders, kVectorsOfAdder>>(a, step, s.dealt, dealt, warp).add_up();
    } else if (warp == kLoader) {
      if (a.send) CopyLoader<T>(a, step, s, s.copies, memory).load();
    } else if (warp == kStorer) {
      if (a.send) CopyStorer(a, step, s.copies, memory).store();
    } else if (warp == kCopyTeller) {
      if (a.send) tell_of_copies(a.common, step, s.copies);
    } else if (warp == kDealer) {
      if (a.send) begin_to_send(a, step, s);
      if (a.recv) SumDealer<false>(a, step, s, s.dealt, dealt).deal();
      if (a.recv) receive_all_headers(a, step);
    }
  }
};

// Two teams of adders, each with a dealer, and a teller. One team sends before it receives. kExtras: handles every combine; a herald
// sends headers and weights, and passes on words of remote peers.
template <bool kExtras>
struct Teams {
  using Adders = std::conditional_t<kExtras, AddersOf<kWideAdders, kVectorsOfWide>, AddersOf<kAddersOfTeam, kVectorsOfTeam>>;
  static constexpr std::uint32_t kOfTeam = Adders::kWarps, kSendDealer = 2 * kOfTeam, kSumDealer = kSendDealer + 1;
  static constexpr std::uint32_t kTeller = kSumDealer + 1, kHerald = kTeller + kExtras;
  // The team that sends meets there when it is done: rows that it receives come to memory that rows to send were in. Where some leave as
  // they are, so does the teller.
  static constexpr std::uint32_t kInSendingTeam = 1, kSendingTeam = 32 * (kOfTeam + 1 + kExtras);
  static constexpr std::uint32_t kThreads = 32 * (kHerald + 1), kBytes = 2 * kPartsOfTeam * kDealtPart + kOutBytes;

  struct Shared : CombineShared {
    DealtRows to_send, dealt[2];  // rows that the sending team sends; then rows that each team receives
    PartsOut out;
    RoundRows rounds;  // the sending dealer's

    __device__ void prepare(std::uint32_t warp) {
      if (warp == kSendDealer) to_send.init(kOfTeam);
      if (warp == kSendDealer) dealt[0].init(kOfTeam);
      if (warp == kSumDealer) dealt[1].init(kOfTeam);
      if (threadIdx.x == 32 * kTeller) out.init(kOfTeam);
    }
  };

  __device__ static void work_as_herald(const CombineArguments& a, std::uint32_t step, Shared& s) {
    const Common& k = a.common;
    if (blockIdx.x == 0 && k.heap.in_pieces) forget_rounds(k, a.pieces, step, Op::Dispatch);
    if (a.send) begin_to_send<true>(a, step, s);
    if (a.send && a.uses_weights) send_all_weights(a, step, 0, 1);
    if (a.send && k.remote != 0 && !k.heap.in_pieces && !has_relays(k)) send_remote_headers(a, step, s);
    if (a.recv && k.remote != 0) k.heap.in_pieces ? pass_on_combines(a, step) : pass_on_blocks(a, step);
    if (a.recv) receive_all_headers(a, step);
  }

  template <typename T>
  __device__ static __forceinline__ void work(const CombineArguments& a, std::uint32_t step, Shared& s, char* memory, std::uint32_t warp) {
    const bool dealer = warp == kSendDealer || warp == kSumDealer;
    const bool sends = a.send || (kExtras && (a.common.heap.in_pieces || a.relays.sources != 0));
    const std::uint32_t team = warp == kSumDealer || (warp >= kOfTeam && !dealer) ? 1 : 0;
    // Each team has half of the ring's memory. In a launch that receives nothing the team that sends has both halves.
    char *const out = memory, *const in = out + kOutBytes;
    const RingMemory to_send{in, a.recv ? kPartsOfTeam : 2 * kPartsOfTeam}, dealt{in + team * kPartsOfTeam * kDealtPart, kPartsOfTeam};
    if (kExtras && warp == kHerald) {
      work_as_herald(a, step, s);
    } else if (warp == kTeller) {
      if (!kExtras && a.send) begin_to_send(a, step, s);
      if (sends) SendTeller<kExtras>(a, step, s, s.out).tell_all();
      if (kExtras && sends) barrier_sync<kSendingTeam>(kInSendingTeam);
    } else if (dealer) {
      if (sends && team == 0) {
        if (a.send) s.claimed.wait();
        SendDealer<kExtras>(a, step, s, s.to_send, to_send).deal(s.rounds);
        barrier_sync<kSendingTeam>(kInSendingTeam);
      }
      if (a.recv) SumDealer<kExtras>(a, step, s, s.dealt[team], dealt).deal();
      if (!kExtras && a.recv && team == 1) receive_all_headers(a, step);
    } else {
      if (sends && team == 0) {
        SendAdder<T, Adders, kExtras>(a, step, s.to_send, to_send, warp, s.out, out).add_up();
        barrier_sync<kSendingTeam>(kInSendingTeam);
      }
      if (a.recv) SumAdder<T, Adders, kExtras>(a, step, s.dealt[team], dealt, warp - team * kOfTeam).add_up();
    }
  }
};
struct SumsOfRows : Teams<false> {};
struct SumsWithExtras : Teams<true> {};

}  // namespace

namespace large {
namespace {

// How::Shared: its shared memory; prepare(warp): before the first `__syncthreads`. How::work: what each warp does.
template <typename T, typename How>
__global__ void __launch_bounds__(How::kThreads, 1) combine(const __grid_constant__ CombineArguments a) {
  PPLX_LAUNCHED_SHARED(words);
  PPLX_SHARED(typename How::Shared, s);
  const Common& k = a.common;
  PPLX_SHARED(LaunchTime::Begun, begun);
  const LaunchTime time(k, begun, 0);
  mark_stage(k, 0, Stage::CombineBegins);
  SpanTimer::begin();
  const std::uint32_t warp = threadIdx.x / 32;
  s.prepare(warp);
  std::uint32_t step = 0;
  if (!begin_combine(a, step, 0, s, [] {})) return;
  time.keep(Op::Combine, step, a.send, a.recv);
  if (a.recv) begin_to_close(k, step);
  count_step(a, s.rows_begin);
  How::template work<T>(a, step, s, reinterpret_cast<char*>(words), warp);
  if (a.recv) close_set(k, step);
  mark_stage(k, step, Stage::CombineEnds);
  SpanTimer::end(k);
  time.end(Op::Combine, step, a.send, a.recv, true);
}

template <typename T, typename How>
Choice<CombineArguments> choice(const char* name) {
  return {name, combine<T, How>, How::kThreads, How::kBytes};
}

}  // namespace

Choice<CombineArguments> choose(const Config& c, const CombineCall& call) {
  return choose_type(c.dtype, [&](auto type) {
    using T = decltype(type);
    if (in_pieces(c) || !call.mapped_only) return choice<T, SumsWithExtras>("large::combine, rows are sums, with extras");
    if (c.layout == LayoutKind::Compact) return choice<T, Copies>("large::combine, rows are copied");
    return choice<T, SumsOfRows>("large::combine, rows are sums");
  });
}

}  // namespace large

template <typename How>
inline constexpr std::size_t kBytesOf = How::kBytes + kBytesOfObject<typename How::Shared>;

bool can_combine_large(const Config& c, std::uint32_t shared_bytes) {
  const bool has_room = !c.combine_fp8 || c.hidden * dtype_bytes(c.dtype) >= 32;  // codes and scales lie where numbers would
  return has_room && (in_pieces(c) || c.replicas == 1) &&
         std::max({kBytesOf<SumsWithExtras>, kBytesOf<Copies>, kBytesOf<SumsOfRows>}) <= shared_bytes;
}

}  // namespace pplx::cuda
