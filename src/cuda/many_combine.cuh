// combine() of many tokens inside a node, by bulk copies. A worker sends runs of rows: the tiles of what is added up come to shared memory,
// asked for ahead, and a tile of the sum goes to the row's source. Then it receives tokens in the same way; this rank's own row of a
// token is summed then, and never stored. While a row's last tiles are added, the next row's come. Rows of large blocks have arrival words,
// those of a run behind one fence; small blocks, and blocks of ranks that sent few tokens, are as in a combine of few.
#pragma once

#include "combine_recv.cuh"
#include "many_sums.cuh"
#include "ready.cuh"
#include "runs.cuh"

namespace pplx::cuda {

// A row that is sent, of a run.
struct RowToSend {
  RowRun run = {0, 0, 0};  // of no rows: there is none
  std::uint32_t nth = 0;
  Places places;
  bool found = false;  // inputs
  Inputs inputs;
};

// A token that is received. Each of the first n lanes has a row.
struct TokenToReceive {
  std::uint32_t token = kNone, entry = kNone, n = 0;
  std::uint32_t before = 0;  // rows before this rank's own one
  bool has_own = false;  // which is summed here, of so many inputs, the first ones
  std::uint32_t own = 0;
  char* row = nullptr;
  Inputs inputs;
};

// A token with a row that shows by itself that it has come. A function of its own: its registers are not those of the tiles.
template <typename T, bool kPlain>
static __device__ __noinline__ bool receive_strips(const CombineArguments& a, std::uint32_t step, std::uint32_t token, std::uint32_t entry,
                                                   std::uint32_t own_rows) {
  for (std::uint32_t i = 0; i < a.received_in.strips; ++i)
    if (!receive_strip<T, false, kPlain, true>(a, step, token * a.received_in.strips + i, entry, own_rows)) return false;
  return true;
}

// kPlain: no tails, and no weights of combine's own. kReady: rows are read when the caller's kernel says that they are written.
template <typename T, bool kPlain, bool kReady>
class ManyCombiner {
  static constexpr int kVectors = kVectorsOfTile;
  using TileSums = Sums<T, kVectors>;

 public:
  // memory: of this warp, kCombinerBytes.
  __device__ ManyCombiner(const CombineArguments& a, std::uint32_t step, CombineShared& s, StoredRuns& stored, char* memory, std::uint64_t* loaded)
      : a_(a), k_(a.common), step_(step), s_(s), stored_runs_(stored), out_(memory + kSumTiles * kSumTileBytes), tiles_(memory, loaded),
        sums_own_(a.sums_own) {}

  // The block's own share of the runs of rows, and for the first warp those that nobody has begun. senders: of the block, the first warps.
  __device__ void send(std::uint32_t senders) {
    const Spends all(k_, Span::SendingSums);
    if (!kPlain && a_.uses_weights) send_all_weights(a_, step_, threadIdx.x / 32, senders);
    const std::uint32_t together = told_together(s_.rows_begin[k_.c.world], gridDim.x * senders);
    const RowRuns runs(k_, s_.rows_begin, k_.living - (sums_own_ ? 1 : 0), together);
    s_.claimed.wait();
    owns_share_ = s_.mine;
    if constexpr (kReady)
      send_when_ready(runs);
    else
      send_in_order(runs);
    tell();
    if (threadIdx.x % 32 == 0) stored_runs_.post(threadIdx.x / 32, posts_, nullptr, 0);
  }

  __device__ void receive() {
    const Spends all(k_, Span::ReceivingSums);
    const std::uint32_t own_rows = sums_own_ ? s_.rows_begin[k_.c.rank] : kNone;
    find_ranks_with_words();
    claim_token();
    while (await_token()) {
      const bool shows = ahead_is_ == Ahead::Shows;
      TokenToReceive now = next_;
      claim_token();
      if (shows ? !receive_strips<T, kPlain>(a_, step_, now.token, now.entry, own_rows) : !receive_token(now)) break;
    }
    tiles_.drop();
  }

 private:
  __device__ bool compact() const { return k_.c.layout == LayoutKind::Compact; }

  // ---- send ----

