// Blocks in pieces on GPUs, in rounds (protocol/pieces.h). Thread blocks claim the units of rounds in one order: a warp that waits for a row
// waits for one of the earliest round that is not read yet, or for peers that do. The last warp to have done a unit of a round tells the peers
// that the round has been read. A sender waits for that, and tells of all that it has stored before.
#pragma once

#include "../plan/counts.cuh"
#include "../plan/runs.cuh"
#include "remote.cuh"

namespace pplx::cuda {

// In-row words of a round, and the word that says that it has been read.
__device__ inline std::uint64_t word_of_round(const Common& k, std::uint32_t step, std::uint32_t round) {
  return pieces_word(k.generation, step, round + 1);
}

__device__ inline std::uint32_t* counts_of_set(const Common& k, const PieceArguments& p, std::uint32_t step) {
  return p.counts + set_of(k.c, step) * round_counts(p.most);
}
__device__ inline std::uint32_t claim(const Common& k, const PieceArguments& p, std::uint32_t step, Claim what) {
  return take_next(counts_of_set(k, p, step) + static_cast<std::uint32_t>(what));
}
// Forgets the counts of an op, by one warp, while no kernel of the set has anything to do with that op.
__device__ inline void forget_rounds(const Common& k, const PieceArguments& p, std::uint32_t step, Op op) {
  std::uint32_t* const counts = counts_of_set(k, p, step);
  for (std::uint32_t i = threadIdx.x % 32; i < kClaims; i += 32)
    if ((i == static_cast<std::uint32_t>(Claim::DispatchRecv)) == (op == Op::Dispatch)) counts[i] = 0;
  for (std::uint32_t i = threadIdx.x % 32; i < p.most; i += 32) counts[kClaims + static_cast<std::uint32_t>(op) * p.most + i] = 0;
}

// ---- waits ----

// Like poll_failure(). Some wait longer: a peer that has not read waits itself, and should blame its own peer first; what this rank is to send or
// to read itself waits for a peer. A warp that passes words on waits longest. passed_on: such a warp writes the word.
static __device__ __noinline__ Verdict ask_for_round(const Common& k, std::uint32_t turn, std::uint64_t first, std::uint64_t begun, Phase phase,
                                                     std::uint32_t step, std::uint32_t peer, std::uint64_t expected, bool passed_on, std::uint32_t longer) {
  const bool ask_host = (turn & 255) == 255;
  if (stopped(k, ask_host)) return Verdict::Failed;
  if (ask_host && !passed_on && said_goodbye(k, peer)) return Verdict::Left;
  const std::uint64_t limit = k.timeout_ns * (step == k.c.first_step ? deadlines::kFirstStepFactor : 1) + longer * kPassedOnNs;
  const std::uint64_t now = nanoseconds();
  const bool late = now - begun > limit;
  if ((late || ask_host) && load_acquire(&k.report->busy) != 0 && now - first < kBusyNs) return Verdict::Busy;
  if (!late) return Verdict::GoOn;
  fail(k, {AbortReason::Timeout, phase, k.c.rank, peer, step}, expected, 0);
  return Verdict::Failed;
}

inline constexpr std::uint32_t kPassersWait = 3;  // as `longer` above

// True if round `round` has been counted there. exactly: if it was the last.
__device__ inline bool says_round(const Common& k, const void* word, std::uint32_t step, std::uint32_t round, bool exactly) {
  const std::uint32_t rounds = pieces_in(load_acquire(word), k.generation, step);
  return exactly ? rounds == round + 1 : rounds > round;
}

// The meaning of a word of a round: a row of it is here, all of a peer's is, or the peer has read.
enum class Says { Row, Landed, Read };

static __device__ __noinline__ bool await_round_long(const Common& k, const void* word, Phase phase, std::uint32_t step,
                                                     std::uint32_t peer, std::uint32_t round, Says what) {
  const bool exactly = what == Says::Row;
  const std::uint64_t expected = kRound | (what == Says::Read ? kToBeRead : 0) | round;
  const std::uint32_t longer = peer == k.c.rank ? 2 : what == Says::Read ? 1 : 0;
  const std::uint64_t first = nanoseconds();
  std::uint64_t begun = first;
  for (std::uint32_t i = 1; !says_round(k, word, step, round, exactly); ++i) {
    if (i % 256 != 0) continue;
    const Verdict verdict = ask_for_round(k, i / 256, first, begun, phase, step, peer, expected, is_remote(k, peer), longer);
    if (verdict == Verdict::Failed) return false;
    if (verdict == Verdict::Busy) begun = nanoseconds();
    if (verdict != Verdict::Left || says_round(k, word, step, round, exactly)) continue;
    fail(k, {AbortReason::Closed, phase, k.c.rank, peer, step}, expected, 0);
    return false;
  }
  return true;
}

// Waits, by one thread. False: something failed.
__device__ inline bool await_round(const Common& k, const void* word, Phase phase, std::uint32_t step, std::uint32_t peer,
                                   std::uint32_t round, Says what) {
  const bool exactly = what == Says::Row;
  const bool good = says_round(k, word, step, round, exactly) || await_round_long(k, word, phase, step, peer, round, what);
  fuzz_delay(k, std::uint64_t{round} << 32 | step);
  return good;
}

// Waits, by one thread, until a remote peer's piece is here, whose rows have no words.
__device__ inline bool piece_has_come(const Common& k, const PieceArguments& p, Phase phase, std::uint32_t step, Op op, std::uint32_t peer,
                                      std::uint32_t round) {
  return await_round(k, remote_word(k, p, RemoteWord::Landed, step, op, peer), phase, step, peer, round, Says::Landed);
}

// Waits, by one thread, until a peer has read what lay where this round is to go. What lay there for a remote peer has left, too.
__device__ inline bool await_room(const Common& k, const PieceArguments& p, Phase phase, std::uint32_t step, Op op, std::uint32_t peer,
                                  std::uint32_t round) {
  if (round < kPlaces) return true;
  const void* const read = k.peers[k.c.rank] + k.heap.read_at(k.c, set_of(k.c, step), op, round, peer);
  const void* const word = is_remote(k, peer) ? remote_word(k, p, RemoteWord::Room, step, op, peer) : read;
  return await_round(k, word, phase, step, peer, round - kPlaces, Says::Read);
}

// A remote peer hears by its proxy; it is told of nothing that it does not wait for, nor of a piece that it has yet to send: this rank may be
// done with a round in which it gets no row from there. all: rounds of this rank.
__device__ inline void give_credit(const Common& k, const PieceArguments& p, std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t round,
                                   std::uint32_t all) {
  const std::uint32_t pieces = op == Op::Dispatch ? __ldcg(kept_rounds(p, peer)) : all;
  if (round + kPlaces >= pieces) return;
  if (op == Op::Combine && !piece_has_come(k, p, Phase::CombineRecv, step, op, peer, round)) return;
  if (kCarrier) {
    put_credit(k, step, op, peer);
    return;
  }
  const std::uint64_t index = k.heap.credit_index(k.c, set_of(k.c, step), op, peer);
  publish(k, mailbox_entry(k.heap, k.host, index).mail, word_of_round(k, step, round));
}

// Finishes one of a round's units, by a warp. The first unit knows how many there are. Rounds are told of in order. all: rounds of the step.
__device__ inline void finish_unit(const Common& k, const PieceArguments& p, std::uint32_t step, Op op, std::uint32_t round, std::uint32_t units,
                                   bool first, std::uint32_t all) {
  std::uint32_t more = 1;
  if (first) more += kAllParts - units + (round == 0 ? kRoundBefore : 0);
  for (; round + kPlaces < all; ++round, more = kRoundBefore) {  // no round follows the last ones
    fuzz_delay(k, std::uint64_t{round} << 32 | step);
    std::uint32_t* const count = counts_of_set(k, p, step) + kClaims + static_cast<std::uint32_t>(op) * p.most + round;
    if (count_of_warp(count, more) + more != kAllParts + kRoundBefore) return;
    for (std::uint32_t i = threadIdx.x % 32; i < k.living; i += 32) {
      const std::uint32_t peer = k.order[i];
      if (is_remote(k, peer))
        give_credit(k, p, step, op, peer, round, all);
      else
        publish(k, k.peers[peer] + k.heap.read_at(k.c, set_of(k.c, step), op, round, k.c.rank), word_of_round(k, step, round));
    }
  }
}

// ---- rounds ----

// Where the rows of one round are among those of each source. Shared memory, of a warp.
struct RoundRows {
  std::uint32_t begin[kMaxPeers + 1];  // in front of each source's, of all that the round has
  std::uint32_t first[kMaxPeers];  // rows before the round, in each source's block
};

// Waits, by one thread, for what a source tells of a round. False: something failed.
__device__ inline bool await_round_begin(const Common& k, const PieceArguments& p, Phase phase, std::uint32_t step, std::uint32_t source,
                                         std::uint32_t round, uint4& vec16) {
  const char* const place = k.peers[k.c.rank] + k.heap.round_at(k.c, set_of(k.c, step), source, p.most, round);
  vec16 = load_vec16(place);
  return is_tagged(k, vec16, step) || await_tagged(k, place, phase, step, source, vec16);
}
struct RoundRun {
  std::uint32_t round, source, first, rows;  // first: of the source's block
  std::uint32_t slot_row;
  bool is_first;  // unit of its round
  bool is_header;  // a header for `source`, a remote peer; no rows
};

class Rounds {
 public:
  // A warp's. rows_begin: of all sources. A unit is a run of at most `most_rows` rows.
  __device__ Rounds(const Common& k, const PieceArguments& p, std::uint32_t step, const std::uint32_t* rows_begin, Phase phase,
                    std::uint32_t most_rows, RoundRows& rows)
      : k_(k), p_(p), step_(step), rows_begin_(rows_begin), phase_(phase), most_rows_(most_rows), rows_(rows),
        keeps_(phase == Phase::CombineSend), headers_(phase == Phase::CombineSend ? remote_peers(k) : 0) {}

