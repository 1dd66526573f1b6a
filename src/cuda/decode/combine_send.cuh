// combine_send of few tokens: units, each of a warp, are a header per peer, and runs of strips of every row received: the weighted
// sum over the row's local experts, stored into the source's memory. extras/weights.cuh has what comes before them.
#pragma once

#include "../common/counters.cuh"
#include "../common/relays.cuh"
#include "../common/step.cuh"
#include "../common/sum.cuh"

namespace pplx::cuda {

// Does what only the general kernel does, for peers of other nodes, replicas, tails and weights: remote/combine_extras.cuh.
template <bool kMappedOnly>
struct CombineExtras;

struct CombineShared {
  Once claimed;  // mine
  bool mine;  // this block's own share was still to be had
  bool may_send;  // the blocks of remote peers may be written
  std::uint32_t rows_begin[kMaxPeers + 1];  // each source's first; [world]: all of them
  std::uint64_t many;  // see ReceivedView
  std::uint32_t sent;  // units of this thread block that warps have begun, beyond the first of each sender
  std::uint32_t received;  // units of this thread block that its warps have begun
  std::uint32_t entries[kCombineThreads];  // each lane's row of its warp's first unit to receive
};

template <>
struct CombineExtras<true> {
  using Shared = CombineShared;
};

// Returns true if a source has many tokens: its rows have arrival words.
__device__ inline bool has_many(const CombineShared& s, std::uint32_t source) { return (s.many >> source & 1) != 0; }

// Returns true if rows for a source have arrival words: it has many tokens, or with relays its relay of this node, which reads them.
template <bool kMappedOnly>
__device__ inline bool has_words(const CombineArguments& a, const CombineShared& s, std::uint32_t source) {
  if constexpr (!kMappedOnly)
    if (is_relayed(a.common, source)) source = rank_of_holder(a.relays, source);
  return has_many(s, source);
}

// Returns true if this launch may work on its step. All threads of the block call it; what later decisions need is in shared memory
// then. received: units that its warps begin with. before_vote(): called when what the vote waits for is there.
template <typename BeforeVote>
__device__ inline bool begin_combine(const CombineArguments& a, std::uint32_t& step, std::uint32_t received, CombineShared& s,
                                     const BeforeVote& before_vote) {
  const Common& k = a.common;
  const std::uint64_t closed = load_closed(k);
  const bool failed = threadIdx.x == 0 && load_relaxed(&k.control->failure) != 0;
  step = *a.received.step;
  if (threadIdx.x <= k.c.world) s.rows_begin[threadIdx.x] = a.received.rows_begin[threadIdx.x];
  if (threadIdx.x == 0) {
    s.many = *a.received.many;
    s.claimed.init();
    s.sent = 0;
    s.received = received;
  }
  // Some rows may have no place. All threads or none: what fails meanwhile must not part those that meet at barriers.
  const bool refused = is_not_open(k, step, closed);
  before_vote();
  if (!__syncthreads_or(failed || refused)) return true;
  if (refused) refuse(k, step, closed, a.send ? Phase::CombineSend : Phase::CombineRecv);
  return false;
}

// The send units of a launch, in the order in which they are dealt out.
struct CombineUnits {
  bool small = false;  // all at once: their order does not matter, and a warp knows its row before it knows how many there are
  std::uint32_t together = 1, runs = 0;  // a row goes in `runs` runs of `together` strips
  std::uint32_t headers = 0, all = 0;  // where each kind ends
  std::uint32_t common = 0;  // rows that every source has; in large steps

  __device__ CombineUnits(const CombineArguments& a, const CombineShared& s) {
    const Common& k = a.common;
    const std::uint32_t rows = a.release ? 0 : s.rows_begin[k.c.world];
    small = rows * a.sent.strips <= kCombineWarps * gridDim.x;
    if (rows != 0 && s.many != 0) {  // a warp has all of a row, so it knows when the row is complete
      small = false;
      together = a.sent.strips;
      runs = 1;
    } else {
      together = small ? 1 : a.sent.together;
      runs = small ? a.sent.strips : a.sent.runs;
    }
    headers = k.living;
    all = headers + rows * runs;
    if (small) return;
    std::uint32_t least = k.most_rows;
    for (std::uint32_t r = threadIdx.x % 32; r < k.c.world; r += 32)
      if ((k.dead >> r & 1) == 0) least = min(least, s.rows_begin[r + 1] - s.rows_begin[r]);
    common = __reduce_min_sync(~0u, least);
  }
};

// Returns a share's nth unit. Each round begins one further on: else a share could have rows of one source alone.
__device__ inline std::uint32_t unit_of_share(std::uint32_t share, std::uint32_t nth) {
  std::uint32_t in_round = share + nth;
  while (in_round >= gridDim.x) in_round -= gridDim.x;
  return nth * gridDim.x + in_round;
}

// Rows go back as in plan/runs.cuh, in runs of one: all send to a rank at the same rate, and its tokens end in order.
struct RowOfUnit {
  std::uint32_t source = 0, row = 0;

