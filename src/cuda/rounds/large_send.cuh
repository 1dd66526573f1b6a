// A worker of a dispatch in pieces that sends: a token of a chunk at a time, in tiles. Bulk copies bring a tile to shared memory, long before it
// is needed, and take it to every rank that wants the token; in between lies the quantisation.
#pragma once

#include "../decode/dispatch_send.cuh"
#include "../plan/chunk_plan.cuh"
#include "../large/quantise.cuh"
#include "plan.cuh"
#include "rounds.cuh"

namespace pplx::cuda {

inline constexpr std::uint32_t kMostCodes = kTileBytes / 2;  // codes of a tile
inline constexpr std::uint32_t kMostScaleBytes = 512;  // bytes of a row's scales
// Workers of a thread block that send first.
template <typename Mode>
__device__ inline std::uint32_t sending_workers(const DispatchArguments& a) {
  return a.recv ? senders_of(gridDim.x, kTilesOut * (kQuantises<Mode> ? kMostCodes : kTileBytes), kSendingWorkers) : kWorkers;
}
inline constexpr std::uint32_t kSenderBytes = kTilesIn * kTileBytes + kTilesOut * (kMostCodes + kMostScaleBytes);

// Rows whose peers have yet to be told.
struct UntoldRows {
  char* row[kMostToldTogether + 1];  // this lane's rank's, by token, or null
  std::uint32_t tokens = 0;

  __device__ void add(char* its_row) {
#pragma unroll
    for (std::uint32_t i = 0; i <= kMostToldTogether; ++i)
      if (i == tokens) row[i] = its_row;
    ++tokens;
  }
  // Tells of all but the last `but` tokens: they have been stored, and their stores awaited. word: of each row.
  __device__ void tell(const Common& k, std::uint32_t step, std::uint32_t but, std::uint64_t word) {
    __syncwarp();
    fence_system();
#pragma unroll
    for (std::uint32_t i = 0; i <= kMostToldTogether; ++i) {
      if (i + but >= tokens || row[i] == nullptr) continue;
      fuzz_delay(k, std::uint64_t{step} << 32 | i);
      store_relaxed(row[i] + k.dispatch.arrival_at, word);
    }
    if (but != 0) add_first(tokens - 1);
    tokens = but;
    mark_stage(k, Stage::Published);
  }

 private:
  // The last one becomes the first.
  __device__ void add_first(std::uint32_t last) {
#pragma unroll
    for (std::uint32_t i = 1; i <= kMostToldTogether; ++i)
      if (i == last) row[0] = row[i];
  }
};

// A worker that sends.
template <typename Mode>
class RoundSender {
 public:
  // number: among the block's `senders`. memory: its own, kSenderBytes.
  __device__ RoundSender(const DispatchArguments& a, RoundPlan& plan, std::uint32_t number, std::uint32_t senders, char* memory, std::uint64_t* loaded)
      : a_(a), k_(a.common), plan_(plan), number_(number), senders_(senders), memory_(memory), loaded_(loaded),
        together_(told_together(a.own, gridDim.x * senders)), bytes_(kQuantises<Mode> ? k_.c.hidden * dtype_bytes(k_.c.dtype) : k_.payload_bytes) {}

  __device__ void send() {
    const SpanTimer all(k_, Span::Sending);
    for (std::uint32_t n = 0;; ++n) {
      {
        const SpanTimer waits(k_, Span::AwaitingPlan);
        await_turn(plan_.planned + n % 2, n / 2);
      }
      const PlannedChunk& chunk = plan_.chunks[n % 2];
      const std::uint32_t first = plan_.bounds[n % 2].first, tokens = plan_.bounds[n % 2].tokens;
      if (tokens != 0) begin_chunk(n % 2);
      for (std::uint32_t token = number_; token < tokens; token += senders_) send_token(chunk, first, token);
      __syncwarp();
      if (tokens == 0) break;
      if (threadIdx.x % 32 == 0) mbarrier_arrive(plan_.used + n % 2);
    }
    bulk_await_stored<0>();
    tell(0);
  }
  // Each of its barriers has had an odd number of turns: a bit each.
  __device__ std::uint32_t parities() const {
    std::uint32_t bits = 0;
    for (std::uint32_t i = 0; i < kTilesIn; ++i) bits |= ((asked_ + kTilesIn - 1 - i) / kTilesIn & 1) << i;
    return bits;
  }

