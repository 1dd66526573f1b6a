// dispatch_recv: all counts give the experts' offsets; then a warp per part of a row copies it to its places as it arrives.
#pragma once

#include "barriers.cuh"
#include "remote.cuh"
#include "rows.cuh"
#include "words.cuh"

namespace pplx::cuda {

// A warp moves this much at once, seven 16-byte vectors a lane. Rows are worked on in equal parts no larger than that.
inline constexpr std::uint32_t kPartBytes = 3584;
__device__ inline std::uint32_t parts_of(std::uint32_t bytes) { return ceil_div(bytes, kPartBytes); }
__device__ inline std::uint32_t part_bytes(std::uint32_t bytes) {
  return static_cast<std::uint32_t>(align_up(ceil_div(bytes, parts_of(bytes)), 16));
}

// A row as its first warp sees it: lane i has choice i.
struct ArrivedRow {
  std::uint32_t source, at;    // at: among the rows of all sources
  std::uint32_t token, choices, n;
  std::uint32_t place, expert; // of this lane's choice; place is kNone where the output is too small
  float weight;
};

struct ReceiveShared {
  std::uint32_t rows_begin[kMaxPeers + 1];
  std::uint32_t rows[kMaxPeers];
  std::uint32_t room[kWorkerWarps];
  bool good;
  std::uint32_t ragged_rows;   // that the output must have
  std::uint32_t largest;       // expert's count
};

// Counts that a source cannot mean. What follows from them is checked against the output's size row by row, whoever looks first.
__device__ inline void check_counts(const Common& k, std::uint32_t step, const ReceiveShared& s, const std::uint32_t* counts) {
  const std::uint32_t source = threadIdx.x;
  if (source < k.c.world) {
    std::uint64_t sum = 0;
    for (std::uint32_t e = 0; e < k.experts; ++e) sum += counts[source * k.experts + e];
    if (sum < s.rows[source] || sum > std::uint64_t{s.rows[source]} * k.c.top_k)
      fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, source, step}, s.rows[source], sum);
  }
  sync_workers();
}

// Replicas that do not hold the same tokens.
static __device__ __noinline__ void check_replicas(const Common& k, std::uint32_t step) {
  const std::uint32_t source = threadIdx.x;
  if (source >= k.c.world || (k.replicas >> source & 1) == 0) return;
  const auto words_of = [&](std::uint32_t rank) {
    return k.peers[k.c.rank] + k.heap.counts_at(k.c, set_of(k.c, step), rank) + kWordBytes * replica_words_at(k.c);
  };
  std::uint32_t tokens[2] = {};
  bool same = true;
  for (std::uint32_t i = 0; i < kReplicaWords; ++i) {
    std::uint32_t own = 0, theirs = 0;
    if (!wait_count(k, words_of(k.c.rank) + kWordBytes * i, Phase::DispatchRecv, step, k.c.rank, own) ||
        !wait_count(k, words_of(source) + kWordBytes * i, Phase::DispatchRecv, step, source, theirs))
      return;
    if (i == 0) {
      tokens[0] = own;
      tokens[1] = theirs;
    }
    same = same && own == theirs;
  }
  if (!same) fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, source, step}, kTokens | tokens[0], tokens[1]);
}

