// combine_send: units, all claimed by warps, are the weights of combine(weights=) per peer, a header per peer, and the strips of
// every row received: the weighted sum over the row's local experts, stored into the source's memory.
#pragma once

#include "blank.cuh"
#include "number.cuh"
#include "remote.cuh"
#include "rows.cuh"

namespace pplx::cuda {

// 16 bytes each, that a lane sums at once: a strip of a row, larger where it is sent. Small steps give every strip to a warp of its
// own; in large ones a warp has two after each other, and looks the row's places up once.
inline constexpr int kSentVectors = 4, kReceivedVectors = 2;
constexpr std::uint32_t strip_bytes(int vectors) { return vectors * 512; }

__device__ inline void send_weights(const CombineArguments& a, std::uint32_t step, std::uint32_t peer) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  char* block = block_for(k, set_of(k.c, step), Op::Weights, peer);
  if (is_remote(k, peer) && !may_write(k, step, Op::Weights, peer)) return;
  write_header(k, block, step, a.plan.rows[peer], kUsesWeights, lane);
  for (std::uint32_t own = lane; own < a.own; own += 32) {
    const std::uint64_t at = std::uint64_t{own} * k.c.top_k;
    const float* weights = a.weights + std::uint64_t{k.slice.token(own)} * k.c.top_k;
    std::uint32_t row = kNone;
    for (std::uint32_t i = 0; i < k.c.top_k; ++i) {
      const std::uint32_t entry = a.plan.token_rows[at + i];
      if (entry != kNone && entry >> 20 == peer) row = entry & 0xfffffu;
    }
    if (row == kNone) continue;
    auto* to = reinterpret_cast<float*>(block + k.weights.row_at(row));
    for (std::uint32_t i = 0; i < k.c.top_k; ++i) {
      const std::int32_t id = a.plan.ids[at + i];
      if (id >= 0 && k.per_rank.divide(id) == peer) *to++ = weights[i];
    }
  }
  __syncwarp();
  if (lane != 0) return;
  if (is_remote(k, peer))
    tell_proxy(k, step, Op::Weights, peer, a.plan.rows[peer]);
  else
    raise_at_peer(k, step, Signal::Weights, peer);
}

// Whether the weights that have come from this source are those of its rows; fails otherwise.
__device__ inline bool are_weights_of_rows(const CombineArguments& a, std::uint32_t step, std::uint32_t source) {
  const Common& k = a.common;
  bool good = true;
  const BlockHeader h = read_header(k, own_slot(k, set_of(k.c, step), Op::Weights, source), Phase::Weights, step, source, good);
  const std::uint32_t rows = a.received.rows_begin[source + 1] - a.received.rows_begin[source];
  if (!good || h.rows == rows) return good;
  fail(k, {AbortReason::Protocol, Phase::Weights, k.c.rank, source, step}, rows, h.rows);
  return false;
}

// A warp's part: a lane looks after a remote peer's word, and its header.
__device__ inline void pass_on_weights(const CombineArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  for (std::uint32_t peer = threadIdx.x % 32; peer < k.c.world; peer += 32) {
    if (!is_remote(k, peer) || (k.dead >> peer & 1) != 0) continue;
    if (wait_for_proxy(k, step, Signal::Weights, Phase::Weights, peer) && are_weights_of_rows(a, step, peer))
      pass_on(k, step, Signal::Weights, peer);
  }
  __syncwarp();
}

// Rows go back in the order in which all sources have them, the first of each, the second of each, sources from rank + 1 on: every
// rank is sent to by all at the same rate, and its tokens are complete one after the other. (By source, all ranks began with rank
// 0: 137 us for a combine of 512 tokens.) What some sources have more of than others follows, by source.
struct SendOrder {
  std::uint32_t rows_begin[kMaxPeers + 1];  // by source; [world]: all of them
  std::uint32_t common;  // rows that every source has
  bool may_send;  // the blocks of remote peers may be written

  __device__ void find(const Common& k, std::uint32_t n, std::uint32_t& source, std::uint32_t& row) const {
    if (n < common * k.living) {
      row = n / k.living;
      source = k.order[n % k.living];
      return;
    }
    n -= common * k.living;
    for (std::uint32_t i = 0;; ++i) {
      source = k.order[i];
      const std::uint32_t more = rows_begin[source + 1] - rows_begin[source] - common;
      if (n < more) break;
      n -= more;
    }
    row = common + n;
  }
};

