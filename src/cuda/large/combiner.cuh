// The worker of a general large combine, and of one in pieces, by bulk copies. It sends runs of rows: the tiles of what is added up come to
// shared memory, asked for ahead, and a tile of the sum goes to the row's source. Then it receives tokens in the same way. Rows for a rank with
// many tokens have arrival words, those of a run behind one fence; rows for one with few show by themselves, as in a combine of few.
#pragma once

#include "../remote/combine_extras.cuh"
#include "../remote/pass_on_rounds.cuh"
#include "fetch.cuh"
#include "ring.cuh"

namespace pplx::cuda {

inline constexpr std::uint32_t kSumTileBytes = strip_bytes(kVectorsOfTile);
inline constexpr std::uint32_t kCombinerBytes = (kSumTiles + kSumTilesOut) * kSumTileBytes;
static_assert(kCopies * kCopyBytes <= kCombinerBytes, "copies have the memory of tiles");

// The barriers of a warp, for tiles and for copies on their way to its memory.
struct CombinerTurns {
  std::uint64_t loaded[kSumTiles], copied[kCopies];

  // Initialises the barriers, by one thread, before the first `__syncthreads`.
  __device__ void init() {
    for (std::uint64_t& turns : loaded) mbarrier_init(&turns, 1);
    for (std::uint64_t& turns : copied) mbarrier_init(&turns, 1);
  }
};

// Tiles on their way to shared memory, in the order in which they were asked for. For a warp.
class ArrivingTiles {
 public:
  __device__ ArrivingTiles(char* memory, std::uint64_t* loaded) : memory_(memory), loaded_(loaded) {}

  __device__ bool full() const { return asked_ - used_ == kSumTiles; }
  // Any lane may know where from; all call.
  __device__ void ask(const char* from, std::uint32_t bytes) {
    if (threadIdx.x % 32 == 0) {
      std::uint64_t* const turns = loaded_ + asked_ % kSumTiles;
      mbarrier_expect(turns, bytes);
      bulk_load(memory_ + asked_ % kSumTiles * kSumTileBytes, from, bytes, turns);
    }
    ++asked_;
  }
  // Takes the next tile, which has `bytes` bytes.
  __device__ void take(std::uint32_t bytes, uint4 (&v)[kVectorsOfTile]) {
    await_turn(loaded_ + used_ % kSumTiles, used_ / kSumTiles);
    const char* const from = memory_ + used_ % kSumTiles * kSumTileBytes;
#pragma unroll
    for (int j = 0; j < kVectorsOfTile; ++j) {
      const std::uint32_t at = j * 512 + threadIdx.x % 32 * 16;
      v[j] = at < bytes ? *reinterpret_cast<const uint4*>(from + at) : make_uint4(0, 0, 0, 0);
    }
    __syncwarp();  // its place is asked for next
    ++used_;
  }

 private:
  char* const memory_;
  std::uint64_t* const loaded_;
  std::uint32_t asked_ = 0, used_ = 0;
};

// Inputs of a warp for the tiles of a row: up to 32 rows of memory, a lane each.
struct Inputs {
  const char* from = nullptr;  // this lane's input
  float weight = 1.0f;
  std::uint32_t n = 0;  // the first lanes
};

// Asks for tile after tile of the inputs, in order.
class InputCursor {
 public:
  __device__ InputCursor(const Inputs& inputs, std::uint32_t bytes) : inputs_(inputs), bytes_(bytes) {}
  __device__ void ask(ArrivingTiles& tiles) {
    while (inputs_.n != 0 && at_ < bytes_ && !tiles.full()) {
      const char* const from = of_lane(inputs_.from, static_cast<int>(next_));
      tiles.ask(from + at_, min(kSumTileBytes, bytes_ - at_));
      if (++next_ < inputs_.n) continue;
      next_ = 0;
      at_ += kSumTileBytes;
    }
  }