  // The next run of the block's own share, then of shares that were taken.
  __device__ std::uint32_t next_run(const RowRuns& runs) {
    if (owns_share_) {
      std::uint32_t run = 0;
      if (threadIdx.x % 32 == 0) run = atomicAdd(&s_.sent, 1u) * gridDim.x + blockIdx.x;
      run = __shfl_sync(~0u, run, 0);
      if (run < runs.all()) return run;
      owns_share_ = false;
    }
    if (threadIdx.x >= 32) return kNone;
    if (taken_run_ >= runs.all()) taken_run_ = take_another_share(k_, Op::Combine, step_, min(gridDim.x, runs.all()));
    const std::uint32_t mine = taken_run_;
    if (mine != kNone) taken_run_ += gridDim.x;
    return mine;
  }

  __device__ bool by_word(std::uint32_t source) const { return s_.rows_begin[source + 1] - s_.rows_begin[source] >= k_.word_rows; }

  __device__ void send_when_ready(const RowRuns& runs) {
    RowsWait rows;
    const auto next = [&] { return next_run(runs); };
    const auto try_send = [&](std::uint32_t n) { return send_written_run(runs.at(n), rows); };
    send_as_written(a_, step_, rows, next, try_send, [&] { tell(); });
  }

  // Unless some of its rows are not written yet.
  __device__ bool send_written_run(const RowRun& run, RowsWait& rows) {
    for (std::uint32_t i = 0; i < run.rows; ++i) {
      Places places;
      places.load<kPlain>(a_, s_.rows_begin[run.source] + run.first + i);
      places.check(a_);
      if (!rows.are_written(a_, places)) return false;
    }
    linger(k_, run.first);
    fence_copies();
    RowToSend none;
    RowToSend row = first_of(run);
    for (std::uint32_t i = 0; i < run.rows && send_row(row, none); ++i) row = row_after(row);
    return true;
  }

  __device__ void send_in_order(const RowRuns& runs) {
    RowToSend next = first_of_next_run(runs);
    while (next.run.rows != 0) {
      RowToSend now = next;
      next = now.nth + 1 < now.run.rows ? row_after(now) : first_of_next_run(runs);
      if (!send_row(now, next)) return;
    }
  }

  __device__ RowToSend first_of(const RowRun& run) {
    RowToSend row;
    row.run = run;
    row.places.load<kPlain>(a_, s_.rows_begin[run.source] + run.first);
    return row;
  }
  __device__ RowToSend first_of_next_run(const RowRuns& runs) {
    const std::uint32_t run = next_run(runs);
    return run == kNone ? RowToSend() : first_of(runs.at(run));
  }
  // Of the same run; there may be none.
  __device__ RowToSend row_after(const RowToSend& row) {
    RowToSend next;
    next.run = row.run;
    next.nth = row.nth + 1;
    if (next.nth < row.run.rows) next.places.load<kPlain>(a_, s_.rows_begin[row.run.source] + row.run.first + next.nth);
    return next;
  }

  // What it is a sum of. Weights of combine's own may have to be waited for: nobody looks ahead for these. False: they will not come.
  __device__ bool find_inputs(RowToSend& row) {
    if (row.found || row.run.rows == 0) return true;
    row.found = true;
    row.places.check(a_);
    if (!kPlain && a_.uses_weights && !sent_weight(a_, step_, row.run.source, row.run.first + row.nth, row.places.weight)) return false;
    row.inputs = inputs_of(a_, row.places);
    return true;
  }

  // Tiles of this row, and then of the next one.
  __device__ void ask(RowToSend& now, RowToSend& next) {
    now.inputs.ask(tiles_, k_.row_bytes);
    if (!kPlain || kReady || tiles_.full() || !now.inputs.all_asked(k_.row_bytes)) return;
    find_inputs(next);
    next.inputs.ask(tiles_, k_.row_bytes);
  }

  // Nothing is added to the row's only input, and its weight is 1.
  __device__ bool only_copies(const Inputs& inputs) const { return compact() && inputs.n == 1 && (kPlain || inputs.weight == 1.0f); }

