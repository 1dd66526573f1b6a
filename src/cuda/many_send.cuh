// What a worker of a dispatch of many tokens sends: a token of a chunk at a time, in tiles. A tile comes to shared memory by a bulk copy,
// asked for long before it is needed, and goes to every rank that wants the token by another; in between lies the quantisation. Rows
// have arrival words, those of a few tokens behind one fence. Where this launch receives, too, rows of this rank go to their places at once.
#pragma once

#include "dispatch_recv.cuh"
#include "dispatch_send.cuh"
#include "many_plan.cuh"
#include "quantise.cuh"
#include "rounds.cuh"

namespace pplx::cuda {

// What happens to a tile.
template <typename Mode>
struct Tile;

template <>
struct Tile<AsIs> {
  static constexpr bool kQuantises = false;
  static constexpr std::uint32_t kAhead = kTilesIn - 1;  // one is being read by the stores
};
template <std::uint32_t kBytes>
struct Tile<Quantised<kBytes>> {
  static constexpr bool kQuantises = true;
  static constexpr std::uint32_t kAhead = kTilesIn;
};
template <typename Mode>
inline constexpr std::uint32_t kElementBytes = 0;
template <std::uint32_t kBytes>
inline constexpr std::uint32_t kElementBytes<Quantised<kBytes>> = kBytes;
inline constexpr std::uint32_t kMostCodes = kTileBytes / 2;  // of a tile
inline constexpr std::uint32_t kMostScaleBytes = 512;  // of a row
// Workers of a thread block that send first.
template <typename Mode>
__device__ inline std::uint32_t sending_workers(const DispatchArguments& a) {
  return a.recv ? senders_of(gridDim.x, kTilesOut * (Tile<Mode>::kQuantises ? kMostCodes : kTileBytes), kSendingWorkers) : kWorkers;
}
inline constexpr std::uint32_t kSenderBytes = kTilesIn * kTileBytes + kTilesOut * (kMostCodes + kMostScaleBytes);

// Rows whose peers have yet to be told.
struct UntoldRows {
  char* row[kMostToldTogether + 1];  // of this lane's rank, by token, or null
  std::uint32_t tokens = 0;