  // Hears how many rounds there are. begin: the first one that is wanted; many: sources that tell of theirs. False: something failed.
  __device__ bool open(std::uint32_t begin, std::uint32_t end, std::uint64_t many) {
    std::uint32_t most = 1;
    bool good = true;
#pragma unroll
    for (std::uint32_t i = 0; i < kSourcesOfLane; ++i) {
      const std::uint32_t source = threadIdx.x % 32 + 32 * i;
      const bool tells = (many >> source & 1) != 0;
      std::uint32_t rounds = 0;
      if (is_there(source) && keeps_) {
        rounds = *kept_rounds(p_, source);
      } else if (tells && is_remote(k_, source)) {
        good = piece_has_come(k_, p_, phase_, step_, Op::Dispatch, source, 0) && good;
        rounds = good ? __ldcg(kept_rounds(p_, source)) : 0;
      } else if (tells) {
        uint4 vec16;
        good = await_round_begin(k_, p_, phase_, step_, source, 0, vec16) && good;
        rounds = good ? vec16.y : 0;
        if (good && (rounds == 0 || rounds > p_.most)) good = blame(k_, phase_, step_, source, p_.most, rounds);
      }
      of_source_[i] = rounds;
      most = max(most, rounds);
    }
    all_ = __reduce_max_sync(~0u, most);
    end_ = min(end, all_);
    round_ = begin - 1;
    return all_of_warp(good);
  }
  __device__ std::uint32_t all() const { return all_; }
  __device__ bool failed() const { return failed_; }
  __device__ std::uint32_t units() const { return units_; }  // units of the last run's round

