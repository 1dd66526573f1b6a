// A plain combine of many tokens whose rows are sums of several rows of experts, by ordinary loads and stores. A warp adds up a row by
// itself, strip by strip; as soon as one of its inputs has been added, that one's part of the next strip is asked for, into the same registers. So a
// multiprocessor has as much under way as its warps have registers for, and each scheduler several warps to choose from. Some warps send first; what
// is to be received is everybody's. Nobody who sends waits for a peer.
#pragma once

#include "many_combine.cuh"
#include "runs.cuh"

namespace pplx::cuda {

// The inputs of a sum, for a warp. Lane i has the address of the ith row that is added.
struct Summands {
  const char* from = nullptr;  // this lane's
  float weight = 1.0f;  // of its row, where it is one of `own`
  std::uint32_t own = 0, all = 0;  // how many: rows of experts, which come first; those and rows that peers have sent
  std::uint32_t own_comes = kNone;  // of what is received: before which of these the sum of those is added, even if it is of none
};

// Goes through a sum, strip by strip, in each through its rows, so many at once: they are under way while those before them are added.
struct SummandPlace {
  static constexpr std::uint32_t kRows = 6;
  static constexpr int kVectors = 2;  // sixteen bytes each, of a lane
  static constexpr std::uint32_t kStripBytes = kVectors * 512;

  std::uint32_t strip = 0, first = 0;  // where in the row; which of the summands

  // False: that was the last one.
  __device__ bool next(const Summands& of, std::uint32_t bytes) {
    first += kRows;
    if (first < of.all) return true;
    first = 0;
    strip += kStripBytes;
    return strip < bytes;
  }
};

// A token with a row that shows by itself that it has come. Rare, and long: not among what is always there. False: something failed.
template <typename T>
__device__ __noinline__ bool receive_strips(const CombineArguments& a, std::uint32_t step, const CombineShared& s, std::uint32_t token,
                                            std::uint32_t entry) {
  const std::uint32_t strips = a.received_in.strips, own_rows = a.sums_own ? s.rows_begin[a.common.c.rank] : kNone;
  for (std::uint32_t i = 0; i < strips; ++i)
    if (!receive_strip<T, false, true, true>(a, step, token * strips + i, entry, own_rows)) return false;
  return true;
}

template <typename T>
class RowSummer {
  using Place = SummandPlace;
  static constexpr int kVectors = Place::kVectors;
  using PartSums = Sums<T, kVectors>;

 public:
  // memory: of this warp, kBytes.
  static constexpr std::uint32_t kBytes = Place::kStripBytes;
  __device__ RowSummer(const CombineArguments& a, std::uint32_t step, CombineShared& s, char* memory)
      : a_(a), k_(a.common), step_(step), s_(s), own_(reinterpret_cast<uint4*>(memory) + threadIdx.x % 32) {}

  // The block's own share of the runs, once it is known whether it has one; and, for the first warp, those that nobody has begun. senders: of the
  // block, the first warps.
  __device__ void send(std::uint32_t senders) {
    const Spends all(k_, Span::SendingSums);
    const RowRuns runs(k_, s_.rows_begin, k_.living - (a_.sums_own ? 1 : 0), told_together(s_.rows_begin[k_.c.world], gridDim.x * senders));
    const std::uint32_t shares = min(gridDim.x, runs.all());
    s_.claimed.wait();
    bool own = s_.mine;
    for (std::uint32_t run = kNone;; run += gridDim.x) {
      if (own) run = claim(&s_.sent);
      if (own && run >= runs.all()) {
        own = false;
        run = kNone;
      }
      if (!own && threadIdx.x >= 32) return;
      if (run >= runs.all()) run = take_another_share(k_, Op::Combine, step_, shares);
      if (run == kNone) return;
      send_run(runs.at(run));
    }
  }

  // Tokens of this thread block, until there are no more, or one of them fails.
  __device__ void receive() {
    const Spends all(k_, Span::ReceivingSums);
    std::uint32_t token = claim(&s_.received), entry = load_entry(token);
    while (token < a_.own) {
      const std::uint32_t next = claim(&s_.received), its_entry = load_entry(next);
      if (!receive_token(token, entry)) return;
      token = next;
      entry = its_entry;
    }
  }