  // False: something failed.
  __device__ bool send_row(RowToSend& now, RowToSend& next) {
    if (!find_inputs(now)) return false;
    const bool words = by_word(now.run.source), copies = words && only_copies(now.inputs);
    char* const rows = block_for(k_, set_of(k_.c, step_), Op::Combine, now.run.source) + k_.combine.row_at(now.run.first);
    char* const row = rows + std::uint64_t{now.nth} * k_.combine.row_bytes;
    if (!kPlain && a_.has_tail) write_tail(a_, now.places.choices, now.places.place, row + k_.combine.tail_at);
    for (std::uint32_t at = 0; at < k_.row_bytes; at += kSumTileBytes) {
      const std::uint32_t bytes = min(kSumTileBytes, k_.row_bytes - at);
      linger(k_, std::uint64_t{step_} << 32 | at);
      if (copies) {
        ask(now, next);
        tiles_.give(row + at, bytes);
        continue;
      }
      TileSums sums;
      if (compact() && now.inputs.n != 0) sums.start(-0.0f);  // only copied: keeps its sign of zero
      for (std::uint32_t i = 0; i < now.inputs.n; ++i) {
        ask(now, next);
        add(now.inputs, i, bytes, sums);
      }
      if (words)
        store_by_bulk(sums, row + at, bytes);
      else
        sums.send(row, at + threadIdx.x % 32 * 16, at + bytes);
    }
    if (!kPlain && a_.has_tail) {
      __syncwarp();
      if (!words && threadIdx.x % 32 == 0) publish(k_, row + k_.combine.arrival_at, arrival_word(k_.generation, step_));  // a tail is any bits
    }
    if (words && now.nth + 1 == now.run.rows) end_run(rows, now.run.rows);
    return true;
  }

  // All that is under way is asked for before the next tile is waited for.
  __device__ void take(std::uint32_t bytes, uint4 (&v)[kVectors]) {
    const Spends waits(k_, Span::AwaitingInputs);
    tiles_.take(bytes, v);
  }
  __device__ void add(const Inputs& inputs, std::uint32_t nth, std::uint32_t bytes, TileSums& sums) {
    uint4 v[kVectors];
    take(bytes, v);
    const Spends adds(k_, Span::AddingUp);
    sums.add_row(v, __shfl_sync(~0u, inputs.weight, static_cast<int>(nth)));
  }

  // The first lane stores, so it alone waits.
  __device__ void store_by_bulk(const TileSums& sums, char* to, std::uint32_t bytes) {
    char* const from = out_ + stored_++ % kSumTilesOut * kSumTileBytes;
    {
      const Spends waits(k_, Span::AwaitingPlaceOfSum);
      if (threadIdx.x % 32 == 0) bulk_await_stored<kSumTilesOut - 1>();
      __syncwarp();
    }
    const Spends stores(k_, Span::StoringSums);
    sums.store(from, threadIdx.x % 32 * 16, bytes);
    fence_shared_copies();
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    bulk_store(to, from, bytes);
    bulk_end_group();
  }