// base[source][expert] becomes the output row of the source's first row of the expert; base[world] is where the expert ends.
__device__ inline bool place_experts(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, std::uint32_t* base) {
  const Common& k = a.common;
  const std::uint32_t tid = threadIdx.x, lane = tid % 32, warp = tid / 32, world = k.c.world, experts = k.experts;
  bool good = true;
  for (std::uint32_t i = tid; i < world * (1 + experts); i += kWorkers) {
    const std::uint32_t source = i / (1 + experts), place = i % (1 + experts);
    const char* word = k.peers[k.c.rank] + k.heap.counts_at(k.c, set_of(k.c, step), source) + kWordBytes * place;
    std::uint32_t n = 0;
    if ((k.dead >> source & 1) == 0) good = good && wait_count(k, word, Phase::DispatchRecv, step, source, n);
    if (place != 0) {
      base[source * experts + place - 1] = n;
      continue;
    }
    s.rows[source] = n;
    if (good && n > k.most_rows) {
      fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, source, step}, k.most_rows, n);
      good = false;
    }
  }
  if (tid == 0) s.largest = 0;
  if (!all_workers(good)) return false;
  note(k, Stage::CountsThere);
  // One thread block reports; the last, which is the least likely to have sent anything.
  const bool reports = blockIdx.x == gridDim.x - 1, padded = k.c.layout == LayoutKind::Padded;
  if (reports) check_counts(k, step, s, base);
  if (reports && k.slice.of > 1) check_replicas(k, step);
  if (tid <= world) {
    std::uint32_t begin = 0;
    for (std::uint32_t r = 0; r < tid; ++r) begin += s.rows[r];
    s.rows_begin[tid] = begin;
    if (reports) a.received.rows_begin[tid] = begin;
  }
  std::uint32_t offset = 0;
  for (std::uint32_t e0 = 0; e0 < experts; e0 += kWorkers) {
    const std::uint32_t e = e0 + tid;
    std::uint32_t count = 0;
    if (e < experts)
      for (std::uint32_t r = 0; r < world; ++r) count += base[r * experts + e];
    const std::uint32_t room = ceil_div(count, k.c.align) * k.c.align;
    std::uint32_t end = room;
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
      const std::uint32_t before = __shfl_up_sync(~0u, end, i);
      if (lane >= i) end += before;
    }
    if (lane == 31) s.room[warp] = end;
    sync_workers();
    std::uint32_t before = offset;
    for (std::uint32_t w = 0; w < kWorkerWarps; ++w) {
      if (w < warp) before += s.room[w];
      offset += s.room[w];
    }
    if (e < experts) {
      const std::uint32_t start = before + end - room;
      std::uint32_t at = padded ? e * k.c.max_per_expert : start;
      for (std::uint32_t r = 0; r < world; ++r) {
        const std::uint32_t n = base[r * experts + e];
        base[r * experts + e] = at;
        at += n;
      }
      base[world * experts + e] = at;
      if (reports) {
        atomicMax(&s.largest, count);
        a.out.counts[e] = static_cast<std::int32_t>(count);
        if (a.out.offsets != nullptr) a.out.offsets[e] = static_cast<std::int32_t>(start);
      }
    }
    sync_workers();
  }
  if (tid == 0) s.ragged_rows = offset;
  sync_workers();
  if (reports && tid == 0) {
    const bool compact = k.c.layout == LayoutKind::Compact;
    const bool overflowed = padded ? s.largest > k.c.max_per_expert : (compact ? s.rows_begin[world] : offset) > k.c.max_rows;
    *a.received.overflowed = overflowed;
    if (overflowed) k.report->notices.overflowed = 1 + k.c.rank;
    if (a.out.offsets != nullptr) a.out.offsets[experts] = static_cast<std::int32_t>(offset);
    if (a.out.num_rows != nullptr) *a.out.num_rows = static_cast<std::int32_t>(s.rows_begin[world]);
  }
  return true;
}

// A warp's part: what remote peers' headers say becomes count words, as a peer of the node writes them, and their arrival words come
// to device memory. A look across PCIe takes a microsecond: 32 peers' headers and counts are asked for at once, whoever they are of.
__device__ inline void pass_on_dispatches(const DispatchArguments& a, std::uint32_t step) {
  constexpr std::uint32_t kAtOnce = 4;
  const Common& k = a.common;
  const std::uint32_t set = set_of(k.c, step), lane = threadIdx.x % 32;
  const std::uint32_t peers = __popcll(k.remote & ~k.dead), vectors = ceil_div(k.experts, 4);
  const auto words_of = [&](std::uint32_t peer) {
    return reinterpret_cast<std::uint64_t*>(k.peers[k.c.rank] + k.heap.counts_at(k.c, set, peer));
  };
  for (std::uint32_t begin = 0; begin < peers; begin += 32) {
    const std::uint8_t* group = k.order + begin;  // which begins with those of other nodes
    const std::uint32_t n = min(32u, peers - begin), peer = group[min(lane, n - 1)];
    const bool there = lane >= n || wait_for_proxy(k, step, Signal::Dispatch, Phase::DispatchRecv, peer);
    if (!all_of_warp(there)) return;
    note(k, Stage::Heard);
    const BlockHeader h = load_header(own_slot(k, set, Op::Dispatch, peer));
    for (std::uint32_t first = lane; first < n * vectors; first += 32 * kAtOnce) {
      uint4 counts[kAtOnce];
#pragma unroll
      for (std::uint32_t j = 0; j < kAtOnce; ++j) {
        const std::uint32_t i = first + 32 * j;
        if (i >= n * vectors) continue;
        const char* block = own_slot(k, set, Op::Dispatch, group[i / vectors]);
        counts[j] = __ldcg(reinterpret_cast<const uint4*>(block + sizeof(BlockHeader)) + i % vectors);
      }
#pragma unroll
      for (std::uint32_t j = 0; j < kAtOnce; ++j) {
        const std::uint32_t i = first + 32 * j, e = i % vectors * 4;
        if (i >= n * vectors) continue;
        std::uint64_t* words = words_of(group[i / vectors]) + 1 + e;
        const std::uint32_t of[4] = {counts[j].x, counts[j].y, counts[j].z, counts[j].w};
#pragma unroll
        for (std::uint32_t m = 0; m < 4; ++m)
          if (e + m < k.experts) store_relaxed(words + m, count_word(k.generation, step, of[m]));
      }
    }
    // Nobody does anything with counts before they know how many rows there are.
    const bool good = lane >= n || check_header(k, h, Phase::DispatchRecv, step, peer);
    if (good && lane < n) {
      store_relaxed(words_of(peer), count_word(k.generation, step, h.rows));
      pass_on(k, step, Signal::Dispatch, peer);
    }
    note(k, Stage::PassedOn);
    if (!__all_sync(~0u, good)) return;
  }
  for (std::uint32_t i = lane; i < peers; i += 32) {
    see_it_leave(k, step, Op::Combine, Phase::CombineSend, k.order[i]);
    see_it_leave(k, step, Op::Weights, Phase::Weights, k.order[i]);
  }
}