 private:
  const Inputs& inputs_;
  const std::uint32_t bytes_;
  std::uint32_t next_ = 0, at_ = 0;
};

// Index of the nth set bit; undefined if fewer are set.
__device__ inline int nth_bit(std::uint32_t bits, std::uint32_t nth) {
  std::uint32_t at = 0;
#pragma unroll
  for (std::uint32_t half = 16; half != 0; half /= 2) {
    const std::uint32_t below = __popc(bits >> at & ((1u << half) - 1));
    if (nth < below) continue;
    nth -= below;
    at += half;
  }
  return static_cast<int>(at);
}

// Rows of memory in place of a row's choices: those that it has, choices ascending. By a warp. places: checked.
__device__ inline Inputs inputs_of(const CombineArguments& a, const Places& places) {
  const std::uint32_t there = __ballot_sync(~0u, places.out_row != kNone);
  const int of = nth_bit(there, threadIdx.x % 32);
  Inputs inputs;
  inputs.n = __popc(there);
  inputs.from = a.expert_out + __shfl_sync(~0u, places.out_row, of) * a.expert_stride;
  inputs.weight = __shfl_sync(~0u, places.weight, of);
  return inputs;
}

// Makes these lanes' rows blank, for later ones that show by themselves. By a warp, whose lanes have read what they make blank.
__device__ inline void make_blank_again(const Common& k, char* row, std::uint32_t lanes) {
  for (; lanes != 0; lanes &= lanes - 1) {
    char* const to = of_lane(row, __ffs(static_cast<int>(lanes)) - 1);
    for (std::uint32_t at = threadIdx.x % 32 * 16; at < k.row_bytes; at += 512) make_blank(to + at);
  }
}

// A remote peer's header of a round, for which there is room. A release sends headers alone.
[[maybe_unused]] static __device__ __noinline__ void send_header_of_round(const CombineArguments& a, std::uint32_t step, const RoundRun& run,
                                                                          const CombineShared& s) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  const std::uint32_t peer = run.source, rows = s.rows_begin[peer + 1] - s.rows_begin[peer];
  const std::uint32_t flags = flags_of(a) | (*a.received.overflowed != 0 ? kOverflowed : 0u);
  const PieceRows of = a.release ? PieceRows{0, 0} : rows_of_kept_round(p, peer, run.round, rows);
  if (threadIdx.x % 32 == 0)
    write_piece_header(k, piece_for(k, step, Op::Combine, peer, run.round), step, a.release ? 0 : rows, flags, run.round, *kept_rounds(p, peer), of);
  count_sums_of_round(k, p, step, peer, run.round, rows, kAllParts - of.rows() + (run.round == 0 ? kRoundBefore : 0));
}

// kMappedOnly: no tails, and no weights of combine's own. kPieces: in rounds, whose rows all have words.
template <typename T, bool kMappedOnly, bool kPieces = false>
class LargeCombiner {
  static constexpr int kVectors = kVectorsOfTile;
  using TileSums = Sums<T, kVectors>;

 public:
  // memory: of this warp, kCombinerBytes.
  __device__ LargeCombiner(const CombineArguments& a, std::uint32_t step, CombineShared& s, char* memory, CombinerTurns& turns)
      : a_(a), k_(a.common), step_(step), s_(s), memory_(memory), turns_(turns), tiles_(memory, turns.loaded) {}

  // Sends the block's own share of the runs of rows; the first warp then sends untaken shares. senders: the block's first warps.
  __device__ void send(std::uint32_t senders) {
    const SpanTimer all(k_, Span::SendingSums);
    if (!kMappedOnly && a_.uses_weights) send_all_weights(a_, step_, threadIdx.x / 32, senders);
    const std::uint32_t together = told_together(s_.rows_begin[k_.c.world], gridDim.x * senders);
    const RowRuns runs(k_, s_.rows_begin, k_.living - (a_.sums_own ? 1 : 0), together);
    s_.claimed.wait();
    for (std::uint32_t run; s_.mine && (run = take_next(&s_.sent) * gridDim.x + blockIdx.x) < runs.all();) send_run(runs.at(run));
    const std::uint32_t shares = min(gridDim.x, runs.all());
    for (std::uint32_t share = kNone; threadIdx.x < 32 && (share = take_another_share(k_, Op::Combine, step_, shares)) != kNone;)
      for (std::uint32_t run = share; run < runs.all(); run += gridDim.x) send_run(runs.at(run));
    tell();
  }