  // The run before this one has had its time to arrive.
  __device__ void end_run(char* rows, std::uint32_t n) {
    if (to_tell_ != 0) {
      const Spends tells(k_, Span::TellingOfSums);
      if (threadIdx.x % 32 == 0) {
        if (n * k_.row_bytes > kSumTileBytes)
          bulk_await_stored<2>();
        else
          bulk_await_stored<1>();
      }
      post();
    }
    told_ = rows;
    to_tell_ = n;
  }
  __device__ void tell() {
    if (threadIdx.x % 32 == 0) bulk_await_stored<0>();
    if (to_tell_ != 0) post();
    to_tell_ = 0;
    __syncwarp();
  }
  __device__ void post() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) stored_runs_.post(threadIdx.x / 32, posts_, told_, to_tell_);
    ++posts_;
  }

  // ---- receive ----

  // What is known of the token behind the one that is summed. Its first tiles are asked for when all of its rows have come.
  enum class Ahead { Entry, Rows, There, Shows };

  __device__ void find_ranks_with_words() {
    ranks_with_words_ = 0;
    for (std::uint32_t begin = 0; begin < k_.c.world; begin += 32) {
      const std::uint32_t rank = begin + threadIdx.x % 32;
      const std::uint32_t bits = __ballot_sync(~0u, rank < k_.c.world && comes_by_word(a_, rank));
      ranks_with_words_ |= static_cast<unsigned long long>(bits) << begin;
    }
  }

  __device__ void claim_token() {
    std::uint32_t nth = 0;
    if (threadIdx.x % 32 == 0) nth = atomicAdd(&s_.received, 1u);
    nth = __shfl_sync(~0u, nth, 0);
    next_ = {};
    next_.token = nth * gridDim.x + blockIdx.x;
    ahead_is_ = Ahead::Entry;
    if (next_.token < a_.own && threadIdx.x % 32 < k_.c.top_k)
      next_.entry = a_.plan.token_rows[std::uint64_t{next_.token} * k_.c.top_k + threadIdx.x % 32];
  }

  // One step further, if that needs no waiting.
  __device__ void look_ahead() {
    if (next_.token >= a_.own) return;
    if (ahead_is_ == Ahead::Entry)
      find_rows();
    else if (ahead_is_ == Ahead::Rows)
      look_for_rows();
  }

  __device__ void find_rows() {
    const std::uint32_t entry = next_.entry, rank = entry >> 20;
    next_.n = __popc(__ballot_sync(~0u, entry != kNone));
    const bool is_own = sums_own_ && entry != kNone && rank == k_.c.rank;
    const bool comes = entry != kNone && !is_own, words = comes && (ranks_with_words_ >> rank & 1) != 0;
    ahead_is_ = Ahead::Shows;
    if (__any_sync(~0u, comes && !words)) return;
    const std::uint32_t own = __ballot_sync(~0u, is_own);
    next_.has_own = own != 0;
    next_.before = own == 0 ? next_.n : __ffs(static_cast<int>(own)) - 1;
    places_ = {};
    if (kPlain && own != 0) places_.load<true>(a_, s_.rows_begin[k_.c.rank] + (__shfl_sync(~0u, entry, static_cast<int>(next_.before)) & 0xfffffu));
    word_ = arrival_word(k_.generation, step_);
    if (words) {
      next_.row = own_slot(k_, set_of(k_.c, step_), Op::Combine, rank) + k_.combine.row_at(entry & 0xfffffu);
      word_ = load_acquire(next_.row + k_.combine.arrival_at);
    }
    ahead_is_ = Ahead::Rows;
  }

  __device__ void look_for_rows() {
    const bool there = word_ == arrival_word(k_.generation, step_);
    if (!all_of_warp(there)) {
      if (!there) word_ = load_acquire(next_.row + k_.combine.arrival_at);
      return;
    }
    note(k_, Stage::Came);
    fence_copies();
    places_.check(a_);
    add_inputs(next_, inputs_of(a_, places_));
    ahead_is_ = Ahead::There;
  }

  // Until the next token can be summed. False: there is none, or something failed.
  __device__ bool await_token() {
    if (next_.token >= a_.own) return false;
    if (ahead_is_ == Ahead::Entry) find_rows();
    if (ahead_is_ != Ahead::Rows) return true;
    const Spends waits(k_, Span::AwaitingSums);
    const bool good = next_.row == nullptr || wait<Match::Exact>(k_, next_.row + k_.combine.arrival_at, Phase::CombineRecv, step_, next_.entry >> 20);
    if (!all_of_warp(good)) return false;
    word_ = arrival_word(k_.generation, step_);
    look_for_rows();
    return true;
  }

  // What a token's sum is of, in the order in which it comes: this rank's own rows of memory, then peers' rows. One that is only copied, as its
  // weight is 1 in a plain combine, needs no sum of its own: it comes in its place among peers' rows.
  __device__ void add_inputs(TokenToReceive& t, const Inputs& mine) const {
    const std::uint32_t lane = threadIdx.x % 32;
    const auto row = reinterpret_cast<unsigned long long>(t.row), its_own = reinterpret_cast<unsigned long long>(mine.from);
    if (t.has_own && compact() && mine.n == 1) {
      const auto only = __shfl_sync(~0u, its_own, 0);
      t.has_own = false;
      t.inputs.n = t.n;
      t.inputs.from = reinterpret_cast<const char*>(lane == t.before ? only : row);
      return;
    }
    t.own = t.has_own ? mine.n : 0;
    const std::uint32_t peer = lane - t.own;
    const auto of_peer = __shfl_sync(~0u, row, static_cast<int>(peer + (t.has_own && peer >= t.before ? 1 : 0)) & 31);
    t.inputs.n = t.own + t.n - (t.has_own ? 1 : 0);
    t.inputs.from = reinterpret_cast<const char*>(lane < t.own ? its_own : of_peer);
    t.inputs.weight = mine.weight;
  }

  __device__ void ask(TokenToReceive& now) {
    now.inputs.ask(tiles_, k_.row_bytes);
    if (!tiles_.full() && now.inputs.all_asked(k_.row_bytes) && ahead_is_ == Ahead::There && next_.token < a_.own) next_.inputs.ask(tiles_, k_.row_bytes);
  }

  // False: something failed.
  __device__ bool receive_token(TokenToReceive& now) {
    add_up(now);
    if (__any_sync(~0u, now.row != nullptr && (now.entry & 0xfffffu) < k_.word_rows)) make_blank_again(now.row, now.entry);
    note(k_, Stage::Added);
    return kPlain || !a_.has_tail || read_tail<false>(a_, step_, now.token, now.n, now.row, now.entry >> 20);
  }

  __device__ void add_up(TokenToReceive& now) {
    const std::uint32_t lane = threadIdx.x % 32;
    char* const y = a_.y + std::uint64_t{now.token} * a_.y_stride;
    for (std::uint32_t at = 0; at < k_.row_bytes; at += kSumTileBytes) {
      const std::uint32_t bytes = min(kSumTileBytes, k_.row_bytes - at), begin = at + lane * 16, end = at + bytes;
      look_ahead();
      if (now.has_own) sum_own_tile(now, bytes);
      TileSums sums;
      if (a_.accumulate) sums.load(y, begin, end);
      for (std::uint32_t i = 0; i < now.n; ++i) {
        uint4 v[kVectors];
        if (now.has_own && i == now.before) {
#pragma unroll
          for (int j = 0; j < kVectors; ++j) v[j] = *own_piece(j);
        } else {
          ask(now);
          take(bytes, v);
        }
        const Spends adds(k_, Span::AddingUp);
        sums.add_row(v);
      }
      sums.store(y, begin, end);
    }
  }

  // What a peer would have sent of the own row's next tile: rounded as there. Each lane has its pieces where sums that were sent have been.
  __device__ void sum_own_tile(TokenToReceive& now, std::uint32_t bytes) {
    TileSums sums;
    if (compact() && now.own != 0) sums.start(-0.0f);
    for (std::uint32_t i = 0; i < now.own; ++i) {
      ask(now);
      add(now.inputs, i, bytes, sums);
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) *own_piece(j) = T::pack(sums.sum[j]);
  }
  __device__ uint4* own_piece(int j) const { return reinterpret_cast<uint4*>(out_ + j * 512 + threadIdx.x % 32 * 16); }

  // A later step of few tokens has rows here that show by themselves.
  __device__ void make_blank_again(char* row, std::uint32_t entry) const {
    const std::uint32_t blank = __ballot_sync(~0u, row != nullptr && (entry & 0xfffffu) < k_.word_rows);
    for (std::uint32_t bits = blank; bits != 0; bits &= bits - 1) {
      char* const to = reinterpret_cast<char*>(
          __shfl_sync(~0u, reinterpret_cast<unsigned long long>(row), __ffs(static_cast<int>(bits)) - 1));
      for (std::uint32_t at = threadIdx.x % 32 * 16; at < k_.row_bytes; at += 512) make_blank(to + at);
    }
  }

  const CombineArguments& a_;
  const Common& k_;
  const std::uint32_t step_;
  CombineShared& s_;
  StoredRuns& stored_runs_;
  char* const out_;
  ArrivingTiles tiles_;
  const bool sums_own_;
  bool owns_share_ = false;  // and has not sent all of it
  std::uint32_t taken_run_ = kNone;  // the next one of a share that was taken
  std::uint32_t stored_ = 0, posts_ = 0;  // tiles; runs
  char* told_ = nullptr;  // rows of a run whose source has yet to be told
  std::uint32_t to_tell_ = 0;
  unsigned long long ranks_with_words_ = 0;  // a bit each
  TokenToReceive next_;
  Ahead ahead_is_ = Ahead::Entry;
  Places places_;  // of this rank's own row of the next token
  std::uint64_t word_ = 0;  // of this lane's row of it
};

}  // namespace pplx::cuda