// False: the row is not one that this peer may send.
__device__ inline bool read_route(const DispatchArguments& a, std::uint32_t step, const char* row, const std::uint32_t* base,
                                  ArrivedRow& r) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const char* route = row + k.dispatch.route_at;
  const uint2 head = __ldcg(reinterpret_cast<const uint2*>(route));
  uint2 entry = make_uint2(0, 0);   // there is room for top_k: no need to know first how many there are
  if (lane < k.c.top_k) entry = __ldcg(reinterpret_cast<const uint2*>(route + sizeof(RouteHead)) + lane);
  r.token = head.x;
  r.choices = head.y & 0xffffu;
  r.n = __popc(r.choices);
  bool good = r.n != 0 && r.choices >> k.c.top_k == 0;
  r.place = kNone;
  r.expert = 0;
  r.weight = 0.0f;
  if (good && lane < r.n) {
    r.expert = route_expert(entry.x);
    r.weight = __uint_as_float(entry.y);
    good = r.expert < k.experts;
    if (good && k.c.layout != LayoutKind::Compact) {
      const std::uint32_t begin = base[r.source * k.experts + r.expert], end = base[(r.source + 1) * k.experts + r.expert];
      good = route_index(entry.x) < end - begin;
      const std::uint32_t place = begin + route_index(entry.x);
      const bool fits =
          k.c.layout == LayoutKind::Padded ? place - r.expert * k.c.max_per_expert < k.c.max_per_expert : place < k.c.max_rows;
      if (good && fits) r.place = place;
    }
  }
  if (k.c.layout == LayoutKind::Compact && r.at < k.c.max_rows) r.place = r.at;
  if (__all_sync(~0u, good)) return true;
  if (lane == 0) fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, r.source, step}, r.at, r.choices);
  return false;
}

// Places everything that goes with a row, except its payload.
__device__ inline void place_words(const DispatchArguments& a, const ArrivedRow& r) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint64_t at = r.at;
  if (lane == 0) a.received.choices[at] = r.choices;
  if (k.c.layout == LayoutKind::Compact) {
    const bool here = r.choices >> lane & 1;
    const std::uint32_t entry = __popc(r.choices & ((1u << lane) - 1));
    const std::uint32_t expert = __shfl_sync(~0u, r.expert, entry);
    const float weight = __shfl_sync(~0u, r.weight, entry);
    if (lane == 0) a.received.place[at] = r.place;
    if (r.place == kNone) return;
    if (lane < k.c.top_k) {
      a.out.topk_ids[at * k.c.top_k + lane] = here ? static_cast<std::int32_t>(expert) : -1;
      a.out.topk_weights[at * k.c.top_k + lane] = here ? weight : 0.0f;
    }
    if (lane == 0) {
      a.out.src_rank[at] = static_cast<std::int32_t>(r.source);
      a.out.src_token[at] = static_cast<std::int32_t>(r.token);
    }
    return;
  }
  if (lane >= r.n) return;
  a.received.place[at * k.c.top_k + lane] = r.place;
  a.received.weight[at * k.c.top_k + lane] = r.weight;
  if (r.place == kNone) return;
  a.out.weights[r.place] = r.weight;
  a.out.src_rank[r.place] = static_cast<std::int32_t>(r.source);
  a.out.src_token[r.place] = static_cast<std::int32_t>(r.token);
}