  __device__ RowOfUnit(const Common& k, const CombineShared& s, const CombineUnits& units, std::uint32_t n) {
    if (units.small) {
      while (s.rows_begin[source + 1] <= n) ++source;
      row = n - s.rows_begin[source];
      return;
    }
    const std::uint32_t common = units.common;
    if (n < common * k.living) {
      row = n / k.living;
      source = k.order[n % k.living];
      return;
    }
    n -= common * k.living;
    for (std::uint32_t i = 0;; ++i) {
      source = k.order[i];
      const std::uint32_t more = s.rows_begin[source + 1] - s.rows_begin[source] - common;
      if (n < more) break;
      n -= more;
    }
    row = common + n;
  }
};

// Returns the flags that all ranks of a step must have in common.
__device__ inline std::uint32_t flags_of(const CombineArguments& a) {
  return (a.release ? kReleased : 0u) | (a.uses_weights ? kUsesWeights : 0u) | (a.has_tail ? kHasTail : 0u);
}

// Returns the block with this rank's sums for a peer: at the peer, in what the proxy sends, or at the peer's relay here.
template <bool kMappedOnly>
__device__ inline char* block_of_sums(const CombineArguments& a, std::uint32_t step, std::uint32_t peer) {
  const Common& k = a.common;
  const std::uint32_t set = set_of(k.c, step);
  if constexpr (!kMappedOnly)
    if (is_relayed(k, peer)) return block_of_mate(k, a.relays, set, peer, a.relays.number[k.c.rank]);
  return block_for<kMappedOnly>(k, set, Op::Combine, peer);
}
// True if the proxy carries it.
__device__ inline bool is_carried(const Common& k, std::uint32_t peer) { return is_remote(k, peer) && !has_relays(k); }

// A peer of the node gets it as one tagged vec16: it proves that this rank has read the peer's dispatch.
template <bool kMappedOnly>
__device__ inline void send_combine_header(const CombineArguments& a, std::uint32_t step, std::uint32_t peer,
                                           const CombineShared& s, std::uint32_t parts) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint32_t rows = a.release ? 0 : s.rows_begin[peer + 1] - s.rows_begin[peer];
  const std::uint32_t flags = flags_of(a) | (*a.received.overflowed != 0 ? kOverflowed : 0u);
  char* block = block_of_sums<kMappedOnly>(a, step, peer);
  if (kMappedOnly || !is_carried(k, peer)) {
    fuzz_delay(k, rows);
    if (lane == 0) store_tagged(k, block, step, rows, flags, k.c.rank);
    return;
  }
  if constexpr (!kMappedOnly)
    if (s.may_send) CombineExtras<kMappedOnly>::send_header(a, step, peer, rows, flags, parts);
}

// A row's sources, a choice in each lane: loaded before it is known whether there is such a row.
struct Places {
  std::uint32_t choices = 1, out_row = kNone;
  float weight = 1.0f;

  template <bool kMappedOnly>
  __device__ void load(const CombineArguments& a, std::uint32_t at) {
    const Common& k = a.common;
    const std::uint32_t lane = threadIdx.x % 32;
    const bool compact = k.c.layout == LayoutKind::Compact;
    choices = compact && (kMappedOnly || !a.has_tail) ? 1 : a.received.choices[at];
    out_row = kNone;
    weight = 1.0f;
    if (lane >= (compact ? 1 : k.c.top_k)) return;  // not those that there are: that load would have to come first
    out_row = a.received.out_row[compact ? at : std::uint64_t{at} * k.c.top_k + lane];
    if (!compact && a.weighted) weight = a.received.weight[std::uint64_t{at} * k.c.top_k + lane];
  }
  // Returns the number of choices. Forgets output rows that the caller's tensor does not have.
  __device__ std::uint32_t check(const CombineArguments& a) {
    const std::uint32_t n = a.common.c.layout == LayoutKind::Compact ? 1 : __popc(choices);
    if (threadIdx.x % 32 >= n) out_row = kNone;
    if (out_row != kNone && out_row >= a.expert_rows) {
      a.common.report->notices.short_output = 1;
      out_row = kNone;
    }
    return n;
  }
};

// Returns true if this warp may store. It asks when its first sums are ready: another block may have taken this block's own share.
__device__ inline bool may_store(CombineShared& s, bool own) {
  if (!own) return true;
  s.claimed.wait();
  return s.mine;
}

