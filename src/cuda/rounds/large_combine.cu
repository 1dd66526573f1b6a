// combine() of many tokens in pieces: one launch, or one per half. The receive half sends what the send half must wait for.
#include "../host/launch_table.h"
#include "../large/combine_kernel.cuh"

namespace pplx::cuda {
namespace {

struct CombineRoundsShared : CombineManyShared {
  RoundRows rounds[kCombiners];
};

// A remote peer's piece of what comes back. False: it is not what this rank expects.
__device__ inline bool check_piece(const CombineArguments& a, std::uint32_t step, std::uint32_t peer, std::uint32_t piece, std::uint32_t pieces) {
  const Common& k = a.common;
  const BlockHeader h = load_piece_header(own_slot(k, set_of(k.c, step), Op::Combine, peer) + k.heap.piece_at(Op::Combine, piece));
  if (!check_header(k, h, Phase::CombineRecv, step, peer)) return false;
  // With other flags there are no rows, and no pieces.
  if (piece == 0 && !check_combine_header(a, step, peer, h.rows, h.flags)) return false;
  return check_piece_header(k, h, Phase::CombineRecv, step, peer, piece, pieces, rows_of_own_round(a.pieces, a.plan, k, peer, piece, pieces));
}

// By one warp of a launch that receives: what remote peers have read, and what they have sent.
__device__ inline void pass_on_combines(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  bool mine = false;
  if (threadIdx.x % 32 == 0) mine = claim_words(k, step, Op::Combine);
  if (!__any_sync(~0u, mine)) return;
  const std::uint32_t rounds = (a.own + p.tokens - 1) / p.tokens;
  const auto begin = [&](PassedPeer& of) {
    of.all_landed = rounds;
    of.all_room = rounds_to_be_free(p, *kept_rounds(p, of.peer));
  };
  const auto take = [&](std::uint32_t peer, std::uint32_t piece) { return check_piece(a, step, peer, piece, rounds); };
  if (!pass_on_rounds(k, p, step, {Op::Combine, Phase::CombineSend, Phase::CombineRecv}, begin, take)) return;
  for (std::uint32_t i = threadIdx.x % 32; i < remote_peers(k); i += 32)
    see_pieces_leave(k, p, step, Op::Dispatch, Phase::DispatchSend, k.order[i]);
  __syncwarp();
}

// By one warp of each thread block: those that nobody has sent yet.
__device__ inline void send_slice_headers(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  for (;;) {
    const std::uint32_t nth = 1 + claim(k, a.pieces, step, Claim::CombineAside);
    if (nth >= k.slice.of) return;
    send_slice_header(a, step, member(k, k.slice.number + nth));
  }
}

// By the same, of all thread blocks together.
__device__ inline void receive_slice_headers(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  for (std::uint32_t i = 1 + blockIdx.x; i < k.slice.of; i += gridDim.x)
    if (threadIdx.x % 32 == 0) receive_slice_header(a, step, (k.slice.number + i) % k.slice.of);
  __syncwarp();
}

template <typename T, bool kMappedOnly>
__device__ __forceinline__ void run_combine_many_pieces(const CombineArguments& a) {
  PPLX_LAUNCHED_SHARED(words);
  PPLX_SHARED(CombineRoundsShared, s);
  const Common& k = a.common;
  const std::uint64_t begun = k.stamps != nullptr ? nanoseconds() : 0;
  mark_stage(k, Stage::CombineBegins);
  SpanTimer::begin();
  const std::uint32_t warp = threadIdx.x / 32;
  const bool combines = warp < kCombiners;
  if (combines && threadIdx.x % 32 == 0) s.turns[warp].init();
  std::uint32_t step = 0;
  if (!begin_combine(a, step, 0, s.combine)) return;
  if (a.recv) begin_to_close(k, step);
  if (combines) {
    ManyCombiner<T, kMappedOnly, true> combiner(a, step, s.combine, reinterpret_cast<char*>(words) + warp * kCombinerBytes, s.turns[warp]);
    const std::uint32_t senders = a.recv ? senders_of(gridDim.x, kSumTilesOut * kSumTileBytes, kSendingCombiners) : kCombiners;
    if (a.pieces.begin != a.pieces.end && warp < senders) combiner.send_rounds(senders, s.rounds[warp]);
    const bool good = a.recv && combiner.receive_rounds();
    if (!kMappedOnly && good && k.slice.of > 1) combiner.take_from_replicas();
  } else {
    if (blockIdx.x == 0) forget_rounds(k, a.pieces, step, Op::Dispatch);
    if (a.pieces.begins) begin_to_send<!kMappedOnly>(a, step, s.combine);
    if (!kMappedOnly && a.recv && k.slice.of > 1) send_slice_headers(a, step);
    if (!kMappedOnly && a.recv && k.remote != 0) pass_on_combines(a, step);
    if (a.recv) receive_all_headers<!kMappedOnly>(a, step);
    if (!kMappedOnly && a.recv && k.slice.of > 1) receive_slice_headers(a, step);
  }
  if (a.recv) close_set(k, step);
  mark_stage(k, Stage::CombineEnds);
  SpanTimer::end(k);
  stamp(k, Op::Combine, step, begun);
}

}  // namespace

namespace large_rounds {
namespace {

template <typename T, bool kMappedOnly>
__global__ void __launch_bounds__(kCombineManyThreads, 1) combine(const __grid_constant__ CombineArguments a) {
  run_combine_many_pieces<T, kMappedOnly>(a);
}

}  // namespace

Choice<CombineArguments> choose(const Config& c, const CombineCall& call) {
  return choose_type(c.dtype, [&](auto type) -> Choice<CombineArguments> {
    using T = decltype(type);
    return {"large_rounds::combine", call.mapped_only ? combine<T, true> : combine<T, false>, kCombineManyThreads, kCombineManyBytes};
  });
}

}  // namespace large_rounds

bool can_combine_many_pieces(const Config& c, std::uint32_t shared_bytes) {
  return can_combine_many(c, shared_bytes) && kCombineManyBytes + kBytesOfObject<CombineRoundsShared> <= shared_bytes;
}

}  // namespace pplx::cuda