// parts: of each row.
__device__ inline void send_combine_header(const CombineArguments& a, std::uint32_t step, std::uint32_t peer, const SendOrder& order,
                                           std::uint32_t parts) {
  const Common& k = a.common;
  if (is_remote(k, peer) && !order.may_send) return;
  const std::uint32_t rows = a.release ? 0 : a.received.rows_begin[peer + 1] - a.received.rows_begin[peer];
  const std::uint32_t flags = (a.release ? kReleased : 0u) | (a.uses_weights ? kUsesWeights : 0u) | (a.has_tail ? kHasTail : 0u) |
                              (*a.received.overflowed != 0 ? kOverflowed : 0u);
  write_header(k, block_for(k, set_of(k.c, step), Op::Combine, peer), step, rows, flags, threadIdx.x % 32);
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  if (is_remote(k, peer))
    count_stored(k, step, Op::Combine, peer, kComplete - rows * parts, [&] { return rows; });
  else
    raise_at_peer(k, step, Signal::Combine, peer);
}

// The weights of this row's choices that its source gave to combine. False: they will not come.
__device__ inline bool sent_weight(const CombineArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t row,
                                   float& weight) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  bool good = true;
  if (lane == 0)
    good = wait<Match::Reached>(k, arrival(k, step, Signal::Weights, source), Phase::Weights, step, source) &&
           (is_remote(k, source) || are_weights_of_rows(a, step, source));
  if (!all_of_warp(good)) return false;
  if (lane < k.c.top_k)
    weight =
        __ldcg(reinterpret_cast<const float*>(own_slot(k, set_of(k.c, step), Op::Weights, source) + k.weights.row_at(row)) + lane);
  return true;
}

// For a warp: waits for a remote peer's combine.
__device__ inline bool block_is_there(const Common& k, std::uint32_t step, std::uint32_t peer) {
  const bool good = threadIdx.x % 32 != 0 || wait<Match::Reached>(k, arrival(k, step, Signal::Combine, peer), Phase::CombineRecv, step, peer);
  return all_of_warp(good);
}

// Sums of rows for some 16-byte vectors of each lane, kept in registers. Rows come four at a time, all their loads under way at
// once; they are added in order.
template <typename T, int kVectors>
struct Sums {
  static constexpr int kBatch = 4;
  float sum[kVectors][T::kPerVector] = {};

  // pointer(i): of row i, null if it has none.
  template <typename Pointer, typename Weight>
  __device__ void add(std::uint32_t n, std::uint32_t begin, std::uint32_t end, const Pointer& pointer, const Weight& weight) {
    for (std::uint32_t first = 0; first < n; first += kBatch) {
      uint4 v[kBatch][kVectors];
      bool here[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const char* row = first + i < n ? pointer(first + i) : nullptr;
        here[i] = row != nullptr;
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
          if (here[i] && begin + j * 512 < end) v[i][j] = load_input(row + begin + j * 512);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (here[i]) add_row(v[i], weight(first + i));
    }
  }

  // Like add(), for rows that are on their way. rank(i): whose row i is. A node's peer leaves no other trace, and its places are blank
  // afterwards; a remote peer's rows are there when its block is. False: they will not come.
  template <typename Pointer, typename Rank>
  __device__ bool add_arriving(const Common& k, std::uint32_t step, std::uint32_t n, std::uint32_t begin, std::uint32_t end,
                               const Pointer& pointer, const Rank& rank) {
    for (std::uint32_t first = 0; first < n; first += kBatch) {
      uint4 v[kBatch][kVectors];
      char* row[kBatch];
      bool remote[kBatch];
      std::uint32_t missing = 0;  // a bit each
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        row[i] = first + i < n ? pointer(first + i) : nullptr;
        remote[i] = k.remote != 0 && row[i] != nullptr && is_remote(k, rank(first + i));
        if (remote[i] && !block_is_there(k, step, rank(first + i))) return false;
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          if (row[i] == nullptr || begin + j * 512 >= end) continue;
          if (remote[i])
            v[i][j] = load_arrived(row[i] + begin + j * 512);
          else
            missing |= 1u << (i * kVectors + j);
        }
      }
      const auto look = [&] {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
#pragma unroll
          for (int j = 0; j < kVectors; ++j)
            if ((missing >> (i * kVectors + j) & 1) != 0) v[i][j] = load_piece(row[i] + begin + j * 512);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
#pragma unroll
          for (int j = 0; j < kVectors; ++j)
            if ((missing >> (i * kVectors + j) & 1) != 0 && !is_blank(v[i][j])) missing &= ~(1u << (i * kVectors + j));
        return missing == 0;
      };
      const auto waits_for = [&] {
        const std::uint32_t all = __reduce_or_sync(~0u, missing);
        return rank(all == 0 ? first : first + (__ffs(all) - 1) / kVectors);
      };
      if (!await_pieces(k, Phase::CombineRecv, step, waits_for, look)) return false;
      note(k, Stage::Came);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (row[i] == nullptr) continue;
        add_row(v[i], 1.0f);
        if (remote[i]) continue;
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
          if (begin + j * 512 < end) make_blank(row[i] + begin + j * 512);
      }
    }
    return true;
  }

  // A weight of 1 changes nothing: the sum comes of an addition in any case.
  __device__ void add_row(const uint4 (&v)[kVectors], float weight) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      float f[T::kPerVector];
      T::unpack(v[j], f);