  // Sends rows that their sources are not offered, by one warp of a thread block.
  __device__ void send_rest() {
    const std::uint32_t sources = k_.living - (a_.sums_own ? 1 : 0);
    bool any = false;
    for (std::uint32_t n = threadIdx.x % 32; n < sources; n += 32)
      any = any || (s_.rows_begin[k_.order[n] + 1] != s_.rows_begin[k_.order[n]] && !is_offered(a_, s_, k_.order[n]));
    if (!__any_sync(~0u, any)) return;
    const RowRuns runs(k_, s_.rows_begin, sources, told_together(s_.rows_begin[k_.c.world], gridDim.x));
    send_shares(k_, step_, s_.mine, runs, [](std::uint32_t n) { return n; }, [&](std::uint32_t n, std::uint32_t) {
      if (const RowRun run = runs.at(n); !is_offered(a_, s_, run.source)) send_run(run);
    });
    tell();
  }

  __device__ void send_run(const RowRun& run) {
    send_rows(run, run.first, has_many(s_, run.source));
  }

  // Behind the last run.
  __device__ void tell() {
    if (threadIdx.x % 32 == 0) bulk_await_stored<0>();
    if (to_tell_ != 0) raise_words();
    to_tell_ = 0;
    __syncwarp();
  }

  // rows: of this warp. Claims units in the order of rounds, as receive_rounds() does.
  __device__ void send_rounds(std::uint32_t senders, RoundRows& rows) {
    const SpanTimer all(k_, Span::SendingSums);
    const PieceArguments& p = a_.pieces;
    if (!kMappedOnly && a_.uses_weights && p.begins) send_all_weights(a_, step_, threadIdx.x / 32, senders);
    Rounds rounds(k_, p, step_, s_.rows_begin, Phase::CombineSend, told_together(s_.rows_begin[k_.c.world], gridDim.x * senders), 1, rows);
    bool good = rounds.open(p.begin, p.end);
    // A receive half does not wait with what its send half has claimed.
    const Claim what = p.begins ? Claim::CombineSend : Claim::CombineRest;
    for (RoundRun run; good && rounds.find(claim(k_, p, step_, what), run);) {
      const bool header = !kMappedOnly && run.is_header;
      if (header ? run.round >= *kept_rounds(p, run.source) : run.rows == 0 || a_.release) continue;
      good = make_room(run);
      if (!good) continue;
      if (header)
        send_header_of_round(a_, step_, run, s_);
      else
        send_run_of_round(run);
    }
    tell();
  }

  // Until all is received, or something fails.
  __device__ void receive_rounds() {
    const SpanTimer all(k_, Span::ReceivingSums);
    const std::uint32_t of_round = a_.pieces.tokens, rounds = rounds_of_own(a_.pieces, a_.own);
    for (;;) {
      const std::uint32_t token = claim(k_, a_.pieces, step_, Claim::CombineRecv), round = token / of_round;
      if (token >= a_.own || (!a_.release && !receive_token(token, round))) return;
      finish_unit(k_, a_.pieces, step_, Op::Combine, round, min(of_round, a_.own - round * of_round), token == round * of_round, rounds);
    }
  }

  __device__ void receive() {
    const SpanTimer all(k_, Span::ReceivingSums);
    for (std::uint32_t token; (token = take_next(&s_.received) * gridDim.x + blockIdx.x) < a_.own;)
      if (!receive_token(token)) return;
  }

 private:
  __device__ bool compact() const { return k_.c.layout == LayoutKind::Compact; }

  // ---- send ----

  // Waits until what a peer's round of the slot held, here and there, is of no use any more. Peers read what has been told of alone, so
  // nothing is left untold meanwhile.
  __device__ bool make_room(const RoundRun& run) {
    const PieceArguments& p = a_.pieces;
    bool good = true;
    if (run.round < kPlaces) {
      if (kMappedOnly || !is_remote(k_, run.source)) return true;
      come_late(k_, step_);
      if (threadIdx.x % 32 == 0) good = may_write(k_, step_, Op::Combine, run.source);
      return all_of_warp(good);
    }
    if (!all_of_warp(threadIdx.x % 32 != 0 || has_room(k_, p, step_, Op::Combine, run.source, run.round))) {
      tell();
      if (threadIdx.x % 32 == 0) good = await_room(k_, p, Phase::CombineSend, step_, Op::Combine, run.source, run.round);
      if (!all_of_warp(good)) return false;
    }
    fence_copies();
    return true;
  }