// Returns where the ith choice's output is, or null.
__device__ inline const char* output_of(const CombineArguments& a, const Places& places, std::uint32_t i) {
  const std::uint32_t from = __shfl_sync(~0u, places.out_row, i);
  return from < a.expert_rows ? a.expert_out + from * a.expert_stride : nullptr;
}

// Sums a row with n choices here, for its source.
template <typename T, int kVectors>
__device__ inline void sum_row(const CombineArguments& a, const Places& places, std::uint32_t n, std::uint32_t begin, std::uint32_t end,
                               Sums<T, kVectors>& sums, const typename Sums<T, kVectors>::Batch& rows = {}, bool loaded = false) {
  const auto output = [&](std::uint32_t i) { return output_of(a, places, i); };
  const auto weight_of = [&](std::uint32_t i) { return __shfl_sync(~0u, places.weight, i); };
  sums.add(n, begin, end, output, weight_of, rows, loaded);
}

// A lane's vectors [begin, end) of a row of Compact, at most kVectors; zeroes where the row has no place.
template <int kVectors>
struct Copied {
  uint4 v[kVectors];

  __device__ void load(const CombineArguments& a, const Places& places, std::uint32_t begin, std::uint32_t end) {
    const char* const from = output_of(a, places, 0);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      v[j] = make_uint4(0, 0, 0, 0);
      if (from != nullptr && begin + j * 512 < end) v[j] = load_input(from + begin + j * 512);
    }
  }
  __device__ void store(char* to, std::uint32_t begin, std::uint32_t end) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (begin + j * 512 < end) store_numbers(to + begin + j * 512, v[j]);
  }
};

// False: may_send() says no, which it is asked once all are on their way.
template <int kVectors, typename MaySend>
__device__ inline bool copy_strip(const CombineArguments& a, const Places& places, char* to, std::uint32_t begin, std::uint32_t end,
                                  const MaySend& may_send) {
  Copied<kVectors> strip;
  strip.load(a, places, begin, end);
  if (!may_send()) return false;
  strip.store(to, begin, end);
  return true;
}

// Strips [strip, strip + together) of the nth row, as far as it has them. own: of this block's own share.
template <typename T, bool kMappedOnly, int kVectors>
__device__ inline void send_strips(const CombineArguments& a, std::uint32_t step, std::uint32_t run, const CombineUnits& units,
                                   Places& places, bool loaded, bool own, CombineShared& s) {
  const Common& k = a.common;
  const std::uint32_t nth = units.runs == 1 ? run : units.small ? a.sent.by_strips.divide(run) : a.sent.by_runs.divide(run);
  const RowOfUnit of(k, s, units, nth);
  std::uint32_t strip = (run - nth * units.runs) * units.together;
  if (!loaded) places.load<kMappedOnly>(a, s.rows_begin[of.source] + of.row);
  const std::uint32_t n = places.check(a);
  if constexpr (!kMappedOnly)
    if (a.uses_weights && !CombineExtras<kMappedOnly>::sent_weight(a, step, of.source, of.row, places.weight)) return;
  mark_stage(k, step, Stage::Found);

  const std::uint32_t last = min(strip + units.together, a.sent.strips);
  const bool remote = !kMappedOnly && is_carried(k, of.source);
  if (remote && !s.may_send) return;
  char* to = block_of_sums<kMappedOnly>(a, step, of.source) + k.combine.row_at(of.row);
#pragma unroll 1
  for (; strip < last; ++strip) {
    const std::uint32_t begin = strip * a.sent.bytes() + threadIdx.x % 32 * 16, end = min(k.row_bytes, (strip + 1) * a.sent.bytes());
    fuzz_delay(k, std::uint64_t{step} << 32 | begin);
    const auto may_send = [&] { return may_store(s, own); };
    if (kVectors == kSentVectors && k.c.layout == LayoutKind::Compact) {
      const bool wide = kMappedOnly && a.sent.vectors > kSentVectors;
      if (!(wide ? copy_strip<kCopiedVectors>(a, places, to, begin, end, may_send)
                 : copy_strip<kSentVectors>(a, places, to, begin, end, may_send)))
        return;
      continue;
    }
    Sums<T, kVectors> sums;
    sum_row(a, places, n, begin, end, sums);
    if (!may_send()) return;
    sums.send(to, begin, end);
  }
  mark_stage(k, step, Stage::Sent);
  const bool with_tail = !kMappedOnly && a.has_tail && last == a.sent.strips;
  if constexpr (!kMappedOnly)
    if (with_tail) CombineExtras<kMappedOnly>::write_tail(a, places.choices, places.out_row, to + k.combine.tail_at);
  const bool by_word = has_words<kMappedOnly>(a, s, of.source);
  if (!with_tail && !remote && !by_word) return;
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  if constexpr (!kMappedOnly)
    if (remote) {
      const std::uint32_t rows = s.rows_begin[of.source + 1] - s.rows_begin[of.source];
      CombineExtras<kMappedOnly>::count_strips(k, step, of.source, of.row, units.runs, rows);
      return;
    }
  publish(k, to + k.combine.arrival_at, arrival_word(k.generation, step));  // a tail is any bits: no blank shows that it came
}