  // The nth unit from the first wanted round on; a warp asks for ever later ones. Each round has some. False: none, or a failure.
  __device__ bool find(std::uint32_t n, RoundRun& run) {
    while (n - base_ >= units_) {
      base_ += units_;
      units_ = 0;
      if (++round_ >= end_) return false;
      failed_ = !load(round_);
      if (failed_) return false;
      units_ = max(1u, headers_ + RowRuns(k_, rows_.begin, k_.living, most_rows_).all());
    }
    n -= base_;
    run.round = round_;
    run.is_first = n == 0;
    run.is_header = n < headers_;
    run.rows = 0;
    if (run.is_header) run.source = k_.order[n];
    if (run.is_header || rows_.begin[k_.c.world] == 0) return true;
    n -= headers_;
    const RowRun of = RowRuns(k_, rows_.begin, k_.living, most_rows_).at(n);
    run.source = of.source;
    run.first = rows_.first[of.source] + of.first;
    run.rows = of.rows;
    run.slot_row = of.first + (is_remote(k_, of.source) ? 0 : round_ % kPlaces * p_.tokens);
    return true;
  }

 private:
  static constexpr std::uint32_t kSourcesOfLane = kMaxPeers / 32;

  __device__ bool is_there(std::uint32_t source) const { return source < k_.c.world && (k_.dead >> source & 1) == 0; }
  // Rows of the source's earlier rounds.
  __device__ bool load_begin(std::uint32_t source, std::uint32_t round, std::uint32_t& begin) const {
    if (keeps_ || is_remote(k_, source)) {
      begin = __ldcg(kept_rounds(p_, source) + 1 + round);
      return true;
    }
    uint4 vec16;
    const bool good = await_round_begin(k_, p_, phase_, step_, source, round, vec16);
    begin = vec16.x;
    return good;
  }