 private:
  __device__ static std::uint32_t lane() { return threadIdx.x % 32; }

  // The thread block's next one.
  __device__ static std::uint32_t claim(std::uint32_t* counter) {
    std::uint32_t nth = 0;
    if (lane() == 0) nth = atomicAdd(counter, 1u);
    return __shfl_sync(~0u, nth, 0) * gridDim.x + blockIdx.x;
  }

  // ---- send ----

  __device__ void send_run(const RowRun& run) {
    char* const rows = block_for(k_, set_of(k_.c, step_), Op::Combine, run.source) + k_.combine.row_at(run.first);
    const bool by_word = s_.rows_begin[run.source + 1] - s_.rows_begin[run.source] >= k_.word_rows;
    const std::uint32_t begin = s_.rows_begin[run.source] + run.first;
    for (std::uint32_t i = 0; i < run.rows; ++i) {
      Places places;
      places.load<true>(a_, begin + i);
      places.check(a_);
      const std::uint32_t placed = __ballot_sync(~0u, places.place != kNone);
      note(k_, Stage::Found);
      Summands of;
      of.own = of.all = __popc(placed);
      gather(places, placed, nullptr, 0, of);
      char* const to = known_global(rows + std::uint64_t{i} * k_.combine.row_bytes);
      add_up<false>(of, [&](const PartSums& sums, std::uint32_t at) {
        if (by_word)
          sums.store(to, at, k_.row_bytes);
        else
          sums.send(to, at, k_.row_bytes);
      });
      note(k_, Stage::Sent);
    }
    if (!by_word) return;
    const Spends tells(k_, Span::TellingOfSums);
    __syncwarp();
    if (lane() < run.rows) {
      fence_system();
      linger(k_, std::uint64_t{step_} << 32 | run.first);
      store_relaxed(rows + std::uint64_t{lane()} * k_.combine.row_bytes + k_.combine.arrival_at, arrival_word(k_.generation, step_));
    }
    __syncwarp();
  }

  // ---- receive ----

  __device__ std::uint32_t load_entry(std::uint32_t token) const {
    return lane() < k_.c.top_k && token < a_.own ? a_.plan.token_rows[std::uint64_t{token} * k_.c.top_k + lane()] : kNone;
  }

  // entry: this lane's choice of the token, its row of a rank's block. False: something failed.
  __device__ bool receive_token(std::uint32_t token, std::uint32_t entry) {
    const std::uint32_t rank = entry >> 20, number = entry & 0xfffffu;
    const std::uint32_t own = __ballot_sync(~0u, a_.sums_own && entry != kNone && rank == k_.c.rank);
    Places places;
    if (own != 0) places.load<true>(a_, s_.rows_begin[k_.c.rank] + __shfl_sync(~0u, number, __ffs(static_cast<int>(own)) - 1));
    const std::uint32_t there = __ballot_sync(~0u, entry != kNone), peers = there & ~own;
    const bool is_peer = (peers >> lane() & 1) != 0, by_word = is_peer && comes_by_word(a_, rank);
    if (__any_sync(~0u, is_peer && !by_word)) return receive_strips<T>(a_, step_, s_, token, entry);
    char* const row = is_peer ? own_slot(k_, set_of(k_.c, step_), Op::Combine, rank) + k_.combine.row_at(number) : nullptr;
    {
      const Spends waits(k_, Span::AwaitingSums);
      if (!all_of_warp(!is_peer || wait<Match::Exact>(k_, row + k_.combine.arrival_at, Phase::CombineRecv, step_, rank))) return false;
    }
    note(k_, Stage::Came);
    std::uint32_t placed = 0;
    if (own != 0) {
      places.check(a_);
      placed = __ballot_sync(~0u, places.place != kNone);
    }
    Summands of;
    of.own = __popc(placed);
    of.all = of.own + __popc(peers);
    if (own != 0) of.own_comes = of.own + __popc(peers & (own - 1));
    gather(places, placed, row, peers, of);
    char* const y = known_global(a_.y + std::uint64_t{token} * a_.y_stride);
    const std::uint32_t blank = __ballot_sync(~0u, is_peer && number < k_.word_rows);
    add_up<true>(of, [&](const PartSums& sums, std::uint32_t at) { sums.store(y, at, k_.row_bytes); }, y);
    make_blank_again(k_, row, blank);
    note(k_, Stage::Added);
    return true;
  }

