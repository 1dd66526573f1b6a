// combine_send: units, all claimed by warps, are the weights of combine(weights=) per peer, a header per peer, and every part of
// every row received: the weighted sum over the row's local experts, stored into the source's memory with an arrival word of its
// own.
#pragma once

#include "number.cuh"
#include "rows.cuh"
#include "words.cuh"

namespace pplx::cuda {

inline constexpr int kStripVectors = 4;  // 16 bytes each, that a lane sums at once

__device__ inline void send_weights(const CombineArguments& a, std::uint32_t step, std::uint32_t peer) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  char* block = slot_at_peer(k, set_of(k.c, step), Op::Weights, peer);
  write_header(k, block, step, a.plan.rows[peer], kUsesWeights, lane);
  for (std::uint32_t t = lane; t < a.tokens; t += 32) {
    const std::uint64_t at = std::uint64_t{t} * k.c.top_k;
    std::uint32_t row = kNone;
    for (std::uint32_t i = 0; i < k.c.top_k; ++i) {
      const std::uint32_t entry = a.plan.token_rows[at + i];
      if (entry != kNone && entry >> 20 == peer) row = entry & 0xfffffu;
    }
    if (row == kNone) continue;
    auto* to = reinterpret_cast<float*>(block + k.weights.row_at(row));
    for (std::uint32_t i = 0; i < k.c.top_k; ++i) {
      const std::int32_t id = a.plan.ids[at + i];
      if (id >= 0 && k.per_rank.divide(id) == peer) *to++ = a.weights[at + i];
    }
  }
  __syncwarp();
  if (lane == 0) raise_at_peer(k, step, Signal::Weights, peer);
}

__device__ inline void send_combine_header(const CombineArguments& a, std::uint32_t step, std::uint32_t peer) {
  const Common& k = a.common;
  const std::uint32_t rows = a.release ? 0 : a.received.rows_begin[peer + 1] - a.received.rows_begin[peer];
  const std::uint32_t flags = (a.release ? kReleased : 0u) | (a.uses_weights ? kUsesWeights : 0u) | (a.has_tail ? kHasTail : 0u) |
                              (*a.received.overflowed != 0 ? kOverflowed : 0u);
  write_header(k, slot_at_peer(k, set_of(k.c, step), Op::Combine, peer), step, rows, flags, threadIdx.x % 32);
  __syncwarp();
  if (threadIdx.x % 32 == 0) raise_at_peer(k, step, Signal::Combine, peer);
}

// The weights of this row's choices that its source gave to combine. False: they will not come.
__device__ inline bool sent_weight(const CombineArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t row,
                                   float& weight) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  bool good = true;
  if (lane == 0) {
    good = wait<Match::Reached>(k, arrival(k, step, Signal::Weights, source), Phase::Weights, step, source);
    const char* block = own_slot(k, set_of(k.c, step), Op::Weights, source);
    if (good) {
      const BlockHeader h = read_header(k, block, Phase::Weights, step, source, good);
      const std::uint32_t rows = a.received.rows_begin[source + 1] - a.received.rows_begin[source];
      if (good && h.rows != rows) {
        fail(k, {AbortReason::Protocol, Phase::Weights, k.c.rank, source, step}, rows, h.rows);
        good = false;
      }
    }
  }
  if (!__all_sync(~0u, good)) return false;
  if (lane < k.c.top_k)
    weight =
        __ldcg(reinterpret_cast<const float*>(own_slot(k, set_of(k.c, step), Op::Weights, source) + k.weights.row_at(row)) + lane);
  return true;
}

// Sums of rows for some 16-byte vectors of each lane, kept in registers. Rows come four at a time, all their loads under way at
// once; they are added in order.
template <typename T, int kVectors>
struct Sums {
  static constexpr int kBatch = 4;
  float sum[kVectors][T::kPerVector] = {};