 private:
  __device__ char* in(std::uint32_t tile) const { return memory_ + tile % kTilesIn * kTileBytes; }
  __device__ char* out(std::uint32_t tile) const { return memory_ + kTilesIn * kTileBytes + tile % kTilesOut * kMostCodes; }
  // The scales of the token that is being sent. Every token has at least one tile, so two places suffice.
  __device__ char* scales() const { return memory_ + kTilesIn * kTileBytes + kTilesOut * kMostCodes + sent_ % kTilesOut * kMostScaleBytes; }

  // Asks for the next tile, of this token or a later one. False: it is not known yet, or there is none.
  __device__ bool ask() {
    for (;;) {
      if (!knows_) {
        if (!__all_sync(~0u, phase_wait(plan_.known + chunk_ % 2, chunk_ / 2 & 1))) return false;
        knows_ = true;
        token_ = number_;
        at_ = 0;
      }
      const std::uint32_t tokens = plan_.bounds[chunk_ % 2].tokens;
      if (tokens == 0) return false;
      if (token_ < tokens) break;
      knows_ = false;
      ++chunk_;
    }
    const std::uint32_t bytes = min(bytes_ - at_, kTileBytes);
    if (threadIdx.x % 32 == 0) {
      std::uint64_t* const turns = loaded_ + asked_ % kTilesIn;
      mbarrier_expect(turns, bytes);
      const std::uint64_t token = plan_.bounds[chunk_ % 2].first + token_;
      bulk_load(in(asked_), a_.x + token * a_.x_stride + at_, bytes, turns);
    }
    ++asked_;
    at_ += kTileBytes;
    if (at_ < bytes_) return true;
    at_ = 0;
    token_ += senders_;
    return true;
  }

  __device__ void tell(std::uint32_t but) {
    const std::uint32_t tokens = untold_.tokens - but;
    untold_.tell(k_, plan_.step, but, word_of_round(k_, plan_.step, round_));
    if (tokens != 0 && has_room_ && remote_peers(k_) != 0) count_tokens_of_round(a_, plan_.step, round_, tokens);
  }

  // Peers read what has been told of alone, so nothing is left untold while this waits for them.
  __device__ void begin_chunk(std::uint32_t turn) {
    rows_at_ = plan_.rows_at[turn];
    const std::uint32_t round = plan_.round[turn];
    if (round == round_) return;
    if (untold_.tokens != 0) {
      bulk_await_stored<0>();
      tell(0);
    }
    round_ = round;
    const SpanTimer waits(k_, Span::AwaitingPlan);
    bool good = has_room_;
    for (std::uint32_t i = threadIdx.x % 32; has_room_ && i < k_.living; i += 32)
      good = await_room(k_, a_.pieces, Phase::DispatchSend, plan_.step, Op::Dispatch, k_.order[i], round) && good;
    has_room_ = all_of_warp(good);
    fence_copies();
  }

  // The nth of the chunk that begins with token `first` of this rank's.
  __device__ void send_token(const PlannedChunk& chunk, std::uint32_t first, std::uint32_t token) {
    const std::uint32_t lane = threadIdx.x % 32, top_k = k_.c.top_k, own = first + token;
    PlannedToken<true> t;
    std::uint32_t entry = kNone;
    if (lane < top_k) {
      const std::uint32_t at = token * top_k + lane;
      t.id = chunk.id[at];
      t.index = chunk.index[at];
      t.weight = chunk.weight[at];
      entry = chunk.row[at];
      if (!has_room_) entry = kNone;
    }
    t.rank = t.id < 0 ? kNone : k_.per_rank.divide(static_cast<std::uint32_t>(t.id));
    char* const row = entry == kNone ? nullptr : rows_at_[entry >> 20] + std::uint64_t{entry & 0xfffffu} * k_.dispatch.row_bytes;
    for (std::uint32_t at = 0; at < bytes_; at += kTileBytes) {
      // Stores read the last tile where it came to, if nothing is quantised.
      while (asked_ - used_ < (kQuantises<Mode> ? kTilesIn : kTilesIn - 1) && ask()) {
      }
      {
        const SpanTimer waits(k_, Span::AwaitingTile);
        await_turn(loaded_ + used_ % kTilesIn, used_ / kTilesIn);
      }
      send_tile(row, at);
      ++used_;
    }
    {
      const SpanTimer routes(k_, Span::WritingRoutes);
      const std::uint32_t rows = __popc(__ballot_sync(~0u, entry != kNone));
      write_routes(own, t, entry, row, rows);
      if (a_.scales != nullptr) write_scales(own, row, rows);
      untold_.add(row != nullptr && is_remote(k_, entry >> 20) ? nullptr : row);  // the proxy is told of the round
      ++sent_;
    }
    if (untold_.tokens <= together_) return;
    const SpanTimer tells(k_, Span::Telling);
    await_earlier_tokens();
    tell(1);
  }