  __device__ void send_run_of_round(const RoundRun& run) {
    word_ = word_of_round(k_, step_, run.round);
    const bool remote = !kMappedOnly && is_remote(k_, run.source);
    piece_at_ = remote ? k_.heap.piece_at(Op::Combine, run.round) : 0;
    send_rows({run.source, run.first, run.rows}, run.slot_row, true);
  }

  // first: of the slot's rows.
  __device__ void send_rows(const RowRun& run, std::uint32_t first, bool by_word) {
    char* rows = block_for(k_, set_of(k_.c, step_), Op::Combine, run.source) + k_.combine.row_at(first);
    if constexpr (kPieces && !kMappedOnly) rows += piece_at_;
    if (by_word && compact() && (kMappedOnly || (!a_.uses_weights && !a_.has_tail)) && copy_run(run, rows)) {
      tell_of_last_run(0);
      remember(run, rows);
      return;
    }
    use_memory_for(false);
    Places places;
    places.load<kMappedOnly>(a_, s_.rows_begin[run.source] + run.first);
    for (std::uint32_t i = 0; i < run.rows; ++i) {
      places.check(a_);
      if (!kMappedOnly && a_.uses_weights && !sent_weight(a_, step_, run.source, run.first + i, places.weight)) return;
      const Inputs inputs = inputs_of(a_, places);
      char* const row = rows + std::uint64_t{i} * k_.combine.row_bytes;
      if (!kMappedOnly && a_.has_tail) write_tail(a_, places.choices, places.out_row, row + k_.combine.tail_at);
      if (i + 1 < run.rows) places.load<kMappedOnly>(a_, s_.rows_begin[run.source] + run.first + i + 1);
      send_row(inputs, row, by_word);
      if (kMappedOnly || !a_.has_tail || by_word) continue;
      __syncwarp();
      if (threadIdx.x % 32 == 0) publish(k_, row + k_.combine.arrival_at, arrival_word(k_.generation, step_));  // a tail is any bits
    }
    if (!by_word) return;
    tell_of_last_run(run.rows * ((k_.row_bytes + kSumTileBytes - 1) / kSumTileBytes));
    remember(run, rows);
  }

  __device__ void remember(const RowRun& run, char* rows) {
    told_ = rows;
    to_tell_ = run.rows;
    if (kPieces) told_word_ = word_;
    if (kPieces && !kMappedOnly) told_source_ = run.source;
  }

  // Tiles and copies share the memory: a warp that changes from one to the other waits until all stores from it are done.
  __device__ void use_memory_for(bool copies) {
    if (copies_ == copies) return;
    copies_ = copies;
    if (threadIdx.x % 32 == 0) bulk_await_stored<0>();
    __syncwarp();
  }

  // Rows that nothing is added to go on as they are. False: some have no place, and nothing was done.
  __device__ bool copy_run(const RowRun& run, char* rows) {
    const std::uint32_t lane = threadIdx.x % 32;
    std::uint32_t place = 0;
    if (lane < run.rows) place = a_.received.out_row[s_.rows_begin[run.source] + run.first + lane];
    if (__any_sync(~0u, lane < run.rows && place >= a_.expert_rows)) return false;
    use_memory_for(true);
    const char* const of_lane_row = a_.expert_out + place * a_.expert_stride;
    const std::uint32_t parts = (k_.row_bytes + kCopyBytes - 1) / kCopyBytes, all = run.rows * parts;
    const auto bytes_of = [&](std::uint32_t part) { return min(kCopyBytes, k_.row_bytes - part * kCopyBytes); };
    std::uint32_t asked = 0, row_asked = 0, part_asked = 0;
    const auto ask = [&] {
      const std::uint32_t at = (copied_ + asked) % kCopies;
      const char* const from = of_lane(of_lane_row, static_cast<int>(row_asked)) + part_asked * kCopyBytes;
      if (lane == 0) {
        mbarrier_expect(turns_.copied + at, bytes_of(part_asked));
        bulk_load(memory_ + at * kCopyBytes, from, bytes_of(part_asked), turns_.copied + at);
      }
      ++asked;
      if (++part_asked == parts) part_asked = 0, ++row_asked;
    };
    for (std::uint32_t i = 0; i < min(kCopies - 1, all); ++i) ask();
    for (std::uint32_t row = 0, done = 0; row < run.rows; ++row) {
      for (std::uint32_t part = 0; part < parts; ++part, ++done) {
        const std::uint32_t at = (copied_ + done) % kCopies;
        {
          const SpanTimer waits(k_, Span::AwaitingInputs);
          await_turn(turns_.copied + at, (copied_ + done) / kCopies);
        }
        fuzz_delay(k_, std::uint64_t{step_} << 32 | part);
        const SpanTimer stores(k_, Span::StoringSums);
        if (lane == 0) {
          bulk_store(rows + std::uint64_t{row} * k_.combine.row_bytes + part * kCopyBytes, memory_ + at * kCopyBytes, bytes_of(part));
          bulk_end_group();
          bulk_await_stored<1>();  // the place that is asked for next is free
        }
        __syncwarp();
        if (asked < all) ask();
      }
    }
    copied_ += all;
    return true;
  }