#pragma unroll
      for (int e = 0; e < T::kPerVector; ++e) sum[j][e] = __fadd_rn(sum[j][e], __fmul_rn(weight, f[e]));
    }
  }

  __device__ void start(float value) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int e = 0; e < T::kPerVector; ++e) sum[j][e] = value;
  }

  __device__ void load(const char* from, std::uint32_t begin, std::uint32_t end) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (begin + j * 512 < end) T::unpack(*reinterpret_cast<const uint4*>(from + begin + j * 512), sum[j]);
  }

  __device__ void store(char* to, std::uint32_t begin, std::uint32_t end) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (begin + j * 512 < end) store16(to + begin + j * 512, T::pack(sum[j]));
  }
  __device__ void send(char* to, std::uint32_t begin, std::uint32_t end) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (begin + j * 512 < end) store_piece(to + begin + j * 512, T::pack(sum[j]));
  }
  // To a replica. A token without rows adds nothing to what it is accumulated on, and a float of the caller's may look blank: a NaN
  // all the same.
  __device__ void give(char* to, std::uint32_t begin, std::uint32_t end) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      uint4 v = T::pack(sum[j]);
      if (is_blank(v)) v.w = 0x7fffffffu;
      if (begin + j * 512 < end) store_piece(to + begin + j * 512, v);
    }
  }
};

// The floats of a row's choices, each at its k, so that the token's rank need not know what else lives here.
__device__ inline void write_tail(const CombineArguments& a, std::uint32_t choices, std::uint32_t place, char* to) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const bool compact = k.c.layout == LayoutKind::Compact;
  const std::uint32_t from = __shfl_sync(~0u, place, compact ? 0 : __popc(choices & ((1u << lane) - 1)));
  if ((choices >> lane & 1) == 0) return;
  const bool here = from != kNone && from < a.tail_rows;
  if (from != kNone && !here) k.report->notices.short_output = 1;
  reinterpret_cast<std::uint32_t*>(to)[lane] = here ? a.tail[compact ? std::uint64_t{from} * k.c.top_k + lane : from] : 0;
}

__device__ inline std::uint32_t row_bytes(const Common& k) { return k.c.hidden * dtype_bytes(k.c.dtype); }
__device__ inline std::uint32_t strips_of_row(const Common& k, int vectors) { return ceil_div(row_bytes(k), strip_bytes(vectors)); }

// Strips [strip, strip + strips) of the nth row, as far as it has them.
template <typename T, bool kTail>
__device__ inline void send_strips(const CombineArguments& a, std::uint32_t step, const SendOrder& order, std::uint32_t nth,
                                   std::uint32_t strip, std::uint32_t strips) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, top_k = k.c.top_k;
  const bool compact = k.c.layout == LayoutKind::Compact;
  std::uint32_t source = 0, row = 0;
  order.find(k, nth, source, row);
  const std::uint32_t at = order.rows_begin[source] + row;
  const std::uint32_t choices = compact && !kTail ? 1 : a.received.choices[at], n = compact ? 1 : __popc(choices);
  std::uint32_t place = kNone;
  float weight = 1.0f;
  if (lane < (compact ? 1 : top_k)) {  // not n: that load would have to come first
    place = a.received.place[compact ? at : std::uint64_t{at} * top_k + lane];
    if (!compact && a.weighted) weight = a.received.weight[std::uint64_t{at} * top_k + lane];
  }
  if (lane >= n) place = kNone;
  if (place != kNone && place >= a.expert_rows) {
    k.report->notices.short_output = 1;
    place = kNone;
  }
  if (a.uses_weights && !sent_weight(a, step, source, row, weight)) return;
  note(k, Stage::Found);

  const std::uint32_t bytes = row_bytes(k), last = min(strip + strips, strips_of_row(k, kSentVectors));
  const bool remote = is_remote(k, source);
  if (remote && !order.may_send) return;
  char* to = block_for(k, set_of(k.c, step), Op::Combine, source) + k.combine.row_at(row);
  const auto pointer = [&](std::uint32_t i) -> const char* {
    const std::uint32_t from = __shfl_sync(~0u, place, i);
    return from == kNone ? nullptr : a.expert_out + from * a.expert_stride;
  };
  const auto weight_of = [&](std::uint32_t i) { return __shfl_sync(~0u, weight, i); };