  __device__ void add(char* its_row) {
#pragma unroll
    for (std::uint32_t i = 0; i <= kMostToldTogether; ++i)
      if (i == tokens) row[i] = its_row;
    ++tokens;
  }
  // Of all but the last `but` tokens: they have been stored, and their stores awaited. word(step): of each row.
  template <typename Word>
  __device__ void tell(const Common& k, std::uint32_t step, std::uint32_t but, const Word& word) {
    __syncwarp();
    fence_system();
#pragma unroll
    for (std::uint32_t i = 0; i <= kMostToldTogether; ++i) {
      if (i + but >= tokens || row[i] == nullptr) continue;
      linger(k, std::uint64_t{step} << 32 | i);
      store_relaxed(row[i] + k.dispatch.arrival_at, word(step));
    }
    if (but != 0) add_first(tokens - 1);
    tokens = but;
    note(k, Stage::Published);
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
// kHooks: this rank's own rows go the way of all others, since who receives counts them. Plan: ManyPlan, or RoundPlan where blocks go in
// pieces, and then the own ones do so, too.
template <typename Mode, bool kHooks, typename Plan = ManyPlan>
class ManySender {
  static constexpr bool kPieces = !std::is_same_v<Plan, ManyPlan>;

 public:
  // number: among the block's `senders`. memory: its own, kSenderBytes. receive, experts: of the launch, if it receives.
  __device__ ManySender(const DispatchArguments& a, Plan& plan, ReceiveShared& receive, const Experts& experts, char* const* rows_at,
                        std::uint32_t number, std::uint32_t senders, char* memory, std::uint64_t* loaded)
      : a_(a), k_(a.common), plan_(plan), receive_(receive), experts_(experts), rows_at_(rows_at), number_(number), senders_(senders), memory_(memory), loaded_(loaded),
        together_(told_together(a.own, gridDim.x * senders)), bytes_(Tile<Mode>::kQuantises ? k_.c.hidden * dtype_bytes(k_.c.dtype) : k_.payload_bytes) {}

  // Asks for the first tiles, before anything is planned.
  __device__ void ask_early() {
    while (asked_ < Tile<Mode>::kAhead && ask()) {
    }
  }
  // In place of send(): what was asked for comes to memory that is used again.
  __device__ void drop() {
    for (; used_ < asked_; ++used_) await_turn(loaded_ + used_ % kTilesIn, used_ / kTilesIn);
  }

  __device__ void send() {
    const Spends all(k_, Span::Sending);
    for (std::uint32_t n = 0;; ++n) {
      {
        const Spends waits(k_, Span::AwaitingPlan);
        await_turn(plan_.planned + n % 2, n / 2);
      }
      const PlannedChunk& chunk = plan_.chunks[n % 2];
      const std::uint32_t first = plan_.bounds[n % 2].first, tokens = plan_.bounds[n % 2].tokens;
      if constexpr (kPieces)
        if (tokens != 0) begin_chunk(n % 2);
      for (std::uint32_t token = number_; token < tokens; token += senders_) send_token(chunk, first, token);
      __syncwarp();
      if (tokens == 0) break;
      if (threadIdx.x % 32 == 0) turns_arrive(plan_.used + n % 2);
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
        if (!__all_sync(~0u, turn_is_over(plan_.known + chunk_ % 2, chunk_ / 2 & 1))) return false;
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
      turns_expect(turns, bytes);
      const std::uint64_t given = token_of<!kPieces>(k_, plan_.bounds[chunk_ % 2].first + token_);
      bulk_load(in(asked_), a_.x + given * a_.x_stride + at_, bytes, turns);
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
    untold_.tell(k_, plan_.step, but, [this](std::uint32_t step) {
      if constexpr (kPieces)
        return word_of_round(k_, step, round_);
      else
        return arrival_word(k_.generation, step);
    });
    if constexpr (kPieces)
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
    const Spends waits(k_, Span::AwaitingPlan);
    bool good = has_room_;
    for (std::uint32_t i = threadIdx.x % 32; has_room_ && i < k_.living; i += 32)
      good = await_room(k_, a_.pieces, Phase::DispatchSend, plan_.step, Op::Dispatch, k_.order[i], round) && good;
    has_room_ = all_of_warp(good);
    fence_copies();
  }

  // The nth of the chunk that begins with token `first` of this rank's.
  __device__ void send_token(const PlannedChunk& chunk, std::uint32_t first, std::uint32_t token) {
    const std::uint32_t lane = threadIdx.x % 32, top_k = k_.c.top_k, own = first + token;
    const std::uint32_t given = token_of<!kPieces>(k_, own);
    PlannedToken<true> t;
    std::uint32_t entry = kNone;
    if (lane < top_k) {
      const std::uint32_t at = token * top_k + lane;
      t.id = chunk.id[at];
      t.index = chunk.index[at];
      t.weight = chunk.weight[at];
      entry = chunk.row[at];
      if (kPieces && !has_room_) entry = kNone;
    }
    t.rank = t.id < 0 ? kNone : k_.per_rank.divide(static_cast<std::uint32_t>(t.id));
    const bool is_own = !kHooks && !kPieces && a_.recv && entry != kNone && entry >> 20 == k_.c.rank;
    char* const row = entry == kNone || is_own ? nullptr : rows_at_[entry >> 20] + std::uint64_t{entry & 0xfffffu} * k_.dispatch.row_bytes;
    const OwnRow mine = own_row(t, own, entry, __ballot_sync(~0u, is_own));
    for (std::uint32_t at = 0; at < bytes_; at += kTileBytes) {
      while (asked_ - used_ < Tile<Mode>::kAhead && ask()) {
      }
      {
        const Spends waits(k_, Span::AwaitingTile);
        await_turn(loaded_ + used_ % kTilesIn, used_ / kTilesIn);
      }
      send_tile(row, mine, at);
      ++used_;
    }
    {
      const Spends routes(k_, Span::WritingRoutes);
      const std::uint32_t rows = __popc(__ballot_sync(~0u, entry != kNone));
      write_routes(given, t, entry, row, rows);
      if (a_.scales != nullptr) write_scales(given, row, rows, mine);
      if (mine.is) place_words(a_, mine.row);
      if (!kPieces && a_.ids != nullptr) keep(own, t, entry);
      if constexpr (kPieces)
        untold_.add(row != nullptr && is_remote(k_, entry >> 20) ? nullptr : row);  // the proxy is told of the round
      else
        untold_.add(row);
      ++sent_;
    }
    if (untold_.tokens <= together_) return;
    const Spends tells(k_, Span::Telling);
    await_earlier_tokens();
    tell(1);
  }

  // A token's row that stays here, and the lanes whose places get a copy of it.
  struct OwnRow {
    ArrivedRow row;
    bool is = false;
    std::uint32_t copies = 0;
    char *to = nullptr, *scales = nullptr;  // of this lane's copy
  };

  // It has a route as all rows have. Where it goes is known when all ranks' counts have come, soon after the launch has begun.
  __device__ OwnRow own_row(const PlannedToken<true>& t, std::uint32_t own, std::uint32_t entry, std::uint32_t lanes) {
    OwnRow mine;
    if (lanes == 0) return mine;
    const Spends waits(k_, Span::AwaitingPlacesOfOwn);
    receive_.rows_known.wait();
    receive_.placed.wait();
    if (!receive_.good || !receive_.placed_all) return mine;
    mine.row.source = k_.c.rank;
    mine.row.at = receive_.rows_begin[k_.c.rank] + (__shfl_sync(~0u, entry, __ffs(static_cast<int>(lanes)) - 1) & 0xfffffu);
    const bool here = t.id >= 0 && t.rank == k_.c.rank;
    const std::uint32_t place = here ? route_place(static_cast<std::uint32_t>(t.id) - first_expert_of(k_, k_.c.rank), t.index) : kNowhere;
    mine.is = read_route(a_, plan_.step, make_uint4(place, __float_as_uint(t.weight), own, 0), experts_, mine.row);
    if (!mine.is) return mine;
    mine.copies = copies_of(k_, mine.row);
    if ((mine.copies >> threadIdx.x % 32 & 1) == 0) return mine;
    mine.to = a_.out.x + std::uint64_t{mine.row.place} * k_.payload_bytes;
    if (quantised(k_.c.wire)) mine.scales = scale_place(a_, mine.row.place, mine.row.expert);
    return mine;
  }

  // Sixteen bytes of scales, of which the row's have `nth` before them, to each copy of an own row. Each lane may have some.
  __device__ void place_own_scales(const OwnRow& mine, bool has, const uint4& piece, std::uint32_t nth) const {
    for (std::uint32_t copies = mine.copies; copies != 0; copies &= copies - 1) {
      char* const to = of_lane(mine.scales, __ffs(static_cast<int>(copies)) - 1);
      if (has) place_scale(a_, to, piece, nth);
    }
  }

  // Each lane with a row, or a copy of the own one, stores to it.
  __device__ void send_tile(char* row, const OwnRow& mine, std::uint32_t at) {
    const std::uint32_t bytes = min(bytes_ - at, kTileBytes);
    linger(k_, at);
    if constexpr (!Tile<Mode>::kQuantises) {
      if (row != nullptr) bulk_store(row + at, in(used_), bytes);
      if (mine.to != nullptr) bulk_store(mine.to + at, in(used_), bytes);
      bulk_end_group();
      bulk_await_stored<kTilesOut - 1>();  // the place of the tile before this one is asked for next
      __syncwarp();
    } else {
      const std::uint32_t elements = bytes / kElementBytes<Mode>, first = at / kElementBytes<Mode>;
      char *const to = out(used_), *const scales_here = scales() + first / 512 * 16;
      {
        const Spends waits(k_, Span::AwaitingPlaceOut);
        bulk_await_stored<kTilesOut - 1>();
        __syncwarp();
      }
      {
        const Spends quantises(k_, Span::Quantising);
        TileQuantiser<kElementBytes<Mode>>::quantise(k_, in(used_), elements, to, scales_here, [] {});
        fence_shared_copies();
        __syncwarp();
      }
      const Spends stores(k_, Span::StoringTiles);
      const bool ends = at + kTileBytes >= bytes_;
      if (row != nullptr) {
        bulk_store(row + first, to, (elements + 15) / 16 * 16);
        if (ends) bulk_store(row + k_.dispatch.scales_at, scales(), 16 * k_.scale_pieces);
      }
      if (mine.to != nullptr) {
        bulk_store(mine.to + first, to, elements);
        if (ends && k_.scales_in_pieces) bulk_store(mine.scales, scales(), 16 * k_.scale_pieces);
      }
      bulk_end_group();
      if (!ends || k_.scales_in_pieces) return;
      for (std::uint32_t nth = threadIdx.x % 32; __any_sync(~0u, nth < k_.scale_pieces); nth += 32)
        place_own_scales(mine, nth < k_.scale_pieces,
                         nth < k_.scale_pieces ? *reinterpret_cast<const uint4*>(scales() + 16 * nth) : make_uint4(0, 0, 0, 0), nth);
    }
  }

  __device__ void write_routes(std::uint32_t given, const PlannedToken<true>& t, std::uint32_t entry, char* row, std::uint32_t rows) const {
    for (std::uint32_t i = 0; i < rows; ++i) {
      char* const to = of_lane(row, static_cast<int>(i));
      if (to == nullptr) continue;
      write_route<true>(a_, plan_.step, given, __shfl_sync(~0u, entry, static_cast<int>(i)) >> 20, t, to);
    }
  }

  // Those that the caller gave.
  __device__ void write_scales(std::uint32_t given, char* row, std::uint32_t rows, const OwnRow& mine) const {
    const std::uint32_t words = scale_words(k_.c);
    for (std::uint32_t begin = 0; begin < k_.scale_pieces; begin += 32) {
      const std::uint32_t at = begin + threadIdx.x % 32;
      std::uint32_t word[4] = {};
#pragma unroll
      for (std::uint32_t j = 0; j < 4; ++j)
        if (4 * at + j < words) word[j] = given_scales(a_, given, 4 * at + j);
      const uint4 piece = make_uint4(word[0], word[1], word[2], word[3]);
      for (std::uint32_t i = 0; i < rows; ++i) {
        char* const to = of_lane(row, static_cast<int>(i));
        if (to != nullptr && at < k_.scale_pieces) store_piece(to + k_.dispatch.scales_at + 16 * at, piece);
      }
      place_own_scales(mine, at < k_.scale_pieces, piece, at);
    }
  }

  // What further dispatches, and this one's combine, need to know.
  __device__ void keep(std::uint32_t own, const PlannedToken<true>& t, std::uint32_t entry) const {
    const std::uint32_t lane = threadIdx.x % 32;
    if (lane >= k_.c.top_k) return;
    const std::uint64_t at = std::uint64_t{own} * k_.c.top_k + lane;
    a_.plan.ids[at] = t.id;
    a_.plan.index[at] = t.index;
    a_.plan.token_rows[at] = entry;
    if (a_.weights != nullptr) a_.plan.weights[at] = t.weight;
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
  Plan& plan_;
  ReceiveShared& receive_;
  const Experts& experts_;
  char* const* rows_at_;  // where this rank's rows begin at each peer
  const std::uint32_t number_, senders_;
  char* const memory_;
  std::uint64_t* const loaded_;
  const std::uint32_t together_;  // tokens that are told of together
  const std::uint32_t bytes_;  // of a token
  std::uint32_t asked_ = 0, used_ = 0;  // tiles
  std::uint32_t sent_ = 0;  // tokens
  std::uint32_t chunk_ = 0, token_ = 0, at_ = 0;  // that is asked for next
  bool knows_ = false;  // that chunk
  UntoldRows untold_;
  std::uint32_t round_ = 0;
  bool has_room_ = true;  // for that round; else something failed
};

}  // namespace pplx::cuda