  // ---- sums ----

  // The lanes' rows one after the other: those of experts that `placed` has, then those of peers.
  __device__ void gather(const Places& places, std::uint32_t placed, const char* row, std::uint32_t peers, Summands& of) const {
    const bool own = lane() < of.own;
    const int from = nth_bit(own ? placed : peers, own ? lane() : lane() - of.own);
    const std::uint32_t place = __shfl_sync(~0u, places.place, from);
    const char* const of_peer = of_lane(row, from);
    const float weight = __shfl_sync(~0u, places.weight, from);
    of.weight = own ? weight : 1.0f;
    of.from = own ? a_.expert_out + place * a_.expert_stride : of_peer;
  }

  __device__ std::uint32_t lane_at(std::uint32_t strip) const { return strip + lane() * 16; }

  // A row's part of a strip. kReceives: it may have been written while this kernel ran.
  template <bool kReceives>
  __device__ void load(const Summands& of, std::uint32_t nth, std::uint32_t strip, uint4 (&v)[kVectors]) const {
    const std::uint32_t at = lane_at(strip);
    const char* const from = known_global(of_lane(of.from, static_cast<int>(nth))) + at;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (at + j * 512 < k_.row_bytes) v[j] = kReceives ? load_arrived(from + j * 512) : load_input(from + j * 512);
  }

  // store(sums, at): a strip, of which this lane's part begins at `at`. As soon as a row has been added, what comes next in its place is asked for.
  // kReceives: the sum of rows of experts is rounded as a peer's was before it was sent, and added to the others, ranks ascending; y: what that
  // begins with, where the caller accumulates.
  template <bool kReceives, typename Store>
  __device__ void add_up(const Summands& of, const Store& store, const char* y = nullptr) const {
    uint4 v[Place::kRows][kVectors] = {};  // without a value, it would live in local memory
#pragma unroll
    for (std::uint32_t i = 0; i < Place::kRows; ++i) {
      if (i >= of.all) break;
      load<kReceives>(of, i, 0, v[i]);
    }
    PartSums sums;
    const auto end_own = [&](std::uint32_t strip) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) own_[j * 32] = T::pack(sums.sum[j]);
      sums.start(0.0f);
      if (a_.accumulate) sums.load(y, lane_at(strip), k_.row_bytes);
    };
    const auto add_own = [&] {
      uint4 own[kVectors];
#pragma unroll
      for (int j = 0; j < kVectors; ++j) own[j] = own_[j * 32];
      sums.add_row(own);
    };
    Place at, next;
    for (bool more = true; more; at = next) {
      more = next.next(of, k_.row_bytes);
      if (at.first == 0) {
        sums.start(0.0f);
        if (kReceives && of.own == 0) end_own(at.strip);
      }
#pragma unroll
      for (std::uint32_t i = 0; i < Place::kRows; ++i) {
        if (i >= of.all) break;
        const std::uint32_t nth = at.first + i;
        if (nth < of.all) {
          if (kReceives && nth == of.own_comes) add_own();
          sums.add_row(v[i], __shfl_sync(~0u, of.weight, static_cast<int>(nth)));
          if (kReceives && nth + 1 == of.own) end_own(at.strip);
        }
        if (more && next.first + i < of.all) load<kReceives>(of, next.first + i, next.strip, v[i]);
      }
      if (at.first + Place::kRows < of.all) continue;
      if (kReceives && of.own_comes == of.all) add_own();
      linger(k_, std::uint64_t{step_} << 32 | at.strip);
      store(sums, lane_at(at.strip));
    }
  }

  const CombineArguments& a_;
  const Common& k_;
  const std::uint32_t step_;
  CombineShared& s_;
  uint4* const own_;  // of a strip that is received: this lane's part of the sum of rows of experts
};

}  // namespace pplx::cuda
