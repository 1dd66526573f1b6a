// combine() and release() in pieces: one launch, or one per half. The receive half sends what the send half must wait for.
#include "../host/launch_table.h"
#include "../large/combine_kernel.cuh"

namespace pplx::cuda {
namespace {

// A remote peer's piece of what comes back. False: it is not what this rank expects.
__device__ inline bool check_piece(const CombineArguments& a, std::uint32_t step, std::uint32_t peer, std::uint32_t piece, std::uint32_t pieces) {
  const Common& k = a.common;
  const BlockHeader h = load_piece_header(own_slot(k, set_of(k.c, step), Op::Combine, peer) + k.heap.piece_at(Op::Combine, piece));
  if (!check_header(k, h, Phase::CombineRecv, step, peer)) return false;
  // With other flags there are no rows, and no pieces.
  if (piece == 0 && !check_combine_header(a, step, peer, h.rows, h.flags)) return false;
  return check_piece_header(k, h, Phase::CombineRecv, step, peer, piece, pieces, a.release ? PieceRows{0, 0} : rows_of_own_round(a.pieces, a.plan, k, peer, piece, pieces));
}

// Passes on what remote peers have read, and what they have sent. By one warp of a launch that receives.
__device__ inline void pass_on_combines(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  bool mine = false;
  if (threadIdx.x % 32 == 0) mine = claim_words(k, step, Op::Combine);
  if (!__any_sync(~0u, mine)) return;
  const std::uint32_t rounds = rounds_of_own(p, a.own);
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

template <bool kMappedOnly>
struct InRounds {
  struct Shared : LargeCombineShared {
    RoundRows rounds[kCombiners];
  };
  template <typename T>
  __device__ static __forceinline__ void work(const CombineArguments& a, std::uint32_t step, Shared& s, char* memory, std::uint32_t warp) {
    const Common& k = a.common;
    if (warp < kCombiners) {
      LargeCombiner<T, kMappedOnly, true> combiner(a, step, s, memory + warp * kCombinerBytes, s.turns[warp]);
      const std::uint32_t senders = a.recv ? senders_of(gridDim.x, kSumTilesOut * kSumTileBytes, kSendingCombiners) : kCombiners;
      if (a.pieces.begin != a.pieces.end && warp < senders) combiner.send_rounds(senders, s.rounds[warp]);
      if (a.recv) combiner.receive_rounds();
    } else {
      if (blockIdx.x == 0) forget_rounds(k, a.pieces, step, Op::Dispatch);
      if (a.pieces.begins) begin_to_send<!kMappedOnly>(a, step, s);
      if (!kMappedOnly && a.recv && k.remote != 0) pass_on_combines(a, step);
      if (a.recv) receive_all_headers<!kMappedOnly>(a, step);
    }
  }
};

}  // namespace

namespace large_rounds {
namespace {

template <typename T, bool kMappedOnly>
__global__ void __launch_bounds__(kLargeCombineThreads, 1) combine(const __grid_constant__ CombineArguments a) {
  run_combine_large<T, InRounds<kMappedOnly>>(a);
}

}  // namespace

Choice<CombineArguments> choose(const Config& c, const CombineCall& call) {
  return choose_type(c.dtype, [&](auto type) -> Choice<CombineArguments> {
    using T = decltype(type);
    return {"large_rounds::combine", call.mapped_only ? combine<T, true> : combine<T, false>, kLargeCombineThreads, kLargeCombineBytes};
  });
}

}  // namespace large_rounds

bool can_combine_rounds(const Config& c, std::uint32_t shared_bytes) {
  return can_combine_large(c, shared_bytes) && kLargeCombineBytes + kBytesOfObject<InRounds<false>::Shared> <= shared_bytes;
}

}  // namespace pplx::cuda