#pragma unroll 1
  for (; strip < last; ++strip) {
    const std::uint32_t begin = strip * strip_bytes(kSentVectors) + lane * 16, end = min(bytes, (strip + 1) * strip_bytes(kSentVectors));
    Sums<T, kSentVectors> sums;
    if (compact && __any_sync(~0u, place != kNone)) sums.start(-0.0f);  // a row that is only copied keeps its sign of zero
    sums.add(n, begin, end, pointer, weight_of);
    if (remote)
      sums.store(to, begin, end);
    else
      sums.send(to, begin, end);
    linger(k, std::uint64_t{step} << 32 | begin);
  }
  note(k, Stage::Sent);
  const bool with_tail = kTail && last == strips_of_row(k, kSentVectors);
  if (with_tail) write_tail(a, choices, place, to + k.combine.tail_at);
  if (!with_tail && !remote) return;
  __syncwarp();
  if (lane != 0) return;
  if (remote)
    count_stored(k, step, Op::Combine, source, 1, [&] { return order.rows_begin[source + 1] - order.rows_begin[source]; });
  else
    publish(k, to + k.combine.arrival_at, arrival_word(k.generation, step));  // a tail is any bits at all: no blank shows that it came
}

template <typename T, bool kTail>
__device__ void send_combine(const CombineArguments& a, std::uint32_t step) {
  PPLX_SHARED(std::uint32_t, first);
  PPLX_SHARED(SendOrder, order);
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, world = k.c.world;
  // The first unit of each warp comes by one addition for all of them; later ones singly, on their way while the warp works.
  if (threadIdx.x == 0) first = atomicAdd(&k.control->combine, kWarps);
  if (threadIdx.x <= world) order.rows_begin[threadIdx.x] = a.received.rows_begin[threadIdx.x];
  if (threadIdx.x == 0) order.common = k.most_rows;
  if (k.remote != 0) {
    const std::uint32_t peer = threadIdx.x;
    const bool wanted = peer < world && is_remote(k, peer) && (k.dead >> peer & 1) == 0;
    const bool good = __syncthreads_and(!wanted || may_write(k, step, Op::Combine, peer)) != 0;
    if (threadIdx.x == 0) order.may_send = good;
  }
  __syncthreads();
  if (threadIdx.x < world && (k.dead >> threadIdx.x & 1) == 0)
    atomicMin(&order.common, order.rows_begin[threadIdx.x + 1] - order.rows_begin[threadIdx.x]);
  __syncthreads();
  const std::uint32_t rows = a.release ? 0 : order.rows_begin[world];
  const std::uint32_t strips = strips_of_row(k, kSentVectors), together = rows * strips <= kWarps * gridDim.x ? 1 : 2;
  const std::uint32_t runs = ceil_div(strips, together);
  const std::uint32_t weights = a.uses_weights ? k.living : 0;
  const std::uint32_t passing = weights + (a.uses_weights && k.remote != 0 ? 1 : 0);  // after all that peers wait for
  const std::uint32_t headers = passing + k.living;
  const std::uint32_t units = headers + rows * runs;
  std::uint32_t unit = first + threadIdx.x / 32;
  if (lane == 0 && unit == units + kWarps * gridDim.x - 1) k.control->combine = 0;  // the very last claim
  while (unit < units) {
    std::uint32_t next = 0;
    if (lane == 0) {
      next = atomicAdd(&k.control->combine, 1);
      if (next == units + kWarps * gridDim.x - 1) k.control->combine = 0;
    }
    if (unit < weights)
      send_weights(a, step, k.order[unit]);
    else if (unit < passing)
      pass_on_weights(a, step);
    else if (unit < headers)
      send_combine_header(a, step, k.order[unit - passing], order, runs);
    else
      send_strips<T, kTail>(a, step, order, (unit - headers) / runs, (unit - headers) % runs * together, together);
    unit = __shfl_sync(~0u, next, 0);
  }
}

}  // namespace pplx::cuda