  __device__ void send_row(const Inputs& inputs, char* row, bool by_word) {
    InputCursor cursor(inputs, k_.row_bytes);
    for (std::uint32_t at = 0; at < k_.row_bytes; at += kSumTileBytes) {
      const std::uint32_t bytes = min(kSumTileBytes, k_.row_bytes - at);
      TileSums sums;
      if (compact() && inputs.n != 0) sums.start(-0.0f);  // only copied: keeps its sign of zero
      for (std::uint32_t i = 0; i < inputs.n; ++i) add(cursor, inputs, i, bytes, sums);
      fuzz_delay(k_, std::uint64_t{step_} << 32 | at);
      if (by_word)
        store_tile(sums, row + at, bytes);
      else
        sums.send(row, at + threadIdx.x % 32 * 16, at + bytes);
    }
  }

  __device__ void take(InputCursor& cursor, std::uint32_t bytes, uint4 (&v)[kVectors]) {
    cursor.ask(tiles_);
    const SpanTimer waits(k_, Span::AwaitingInputs);
    tiles_.take(bytes, v);
  }
  // One whose weight is 1.
  __device__ void add(InputCursor& cursor, std::uint32_t bytes, TileSums& sums) {
    uint4 v[kVectors];
    take(cursor, bytes, v);
    const SpanTimer adds(k_, Span::AddingUp);
    sums.add_row(v);
  }
  __device__ void add(InputCursor& cursor, const Inputs& inputs, std::uint32_t nth, std::uint32_t bytes, TileSums& sums) {
    uint4 v[kVectors];
    take(cursor, bytes, v);
    const SpanTimer adds(k_, Span::AddingUp);
    sums.add_row(v, __shfl_sync(~0u, inputs.weight, static_cast<int>(nth)));
  }

  // The first lane stores, so it alone waits.
  __device__ void store_tile(const TileSums& sums, char* to, std::uint32_t bytes) {
    char* const from = memory_ + (kSumTiles + stored_++ % kSumTilesOut) * kSumTileBytes;
    {
      const SpanTimer waits(k_, Span::AwaitingPlaceOfSum);
      if (threadIdx.x % 32 == 0) bulk_await_stored<kSumTilesOut - 1>();
      __syncwarp();
    }
    const SpanTimer stores(k_, Span::StoringSums);
    sums.store(from, threadIdx.x % 32 * 16, bytes);
    fence_shared_copies();
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    bulk_store(to, from, bytes);
    bulk_end_group();
  }

  // Tells of the run before this one, which has stored `tiles` tiles: it has had its time to arrive.
  __device__ void tell_of_last_run(std::uint32_t tiles) {
    if (to_tell_ == 0) return;
    const SpanTimer tells(k_, Span::TellingOfSums);
    if (threadIdx.x % 32 == 0) {
      if (tiles >= kSumTilesOut)
        bulk_await_stored<kSumTilesOut>();
      else
        bulk_await_stored<1>();
    }
    raise_words();
  }
  __device__ void raise_words() {
    if constexpr (kPieces && !kMappedOnly)
      if (is_remote(k_, told_source_)) {
        const std::uint32_t round = static_cast<std::uint32_t>(told_word_ >> 32 & 0xffffu) - 1;
        fence_system();
        count_sums_of_round(k_, a_.pieces, step_, told_source_, round, s_.rows_begin[told_source_ + 1] - s_.rows_begin[told_source_], to_tell_);
        return;
      }
    __syncwarp();
    if (threadIdx.x % 32 >= to_tell_) return;
    fence_system();
    fuzz_delay(k_, step_);
    store_relaxed(told_ + std::uint64_t{threadIdx.x % 32} * k_.combine.row_bytes + k_.combine.arrival_at,
                  kPieces ? told_word_ : arrival_word(k_.generation, step_));
  }