__device__ inline char* scale_place(const DispatchArguments& a, std::uint32_t place, std::uint32_t expert) {
  const bool padded = a.common.c.layout == LayoutKind::Padded;
  const std::uint32_t group = padded ? expert : 0;
  return a.out.scales + group * a.out.scale.group + std::uint64_t{place - group * a.common.c.max_per_expert} * a.out.scale.row;
}

__device__ inline std::uint32_t load_scale_word(const Common& k, const char* row, std::uint32_t j) {
  return j < scale_words(k.c) ? __ldcg(reinterpret_cast<const std::uint32_t*>(row + k.dispatch.scales_at) + j) : 0;
}

// The word of scales at j, of the scales that begin at `to`.
template <Wire wire>
__device__ inline void store_scale_word(const DispatchArguments& a, char* to, std::uint32_t j, std::uint32_t word) {
  const Common& k = a.common;
  const std::uint32_t scales = scales_per_row(k.c);
  if (wire != Wire::MXFP8)
    *reinterpret_cast<std::uint32_t*>(to + j * a.out.scale.scale) = word;
  else if (!k.c.scale_tma && scales % 4 == 0)
    *reinterpret_cast<std::uint32_t*>(to + 4 * j) = word;
  else
#pragma unroll
    for (std::uint32_t i = 0; i < 4; ++i)
      if (4 * j + i < scales) to[(4 * j + i) * a.out.scale.scale] = static_cast<char>(word >> 8 * i);
}

// `early`: this lane's first two words.
template <Wire wire>
__device__ inline void place_scales(const DispatchArguments& a, const ArrivedRow& r, const char* row,
                                    const std::uint32_t (&early)[2]) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, words = scale_words(k.c), copies = k.c.layout == LayoutKind::Compact ? 1 : r.n;
  for (std::uint32_t first = 0; first < words; first += 32) {
    const std::uint32_t j = first + lane;
    const std::uint32_t word = first == 0 ? early[0] : first == 32 ? early[1] : load_scale_word(k, row, j);
    for (std::uint32_t i = 0; i < copies; ++i) {
      const std::uint32_t place = __shfl_sync(~0u, r.place, i), expert = __shfl_sync(~0u, r.expert, i);
      if (place != kNone && j < words) store_scale_word<wire>(a, scale_place(a, place, expert), j, word);
    }
  }
}

// Bytes [begin - 16 * lane, end) of a row's payload: loaded before the route says where they go.
struct ArrivedPart {
  static constexpr std::uint32_t kVectors = kPartBytes / 512;
  uint4 v[kVectors];
  std::uint32_t begin, end;   // begin: this lane's
  __device__ ArrivedPart(const char* row, std::uint32_t from, std::uint32_t to) : begin(from + threadIdx.x % 32 * 16), end(to) {
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if (begin + j * 512 < end) v[j] = load_arrived(row + begin + j * 512);
  }
};

// To every place of the row.
__device__ inline void place_payload(const DispatchArguments& a, const ArrivedRow& r, const ArrivedPart& part) {
  const Common& k = a.common;
  const std::uint32_t bytes = payload_bytes(k.c), copies = k.c.layout == LayoutKind::Compact ? 1 : r.n;
  const bool aligned = bytes % 16 == 0;
  for (std::uint32_t i = 0; i < copies; ++i) {
    const std::uint32_t place = __shfl_sync(~0u, r.place, i);
    if (place == kNone) continue;
    char* out = a.out.x + std::uint64_t{place} * bytes;
#pragma unroll
    for (std::uint32_t j = 0; j < ArrivedPart::kVectors; ++j) {
      const std::uint32_t at = part.begin + j * 512;
      if (at < part.end) store_some(out + at, part.v[j], min(16u, bytes - at), aligned);
    }
  }
}