  __device__ bool load(std::uint32_t round) {
    __syncwarp();
    std::uint32_t before = 0;
    bool good = true;
#pragma unroll
    for (std::uint32_t i = 0; i < kSourcesOfLane; ++i) {
      if (32 * i >= k_.c.world) break;
      const std::uint32_t source = threadIdx.x % 32 + 32 * i;
      std::uint32_t first = 0, n = 0;
      if (round < of_source_[i]) {
        const std::uint32_t rows = rows_begin_[source + 1] - rows_begin_[source];
        std::uint32_t end = rows;
        if (!keeps_ && is_remote(k_, source)) good = piece_has_come(k_, p_, phase_, step_, Op::Dispatch, source, round);
        if (good && round != 0) good = load_begin(source, round, first);
        if (good && round + 1 < of_source_[i]) good = load_begin(source, round + 1, end);
        n = end - first;
        if (good && (first > end || end > rows || n > p_.tokens)) good = blame(k_, phase_, step_, source, p_.tokens, n);
        if (!good) n = 0;
      }
      std::uint32_t all = 0;
      const std::uint32_t begin = before + sum_before(n, all);
      before += all;
      if (source < k_.c.world) {
        rows_.begin[source] = begin;
        rows_.first[source] = first;
        if (source + 1 == k_.c.world) rows_.begin[k_.c.world] = before;
      }
    }
    return all_of_warp(good);
  }

  const Common& k_;
  const PieceArguments& p_;
  const std::uint32_t step_;
  const std::uint32_t* const rows_begin_;
  const Phase phase_;
  const std::uint32_t most_rows_;
  RoundRows& rows_;
  const bool keeps_;  // a combine: peers may be in the set's next step already
  const std::uint32_t headers_;  // units of a round that come before its rows
  std::uint32_t of_source_[kSourcesOfLane] = {};  // rounds of sources lane and lane + 32; 0: there is no such source
  std::uint32_t all_ = 1, end_ = 0;
  std::uint32_t round_ = 0, base_ = 0, units_ = 0;  // that was loaded last; units before its first, and its own
  bool failed_ = false;
};

}  // namespace pplx::cuda