  // ---- receive ----

  // Receives one of this rank's tokens. round: in pieces, where every row has a word, this rank's own as well. False: something failed.
  __device__ bool receive_token(std::uint32_t token, std::uint32_t round = 0) {
    const std::uint32_t lane = threadIdx.x % 32;
    const std::uint32_t entry = lane < k_.c.top_k ? a_.plan.token_rows[std::uint64_t{token} * k_.c.top_k + lane] : kNone;
    const std::uint32_t rank = entry >> 20, n = __popc(__ballot_sync(~0u, entry != kNone));
    const bool remote = kPieces && !kMappedOnly && entry != kNone && is_remote(k_, rank);
    char* row = nullptr;
    if (entry != kNone) {
      std::uint32_t nth = entry & 0xfffffu;
      if constexpr (kPieces) nth -= a_.pieces.begin_rows[round * k_.c.world + rank];
      if (kPieces && !remote) nth += round % kPlaces * a_.pieces.tokens;
      row = own_slot(k_, set_of(k_.c, step_), Op::Combine, rank) + (remote ? k_.heap.piece_at(Op::Combine, round) : 0) + k_.combine.row_at(nth);
    }
    {
      const SpanTimer waits(k_, Span::AwaitingSums);
      bool good = true;
      if (remote)
        good = piece_has_come(k_, a_.pieces, Phase::CombineRecv, step_, Op::Combine, rank, round);
      else if (entry != kNone && kPieces)
        good = row_has_come(k_, row + k_.combine.arrival_at, Phase::CombineRecv, step_, rank, round);
      else if (entry != kNone)
        good = wait<Match::Exact>(k_, row + k_.combine.arrival_at, Phase::CombineRecv, step_, rank);
      if (!all_of_warp(good)) return false;
    }
    mark_stage(k_, Stage::Came);
    fence_copies();
    add_up(token, n, row);
    if (!kPieces) make_blank_again(k_, row, __ballot_sync(~0u, entry != kNone && (entry & 0xfffffu) < k_.word_rows));
    mark_stage(k_, Stage::Added);
    if (!kMappedOnly && a_.has_tail) take_tail<false>(a_, step_, token, n, row, rank);
    return true;
  }

  // Adds a token's n rows, which the first n lanes have.
  __device__ void add_up(std::uint32_t token, std::uint32_t n, const char* row) {
    const Inputs inputs{row, 1.0f, n};
    InputCursor cursor(inputs, k_.row_bytes);
    char* const y = a_.y + std::uint64_t{token} * a_.y_stride;
    for (std::uint32_t at = 0; at < k_.row_bytes; at += kSumTileBytes) {
      const std::uint32_t bytes = min(kSumTileBytes, k_.row_bytes - at), begin = at + threadIdx.x % 32 * 16, end = at + bytes;
      TileSums sums;
      if (a_.accumulate) sums.load(y, begin, end);
      for (std::uint32_t i = 0; i < n; ++i) add(cursor, bytes, sums);
      sums.store(y, begin, end);
    }
  }

  const CombineArguments& a_;
  const Common& k_;
  const std::uint32_t step_;
  CombineShared& s_;
  char* const memory_;
  CombinerTurns& turns_;
  ArrivingTiles tiles_;
  std::uint32_t stored_ = 0;  // tiles
  std::uint32_t copied_ = 0;  // parts of rows
  bool copies_ = false;  // they have the memory, and not the tiles
  char* told_ = nullptr;  // rows of a run whose source has yet to be told
  std::uint32_t to_tell_ = 0;
  std::uint64_t word_ = 0, told_word_ = 0;  // kPieces: of the rows of a run, and of those
  std::uint32_t told_source_ = 0;
  std::uint64_t piece_at_ = 0;  // in what the proxy sends
};

}  // namespace pplx::cuda