// Ragged(zero_pad=True): the rows between an expert's last and the next one's first.
template <Wire wire>
__device__ inline void zero_padding(const DispatchArguments& a, const std::uint32_t* base, std::uint32_t needed) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, bytes = payload_bytes(k.c);
  for (std::uint32_t e = threadIdx.x / 32 * gridDim.x + blockIdx.x; e < k.experts; e += kWarps * gridDim.x) {
    const std::uint32_t end = e + 1 < k.experts ? base[e + 1] : needed;   // source 0's first row of the next expert
    for (std::uint32_t place = base[k.c.world * k.experts + e]; place < min(end, k.c.max_rows); ++place) {
      for (std::uint32_t at = lane * 16; at < bytes; at += 512)
        store_some(a.out.x + std::uint64_t{place} * bytes + at, make_uint4(0, 0, 0, 0), min(16u, bytes - at), bytes % 16 == 0);
      for (std::uint32_t j = lane; j < scale_words(k.c); j += 32) store_scale_word<wire>(a, scale_place(a, place, 0), j, 0);
      if (lane == 0) {
        a.out.weights[place] = 0.0f;
        a.out.src_rank[place] = a.out.src_token[place] = -1;
      }
    }
  }
}

// After a failure: what the caller launches next must not run on what memory happened to hold.
__device__ inline void nothing_received(const DispatchArguments& a) {
  const Common& k = a.common;
  if (blockIdx.x != 0) return;
  for (std::uint32_t e = threadIdx.x; e <= k.experts; e += kThreads) {
    if (e < k.experts) a.out.counts[e] = 0;
    if (a.out.offsets != nullptr) a.out.offsets[e] = 0;
  }
  if (threadIdx.x <= k.c.world) a.received.rows_begin[threadIdx.x] = 0;
  if (threadIdx.x == 0) *a.received.overflowed = 0;
  if (threadIdx.x == 0 && a.out.num_rows != nullptr) *a.out.num_rows = 0;
}

template <Wire wire>
__device__ void receive_dispatch(const DispatchArguments& a, std::uint32_t step, std::uint32_t* base) {
  PPLX_SHARED(ReceiveShared, s);
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, set = set_of(k.c, step);
  if (is_publisher()) {
    bool mine = false;
    if (k.remote != 0 && lane == 0) mine = claim_words(k, step, Op::Dispatch);
    if (__any_sync(~0u, mine)) pass_on_dispatches(a, step);
    __syncwarp();
    await(kPlaced);
  } else {
    const bool good = place_experts(a, step, s, base);
    if (threadIdx.x == 0) s.good = good;
    sync_workers();
    note(k, Stage::ExpertsPlaced);
    signal(kPlaced);
  }
  if (!s.good) {
    nothing_received(a);
    return;
  }
  const std::uint32_t bytes = payload_bytes(k.c), parts = parts_of(bytes), part_size = part_bytes(bytes);
  const std::uint32_t units = s.rows_begin[k.c.world] * parts;
  // Neighbours go to different multiprocessors: small steps use them all.
  for (std::uint32_t unit = threadIdx.x / 32 * gridDim.x + blockIdx.x; unit < units; unit += kWarps * gridDim.x) {
    ArrivedRow r;
    r.at = unit / parts;
    const std::uint32_t part = unit % parts;
    r.source = 0;
    while (s.rows_begin[r.source + 1] <= r.at) ++r.source;
    const char* row = own_slot(k, set, Op::Dispatch, r.source) + k.dispatch.row_at(r.at - s.rows_begin[r.source]);
    bool good = true;
    if (lane == 0)
      good = is_remote(k, r.source)
                 ? wait<Match::Reached>(k, arrival(k, step, Signal::Dispatch, r.source), Phase::DispatchRecv, step, r.source)
                 : wait<Match::Exact>(k, row + k.dispatch.arrival_at, Phase::DispatchRecv, step, r.source);
    if (!all_of_warp(good)) return;
    note(k, Stage::RowThere);
    const ArrivedPart payload(row, part * part_size, min(bytes, (part + 1) * part_size));
    const bool with_scales = quantised(wire) && part == parts - 1;
    std::uint32_t scales[2] = {};
    if (with_scales) {
      scales[0] = load_scale_word(k, row, lane);
      scales[1] = load_scale_word(k, row, lane + 32);
    }
    if (!read_route(a, step, row, base, r)) return;
    place_payload(a, r, payload);
    if (part == 0) place_words(a, r);
    if (with_scales) place_scales<wire>(a, r, row, scales);
    note(k, Stage::RowPlaced);
  }
  if (k.c.zero_pad && k.c.layout == LayoutKind::Ragged) zero_padding<wire>(a, base, s.ragged_rows);
}

}  // namespace pplx::cuda