  // pointer(i): of row i, null if it has none. weight(i): null pointer means 1, without a multiplication.
  template <bool arrived, typename Pointer, typename Weight>
  __device__ void add(std::uint32_t n, bool weighted, std::uint32_t begin, std::uint32_t end, const Pointer& pointer,
                      const Weight& weight) {
    for (std::uint32_t first = 0; first < n; first += kBatch) {
      uint4 v[kBatch][kVectors];
      bool here[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const char* row = first + i < n ? pointer(first + i) : nullptr;
        here[i] = row != nullptr;
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
          if (here[i] && begin + j * 512 < end)
            v[i][j] = arrived ? load_arrived(row + begin + j * 512) : load_input(row + begin + j * 512);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (!here[i]) continue;
        const float w = weight(first + i);
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          float f[T::kPerVector];
          T::unpack(v[i][j], f);
#pragma unroll
          for (int e = 0; e < T::kPerVector; ++e) sum[j][e] = __fadd_rn(sum[j][e], weighted ? __fmul_rn(w, f[e]) : f[e]);
        }
      }
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
};

// Rows go back in the order in which all sources have them, the first of each, the second of each, sources from rank + 1 on: every
// rank is sent to by all at the same rate, and its tokens are complete one after the other. (By source, all ranks began with rank
// 0: 137 us for a combine of 512 tokens.) What some sources have more of than others follows, by source.
struct SendOrder {
  std::uint32_t rows_begin[kMaxPeers + 1];  // by source; [world]: all of them
  std::uint32_t common;  // rows that every source has

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

// The floats of a row's choices, each at its k, so that the token's rank need not know what else lives here.
__device__ inline void write_tail(const CombineArguments& a, std::uint32_t choices, std::uint32_t place, char* to) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const bool compact = k.c.layout == LayoutKind::Compact;
  const std::uint32_t from = __shfl_sync(~0u, place, compact ? 0 : __popc(choices & ((1u << lane) - 1)));
  if ((choices >> lane & 1) == 0) return;
  const bool here = from != kNone && from < a.tail_rows;
  if (from != kNone && !here) k.report->short_output = 1;
  reinterpret_cast<std::uint32_t*>(to)[lane] = here ? a.tail[compact ? std::uint64_t{from} * k.c.top_k + lane : from] : 0;
}

template <typename T, bool kTail>
__device__ inline void send_part(const CombineArguments& a, std::uint32_t step, const SendOrder& order, std::uint32_t nth,
                                 std::uint32_t part) {
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
    if (!compact) weight = a.received.weight[std::uint64_t{at} * top_k + lane];
  }
  if (lane >= n) place = kNone;
  if (place != kNone && place >= a.expert_rows) {
    k.report->short_output = 1;
    place = kNone;
  }
  if (a.uses_weights && !sent_weight(a, step, source, row, weight)) return;

  const std::uint32_t bytes = k.c.hidden * dtype_bytes(k.c.dtype), size = part_bytes(bytes);
  const std::uint32_t begin = part * size + lane * 16, end = min(bytes, (part + 1) * size);
  char* to = slot_at_peer(k, set_of(k.c, step), Op::Combine, source) + k.combine.row_at(row);
  const auto pointer = [&](std::uint32_t i) -> const char* {
    const std::uint32_t from = __shfl_sync(~0u, place, i);
    return from == kNone ? nullptr : a.expert_out + from * a.expert_stride;
  };
  const auto weight_of = [&](std::uint32_t i) { return __shfl_sync(~0u, weight, i); };
#pragma unroll 1
  for (std::uint32_t strip = begin; strip - lane * 16 < end; strip += kStripVectors * 512) {
    Sums<T, kStripVectors> sums;
    if (compact && __any_sync(~0u, place != kNone)) sums.start(-0.0f);  // a row that is only copied keeps its sign of zero
    sums.template add<false>(n, a.weighted && !compact, strip, min(end, strip - lane * 16 + kStripVectors * 512), pointer,
                             weight_of);
    sums.store(to, strip, min(end, strip - lane * 16 + kStripVectors * 512));
    linger(k, std::uint64_t{step} << 32 | strip);
  }
  if (kTail && part == k.combine.parts - 1) write_tail(a, choices, place, to + k.combine.tail_at);
  __syncwarp();
  if (lane == 0) publish(k, to + k.combine.arrival_at + kWordBytes * part, arrival_word(k.generation, step));
}

template <typename T, bool kTail>
__device__ void send_combine(const CombineArguments& a, std::uint32_t step) {
  __shared__ std::uint32_t first;
  __shared__ SendOrder order;
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, world = k.c.world;
  // The first unit of each warp comes by one addition for all of them; later ones singly, on their way while the warp works.
  if (threadIdx.x == 0) first = atomicAdd(&k.control->combine, kWarps);
  if (threadIdx.x <= world) order.rows_begin[threadIdx.x] = a.received.rows_begin[threadIdx.x];
  if (threadIdx.x == 0) order.common = k.c.max_tokens;
  __syncthreads();
  if (threadIdx.x < world && (k.dead >> threadIdx.x & 1) == 0)
    atomicMin(&order.common, order.rows_begin[threadIdx.x + 1] - order.rows_begin[threadIdx.x]);
  __syncthreads();
  const std::uint32_t parts = k.combine.parts;
  const std::uint32_t weights = a.uses_weights ? k.living : 0, headers = weights + k.living;
  const std::uint32_t units = headers + (a.release ? 0 : order.rows_begin[world] * parts);
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
    else if (unit < headers)
      send_combine_header(a, step, k.order[unit - weights]);
    else
      send_part<T, kTail>(a, step, order, (unit - headers) / parts, (unit - headers) % parts);
    unit = __shfl_sync(~0u, next, 0);
  }
}

}  // namespace pplx::cuda