// A warp's first strip, the only one in small steps. Its places are loaded before the kernel knows how many rows there are, and a likely
// row, too; then straight code sends it, not the loops of send_combine. Not sums of wide strips: they need the registers.
template <typename T, bool kMappedOnly, int kVectors>
struct FirstStrip {
  static constexpr bool kFew = kVectors == kSentVectorsOfFew;
  Places places;
  typename Sums<T, kVectors>::Batch rows;
  Copied<kCopiedVectors> copied;
  std::uint32_t unit, row, begin, end;
  bool loaded = false;

  __device__ void load_places(const CombineArguments& a) {
    const Common& k = a.common;
    unit = unit_of_share(blockIdx.x, threadIdx.x / 32);
    row = a.sent.by_strips.divide(unit - k.living);
    if (!a.release && unit >= k.living && row < k.c.world * k.most_rows) places.load<kMappedOnly>(a, row);
  }
  __device__ void load(const CombineArguments& a) {
    const Common& k = a.common;
    const bool compact = k.c.layout == LayoutKind::Compact;
    const std::uint32_t first = (unit - k.living - row * a.sent.strips) * a.sent.bytes();
    begin = first + threadIdx.x % 32 * 16;
    end = min(k.row_bytes, first + a.sent.bytes());
    loaded = row < a.rows_ahead && (kFew || compact);
    if (!loaded) return;
    if constexpr (kFew)
      rows.load(0, compact ? 1 : __popc(places.choices), begin, end, [&](std::uint32_t i) { return output_of(a, places, i); });
    else
      copied.load(a, places, begin, end);
  }
  __device__ void send(const CombineArguments& a, std::uint32_t step, const CombineUnits& units, CombineShared& s) {
    const Common& k = a.common;
    if (unit < units.headers) {
      if (may_store(s, true)) send_combine_header<kMappedOnly>(a, step, k.order[unit], s, units.runs);
      return;
    }
    if (unit >= units.all) return;
    const RowOfUnit of(k, s, units, row);
    const std::uint32_t n = places.check(a);
    mark_stage(k, step, Stage::Found);
    char* const to = block_of_sums<kMappedOnly>(a, step, of.source) + k.combine.row_at(of.row);
    fuzz_delay(k, std::uint64_t{step} << 32 | begin);
    if constexpr (kFew) {
      Sums<T, kVectors> sums;
      sum_row(a, places, n, begin, end, sums, rows, loaded);
      if (may_store(s, true)) sums.send(to, begin, end);
    } else {
      if (!loaded) copied.load(a, places, begin, end);
      if (may_store(s, true)) copied.store(to, begin, end);
    }
    mark_stage(k, step, Stage::Sent);
  }
};

// Sends this block's share: all its sending warps. sent: each has sent its first unit. The first warp then looks for untaken shares, and
// sends those alone.
template <typename T, bool kMappedOnly, int kVectors>
__device__ inline void send_combine(const CombineArguments& a, std::uint32_t step, const CombineUnits& units, std::uint32_t senders,
                                    Places places, bool sent, CombineShared& s) {
  const Common& k = a.common;
  if constexpr (!kMappedOnly)
    if (a.uses_weights) CombineExtras<kMappedOnly>::send_all_weights(a, step);
  std::uint32_t share = blockIdx.x, nth = threadIdx.x / 32;
  bool own = true, loaded = units.small && !sent;
  const auto next = [&] { return of_first_lane([&] { return own ? senders + atomicAdd(&s.sent, 1u) : nth + 1; }); };
  if (sent) nth = kCombineWarps * gridDim.x < units.all ? next() : kCombineWarps;
#pragma unroll 1
  for (;; loaded = false, places = {}) {  // no register holds what was loaded early while sums need them all
    if (nth * gridDim.x >= units.all) {
      if (threadIdx.x >= 32) return;
      share = take_another_share(k, Op::Combine, step, min(gridDim.x, units.all));
      if (share == kNone) return;
      own = false;
      nth = 0;
    }
    const std::uint32_t unit = unit_of_share(share, nth);
    if (unit >= units.headers && unit < units.all)
      send_strips<T, kMappedOnly, kVectors>(a, step, unit - units.headers, units, places, loaded, own, s);
    else if (unit < units.headers && may_store(s, own))
      send_combine_header<kMappedOnly>(a, step, k.order[unit], s, units.runs);
    nth = next();
  }
}

}  // namespace pplx::cuda