  // Each lane with a row stores to it.
  __device__ void send_tile(char* row, std::uint32_t at) {
    const std::uint32_t bytes = min(bytes_ - at, kTileBytes);
    fuzz_delay(k_, at);
    if constexpr (!kQuantises<Mode>) {
      if (row != nullptr) bulk_store(row + at, in(used_), bytes);
      bulk_end_group();
      bulk_await_stored<kTilesOut - 1>();  // the place of the tile before this one is asked for next
      __syncwarp();
    } else {
      const std::uint32_t elements = bytes / kElementBytes<Mode>, first = at / kElementBytes<Mode>;
      char *const to = out(used_), *const scales_here = scales() + first / 512 * 16;
      {
        const SpanTimer waits(k_, Span::AwaitingPlaceOut);
        bulk_await_stored<kTilesOut - 1>();
        __syncwarp();
      }
      {
        const SpanTimer quantises(k_, Span::Quantising);
        TileQuantiser<kElementBytes<Mode>>::quantise(k_, in(used_), elements, to, scales_here, [] {});
        fence_shared_copies();
        __syncwarp();
      }
      const SpanTimer stores(k_, Span::StoringTiles);
      if (row != nullptr) {
        bulk_store(row + first, to, (elements + 15) / 16 * 16);
        if (at + kTileBytes >= bytes_) bulk_store(row + k_.dispatch.scales_at, scales(), 16 * k_.scale_vec16s);
      }
      bulk_end_group();
    }
  }

  __device__ void write_routes(std::uint32_t own, const PlannedToken<true>& t, std::uint32_t entry, char* row, std::uint32_t rows) const {
    for (std::uint32_t i = 0; i < rows; ++i) {
      char* const to = of_lane(row, static_cast<int>(i));
      if (to == nullptr) continue;
      write_route<true>(a_, plan_.step, own, __shfl_sync(~0u, entry, static_cast<int>(i)) >> 20, t, to);
    }
  }

  // Those that the caller gave.
  __device__ void write_scales(std::uint32_t own, char* row, std::uint32_t rows) const {
    for (std::uint32_t begin = 0; begin < k_.scale_vec16s; begin += 32) {
      const std::uint32_t at = begin + threadIdx.x % 32;
      const uint4 vec16 = given_vec16_of_scales(a_, own, at);
      for (std::uint32_t i = 0; i < rows; ++i) {
        char* const to = of_lane(row, static_cast<int>(i));
        if (to != nullptr && at < k_.scale_vec16s) store_vec16(to + k_.dispatch.scales_at + 16 * at, vec16);
      }
    }
  }

  // A tile is a group of stores.
  __device__ void await_earlier_tokens() const {
    const std::uint32_t tiles = (bytes_ + kTileBytes - 1) / kTileBytes;
    if (tiles >= 4)
      bulk_await_stored<4>();
    else if (tiles >= 2)
      bulk_await_stored<2>();
    else
      bulk_await_stored<1>();
  }

  const DispatchArguments& a_;
  const Common& k_;
  RoundPlan& plan_;
  char* const* rows_at_ = nullptr;  // where this rank's rows begin at each peer
  const std::uint32_t number_, senders_;
  char* const memory_;
  std::uint64_t* const loaded_;
  const std::uint32_t together_;  // tokens that are told of together
  const std::uint32_t bytes_;  // bytes of a token
  std::uint32_t asked_ = 0, used_ = 0;  // tiles
  std::uint32_t sent_ = 0;  // tokens
  std::uint32_t chunk_ = 0, token_ = 0, at_ = 0;  // that is asked for next
  bool knows_ = false;  // that chunk
  UntoldRows untold_;
  std::uint32_t round_ = 0;
  bool has_room_ = true;  // there is room for that round; else something failed
};

}  // namespace pplx::cuda
