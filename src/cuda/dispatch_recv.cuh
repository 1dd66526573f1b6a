// dispatch_recv: all counts give the experts' offsets, which one warp finds out; meanwhile the others fetch what has come of their rows.
// A warp copies a part of a row to all of its places.
#pragma once

#include "arrivals.cuh"
#include "barriers.cuh"
#include "remote.cuh"
#include "rows.cuh"

namespace pplx::cuda {

// A row as its first warp sees it: lane i has choice i.
struct ArrivedRow {
  std::uint32_t source, at;    // at: among the rows of all sources
  std::uint32_t token, choices, n;
  std::uint32_t place, expert; // of this lane's choice; place is kNone where the output is too small
  float weight;
};

struct ReceiveShared {
  Gate rows_known;  // rows_begin
  Gate placed;  // base, below
  std::uint32_t rows_begin[kMaxPeers + 1];
  std::uint32_t rows[kMaxPeers];
  std::uint32_t next;  // unit of this thread block
  bool good;  // all counts came
  std::uint32_t ragged_rows;  // that the output must have
};

// base[source][expert] becomes the output row of the source's first row of the expert; base[world] is where the expert ends.
struct Experts {
  std::uint32_t* base;
  std::uint32_t stride;  // of a source: the experts, and some more, so that four are loaded at once
  __device__ std::uint32_t& at(std::uint32_t source, std::uint32_t expert) const { return base[source * stride + expert]; }
};
constexpr std::uint32_t expert_stride(std::uint32_t experts) { return ceil_div(experts, kNumbersOfPiece) * kNumbersOfPiece; }

// Counts that a source cannot mean, once their experts are placed. What follows from them is checked against the output's size row by
// row, whoever looks first.
__device__ inline void check_counts(const Common& k, std::uint32_t step, const ReceiveShared& s, const Experts& e) {
  for (std::uint32_t source = threadIdx.x % 32; source < k.c.world; source += 32) {
    std::uint64_t sum = 0;
    for (std::uint32_t i = 0; i < k.experts; ++i) sum += e.at(source + 1, i) - e.at(source, i);
    if (sum < s.rows[source] || sum > std::uint64_t{s.rows[source]} * k.c.top_k)
      fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, source, step}, s.rows[source], sum);
  }
}

// Replicas that do not hold the same tokens.
static __device__ __noinline__ void check_replicas(const Common& k, std::uint32_t step) {
  const auto compared = [&](std::uint32_t rank, std::uint32_t (&n)[kNumbersOfPiece]) {
    const char* place = k.peers[k.c.rank] + k.heap.counts_at(k.c, set_of(k.c, step), rank) + kPieceBytes * count_pieces(k.c);
    uint4 piece;
    if (!await_tagged(k, place, Phase::DispatchRecv, step, rank, piece)) return false;
    unpack_numbers({{piece.x, piece.y, piece.z}}, n);
    return true;
  };
  for (std::uint32_t source = threadIdx.x % 32; source < k.c.world; source += 32) {
    if ((k.replicas >> source & 1) == 0) continue;
    std::uint32_t own[kNumbersOfPiece], theirs[kNumbersOfPiece];
    if (!compared(k.c.rank, own) || !compared(source, theirs)) return;
    bool same = true;
    for (std::uint32_t i = 0; i < kNumbersOfPiece; ++i) same = same && own[i] == theirs[i];
    if (!same) fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, source, step}, kTokens | own[0], theirs[0]);
  }
}

// The rows and the choices of each source, as their pieces come: all of a lane's are asked for at once.
__device__ inline bool read_counts(const Common& k, std::uint32_t step, ReceiveShared& s, const Experts& e) {
  constexpr std::uint32_t kAtOnce = 4;
  const std::uint32_t of_source = count_pieces(k.c), all = k.c.world * of_source;
  const char* counts = k.peers[k.c.rank] + k.heap.counts_at(k.c, set_of(k.c, step), 0);
  bool good = true;
  for (std::uint32_t first = threadIdx.x % 32; first < all; first += 32 * kAtOnce) {
    uint4 piece[kAtOnce];
    const auto place = [&](std::uint32_t i) {
      const std::uint32_t source = k.pieces.divide(i);
      return counts + kPieceBytes * (source * k.pieces_of_source + i - source * of_source);
    };
#pragma unroll
    for (std::uint32_t j = 0; j < kAtOnce; ++j)
      if (first + 32 * j < all) piece[j] = load_piece(place(first + 32 * j));
#pragma unroll
    for (std::uint32_t j = 0; j < kAtOnce; ++j) {
      const std::uint32_t i = first + 32 * j, source = k.pieces.divide(i), nth = i - source * of_source;
      if (i >= all) continue;
      std::uint32_t n[kNumbersOfPiece] = {};
      if ((k.dead >> source & 1) == 0) {
        good = good && (is_tagged(k, piece[j], step) || await_tagged(k, place(i), Phase::DispatchRecv, step, source, piece[j]));
        unpack_numbers({{piece[j].x, piece[j].y, piece[j].z}}, n);
      }
      if (nth == 0) {
        s.rows[source] = n[0];
        if (good && n[0] > k.most_rows) {
          fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, source, step}, k.most_rows, n[0]);
          good = false;
        }
      } else if ((nth - 1) * kNumbersOfPiece < e.stride) {
#pragma unroll
        for (std::uint32_t m = 0; m < kNumbersOfPiece; ++m) {
          const std::uint32_t expert = (nth - 1) * kNumbersOfPiece + m;
          e.at(source, expert) = expert < k.experts ? n[m] : 0;
        }
      }
    }
  }
  return all_of_warp(good);
}

// The sum over the lanes before this one; `all`: over all lanes.
__device__ inline std::uint32_t sum_before(std::uint32_t n, std::uint32_t& all) {
  std::uint32_t sum = n;
#pragma unroll
  for (int i = 1; i < 32; i *= 2) {
    const std::uint32_t before = __shfl_up_sync(~0u, sum, i);
    if (threadIdx.x % 32 >= i) sum += before;
  }
  all = __shfl_sync(~0u, sum, 31);
  return sum - n;
}

__device__ inline void place_sources(const DispatchArguments& a, bool reports, ReceiveShared& s) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  std::uint32_t before = 0;
  for (std::uint32_t r0 = 0; r0 < k.c.world; r0 += 32) {
    const std::uint32_t r = r0 + lane, n = r < k.c.world ? s.rows[r] : 0;
    std::uint32_t all = 0;
    const std::uint32_t begin = before + sum_before(n, all);
    before += all;
    if (r >= k.c.world) continue;
    s.rows_begin[r] = begin;
    s.rows_begin[r + 1] = begin + n;
    if (reports) a.received.rows_begin[r] = begin;
    if (reports) a.received.rows_begin[r + 1] = begin + n;
  }
}

// Counts become places: a lane has four experts after each other. One thread block reports what the caller is told.
__device__ inline void place_experts(const DispatchArguments& a, bool reports, ReceiveShared& s, const Experts& e) {
  const Common& k = a.common;
  const bool padded = k.c.layout == LayoutKind::Padded;
  std::uint32_t offset = 0, largest = 0;
  for (std::uint32_t first = 0; first < k.experts; first += 32 * kNumbersOfPiece) {
    const std::uint32_t expert = first + threadIdx.x % 32 * kNumbersOfPiece;
    std::uint32_t count[kNumbersOfPiece] = {}, room[kNumbersOfPiece] = {}, rooms = 0;
    for (std::uint32_t r = 0; r < k.c.world; ++r)
#pragma unroll
      for (std::uint32_t j = 0; j < kNumbersOfPiece; ++j) count[j] += expert < k.experts ? e.at(r, expert + j) : 0;
#pragma unroll
    for (std::uint32_t j = 0; j < kNumbersOfPiece; ++j) {
      room[j] = ceil_div(count[j], k.c.align) * k.c.align;
      rooms += room[j];
    }
    std::uint32_t all = 0;
    std::uint32_t start = offset + sum_before(rooms, all);
    offset += all;
#pragma unroll
    for (std::uint32_t j = 0; j < kNumbersOfPiece; ++j) {
      if (expert + j >= k.experts) continue;
      std::uint32_t at = padded ? (expert + j) * k.c.max_per_expert : start;
      for (std::uint32_t r = 0; r < k.c.world; ++r) {
        const std::uint32_t n = e.at(r, expert + j);
        e.at(r, expert + j) = at;
        at += n;
      }
      e.at(k.c.world, expert + j) = at;
      largest = max(largest, count[j]);
      if (reports) a.out.counts[expert + j] = static_cast<std::int32_t>(count[j]);
      if (reports && a.out.offsets != nullptr) a.out.offsets[expert + j] = static_cast<std::int32_t>(start);
      start += room[j];
    }
  }
  const bool too_large = __any_sync(~0u, largest > k.c.max_per_expert);
  if (threadIdx.x % 32 != 0) return;
  s.ragged_rows = offset;
  if (!reports) return;
  const std::uint32_t rows = s.rows_begin[k.c.world];
  const bool overflowed = padded ? too_large : (k.c.layout == LayoutKind::Compact ? rows : offset) > k.c.max_rows;
  *a.received.overflowed = overflowed;
  if (overflowed) k.report->notices.overflowed = 1 + k.c.rank;
  if (a.out.offsets != nullptr) a.out.offsets[k.experts] = static_cast<std::int32_t>(offset);
  if (a.out.num_rows != nullptr) *a.out.num_rows = static_cast<std::int32_t>(rows);
}

// A warp's part: what remote peers' headers say becomes pieces of counts, as a peer of the node writes them, and their arrival words come
// to device memory. A look across PCIe takes a microsecond: 32 peers' headers and counts are asked for at once, whoever they are of.
__device__ inline void pass_on_dispatches(const DispatchArguments& a, std::uint32_t step) {
  constexpr std::uint32_t kAtOnce = 4;
  const Common& k = a.common;
  const std::uint32_t set = set_of(k.c, step), lane = threadIdx.x % 32;
  bool mine = false;
  if (lane == 0) mine = claim_words(k, step, Op::Dispatch);
  if (!__any_sync(~0u, mine)) return;
  const std::uint32_t peers = __popcll(k.remote & ~k.dead), vectors = count_pieces(k.c) - 1;
  const auto pieces_of = [&](std::uint32_t peer) { return k.peers[k.c.rank] + k.heap.counts_at(k.c, set, peer); };
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
        const std::uint32_t i = first + 32 * j;
        if (i >= n * vectors) continue;
        const PackedNumbers p = pack_numbers({counts[j].x, counts[j].y, counts[j].z, counts[j].w});
        store_tagged(k, pieces_of(group[i / vectors]) + kPieceBytes * (1 + i % vectors), step, p.words[0], p.words[1], p.words[2]);
      }
    }
    // Nobody does anything with counts before they know how many rows there are.
    const bool good = lane >= n || check_header(k, h, Phase::DispatchRecv, step, peer);
    if (good && lane < n) {
      const PackedNumbers p = pack_numbers({h.rows, 0, 0, 0});
      store_tagged(k, pieces_of(peer), step, p.words[0], p.words[1], p.words[2]);
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

// False: the row is not one that this peer may send. `piece`: this lane's of the route.
__device__ inline bool read_route(const DispatchArguments& a, std::uint32_t step, const uint4& piece, const Experts& e, ArrivedRow& r) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  // Three words in each lane's piece.
  const auto word = [&](std::uint32_t i) {
    const std::uint32_t of = i / 3;
    const std::uint32_t x = __shfl_sync(~0u, piece.x, of), y = __shfl_sync(~0u, piece.y, of), z = __shfl_sync(~0u, piece.z, of);
    return i % 3 == 0 ? x : i % 3 == 1 ? y : z;
  };
  r.token = __shfl_sync(~0u, piece.x, 0);
  r.choices = __shfl_sync(~0u, piece.y, 0) & 0xffffu;
  r.n = __popc(r.choices);
  const std::uint32_t place = word(2 + 2 * (lane % kMaxTopK)), weight = word(3 + 2 * (lane % kMaxTopK));
  bool good = r.n != 0 && r.choices >> k.c.top_k == 0;
  r.place = kNone;
  r.expert = 0;
  r.weight = 0.0f;
  if (good && lane < r.n) {
    r.expert = route_expert(place);
    r.weight = __uint_as_float(weight);
    good = r.expert < k.experts;
    if (good && k.c.layout != LayoutKind::Compact) {
      const std::uint32_t begin = e.at(r.source, r.expert), end = e.at(r.source + 1, r.expert);
      good = route_index(place) < end - begin;
      const std::uint32_t at = begin + route_index(place);
      const bool fits = k.c.layout == LayoutKind::Padded ? at - r.expert * k.c.max_per_expert < k.c.max_per_expert : at < k.c.max_rows;
      if (good && fits) r.place = at;
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

// The words of scales [first, first + 4), of the scales that begin at `to`.
__device__ inline void store_scale_words(const DispatchArguments& a, char* to, std::uint32_t first, const uint4& words) {
  const Common& k = a.common;
  const std::uint32_t scales = scales_per_row(k.c), n = scale_words(k.c);
  const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (std::uint32_t i = 0; i < 4; ++i) {
    const std::uint32_t j = first + i;
    if (j >= n) continue;
    if (k.c.wire != Wire::MXFP8)
      *reinterpret_cast<std::uint32_t*>(to + j * a.out.scale.scale) = word[i];
    else if (!k.c.scale_tma && scales % 4 == 0)
      *reinterpret_cast<std::uint32_t*>(to + 4 * j) = word[i];
    else
      for (std::uint32_t m = 0; m < 4; ++m)
        if (4 * j + m < scales) to[(4 * j + m) * a.out.scale.scale] = static_cast<char>(word[i] >> 8 * m);
  }
}

// `piece`: this lane's four words of scales, from the nth piece of a warp's width on.
__device__ inline void place_scales(const DispatchArguments& a, const ArrivedRow& r, const uint4& piece, std::uint32_t nth) {
  const std::uint32_t copies = a.common.c.layout == LayoutKind::Compact ? 1 : r.n;
  for (std::uint32_t i = 0; i < copies; ++i) {
    const std::uint32_t place = __shfl_sync(~0u, r.place, i), expert = __shfl_sync(~0u, r.expert, i);
    if (place != kNone) store_scale_words(a, scale_place(a, place, expert), 4 * (nth + threadIdx.x % 32), piece);
  }
}

// A warp's part of a row: pieces of payload, of the route, and with the last part of scales. They are loaded before anybody knows where
// they go.
struct ArrivedPart {
  static constexpr std::uint32_t kVectors = kPartBytes / 512;
  static constexpr std::uint32_t kScale = kVectors, kRoute = kVectors + 1;  // bits
  const char* row;
  std::uint32_t begin, end;  // of payload; begin: this lane's
  uint4 payload[kVectors], scale, route;
  std::uint32_t wanted = 0, missing = 0;  // a bit each

  __device__ ArrivedPart(const Common& k, const char* row, std::uint32_t part) : row(row) {
    const std::uint32_t lane = threadIdx.x % 32;
    begin = part * k.part_bytes + lane * 16;
    end = min(k.payload_bytes, (part + 1) * k.part_bytes);
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if (begin + j * 512 < end) wanted |= 1u << j;
    if (part == k.parts - 1 && lane < scale_pieces(k)) wanted |= 1u << kScale;
    if (lane < k.route_pieces) wanted |= 1u << kRoute;
    missing = wanted;
  }
  __device__ static std::uint32_t scale_pieces(const Common& k) { return quantised(k.c.wire) ? ceil_div(scale_words(k.c), 4) : 0; }

  __device__ const char* scale_at(const Common& k) const { return row + k.dispatch.scales_at + threadIdx.x % 32 * 16; }
  // Those of `bits`.
  __device__ void load(const Common& k, std::uint32_t bits) {
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if ((bits >> j & 1) != 0) payload[j] = load_piece(row + begin + j * 512);
    if ((bits >> kScale & 1) != 0) scale = load_piece(scale_at(k));
    if ((bits >> kRoute & 1) != 0) route = load_piece(row + k.dispatch.route_at + threadIdx.x % 32 * 16);
  }
  // Takes note of those that have come.
  __device__ void note_come(const Common& k, std::uint32_t step, std::uint32_t bits) {
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if ((bits >> j & 1) != 0 && !is_blank(payload[j])) missing &= ~(1u << j);
    if ((bits >> kScale & 1) != 0 && !is_blank(scale)) missing &= ~(1u << kScale);
    if ((bits >> kRoute & 1) != 0 && is_tagged(k, route, step)) missing &= ~(1u << kRoute);
  }
  __device__ bool look(const Common& k, std::uint32_t step, bool all) {
    const std::uint32_t bits = all ? missing : missing & ~(missing - 1);
    load(k, bits);
    note_come(k, step, bits);
    return all ? missing == 0 : bits == 0 || (missing & bits) == 0;
  }
  __device__ void make_places_blank(const Common& k) const {
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if ((wanted >> j & 1) != 0) make_blank(const_cast<char*>(row) + begin + j * 512);
    if ((wanted >> kScale & 1) != 0) make_blank(const_cast<char*>(scale_at(k)));
  }
};

// To every place of the row.
__device__ inline void place_payload(const DispatchArguments& a, const ArrivedRow& r, const ArrivedPart& part) {
  const Common& k = a.common;
  const std::uint32_t bytes = k.payload_bytes, copies = k.c.layout == LayoutKind::Compact ? 1 : r.n;
  const bool aligned = bytes % 16 == 0;
  for (std::uint32_t i = 0; i < copies; ++i) {
    const std::uint32_t place = __shfl_sync(~0u, r.place, i);
    if (place == kNone) continue;
    char* out = a.out.x + std::uint64_t{place} * bytes;
#pragma unroll
    for (std::uint32_t j = 0; j < ArrivedPart::kVectors; ++j) {
      const std::uint32_t at = part.begin + j * 512;
      if (at < part.end) store_some(out + at, part.payload[j], min(16u, bytes - at), aligned);
    }
  }
}

// Ragged(zero_pad=True): the rows between an expert's last and the next one's first.
// A warp's part: one expert's.
__device__ inline void zero_padding(const DispatchArguments& a, const Experts& e, std::uint32_t expert, std::uint32_t needed) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, bytes = k.payload_bytes;
  const std::uint32_t end = expert + 1 < k.experts ? e.at(0, expert + 1) : needed;
  for (std::uint32_t place = e.at(k.c.world, expert); place < min(end, k.c.max_rows); ++place) {
    for (std::uint32_t at = lane * 16; at < bytes; at += 512)
      store_some(a.out.x + std::uint64_t{place} * bytes + at, make_uint4(0, 0, 0, 0), min(16u, bytes - at), bytes % 16 == 0);
    for (std::uint32_t j = 4 * lane; quantised(k.c.wire) && j < scale_words(k.c); j += 4 * 32)
      store_scale_words(a, scale_place(a, place, 0), j, make_uint4(0, 0, 0, 0));
    if (lane == 0) {
      a.out.weights[place] = 0.0f;
      a.out.src_rank[place] = a.out.src_token[place] = -1;
    }
  }
}

// After a failure: what the caller launches next must not run on what memory happened to hold. By one warp.
__device__ inline void nothing_received(const DispatchArguments& a) {
  const Common& k = a.common;
  if (blockIdx.x != 0) return;
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t e = lane; e <= k.experts; e += 32) {
    if (e < k.experts) a.out.counts[e] = 0;
    if (a.out.offsets != nullptr) a.out.offsets[e] = 0;
  }
  for (std::uint32_t r = lane; r <= k.c.world; r += 32) a.received.rows_begin[r] = 0;
  if (lane == 0) *a.received.overflowed = 0;
  if (lane == 0 && a.out.num_rows != nullptr) *a.out.num_rows = 0;
}

// The leading warp's part: from counts to places. Before it the others know how many rows there are, after it where they go.
template <bool kPlain>
__device__ inline void lead_receivers(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, const Experts& e) {
  const Common& k = a.common;
  const bool reports = blockIdx.x == gridDim.x - 1;  // it is the least likely to have sent anything
  const bool good = read_counts(k, step, s, e);
  note(k, Stage::CountsThere);
  __syncwarp();
  if (good) place_sources(a, reports, s);
  if (threadIdx.x % 32 == 0) s.good = good;
  s.rows_known.open();
  if (good) {
    place_experts(a, reports, s, e);
    note(k, Stage::ExpertsPlaced);
  } else {
    nothing_received(a);
  }
  s.placed.open();
  if (!good || !reports) return;
  check_counts(k, step, s, e);
  if (!kPlain && k.slice.of > 1) check_replicas(k, step);
}

// Waits for a part of a row. False: it will not come.
template <bool kPlain>
__device__ inline bool fetch_part(const Common& k, std::uint32_t step, std::uint32_t source, bool shows, ArrivedPart& part) {
  if (!shows) {
    bool good = true;
    if (threadIdx.x % 32 == 0)
      good = !kPlain && is_remote(k, source)
                 ? wait<Match::Reached>(k, arrival(k, step, Signal::Dispatch, source), Phase::DispatchRecv, step, source)
                 : wait<Match::Exact>(k, part.row + k.dispatch.arrival_at, Phase::DispatchRecv, step, source);
    if (!all_of_warp(good)) return false;
    part.load(k, part.wanted);
    return true;
  }
  std::uint32_t looks = 0;
  const auto look = [&](bool all) {
    // Some piece of the row may look blank although it came: then its writer raises a word.
    if (++looks % kLooksAtWord == 0 && load_acquire(part.row + k.dispatch.arrival_at) == arrival_word(k.generation, step)) {
      part.load(k, part.wanted);
      part.missing = 0;
    }
    return part.look(k, step, all);
  };
  return await_pieces(k, Phase::DispatchRecv, step, [&] { return source; }, look);
}

// The rest of the scales, where a warp has not enough lanes for all of them.
__device__ inline void place_more_scales(const DispatchArguments& a, const ArrivedRow& r, const char* row) {
  const Common& k = a.common;
  for (std::uint32_t nth = 32; nth < ArrivedPart::scale_pieces(k); nth += 32) {
    const bool here = nth + threadIdx.x % 32 < ArrivedPart::scale_pieces(k);
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (here) piece = load_piece(row + k.dispatch.scales_at + 16 * (nth + threadIdx.x % 32));
    place_scales(a, r, piece, nth);
  }
}

// A part of a row. False: something failed.
template <bool kPlain>
__device__ inline bool receive_part(const DispatchArguments& a, std::uint32_t step, std::uint32_t unit, ReceiveShared& s,
                                    const Experts& e) {
  const Common& k = a.common;
  ArrivedRow r;
  r.at = unit / k.parts;
  const std::uint32_t nth = unit % k.parts;
  r.source = 0;
  while (s.rows_begin[r.source + 1] <= r.at) ++r.source;
  const std::uint32_t number = r.at - s.rows_begin[r.source];
  ArrivedPart part(k, own_slot(k, set_of(k.c, step), Op::Dispatch, r.source) + k.dispatch.row_at(number), nth);
  const bool shows = (kPlain || !is_remote(k, r.source)) && number < k.showing_rows;
  if (!fetch_part<kPlain>(k, step, r.source, shows, part)) return false;
  note(k, Stage::RowThere);
  s.placed.wait();
  if (!read_route(a, step, part.route, e, r)) return false;
  place_payload(a, r, part);
  if (nth == 0) place_words(a, r);
  if (quantised(k.c.wire) && nth == k.parts - 1) {
    place_scales(a, r, part.scale, 0);
    place_more_scales(a, r, part.row);
  }
  if (shows) part.make_places_blank(k);
  note(k, Stage::RowPlaced);
  return true;
}

// For any warp of the block, once it has nothing to send.
template <bool kPlain>
__device__ inline void receive_dispatch(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, const Experts& e) {
  const Common& k = a.common;
  s.rows_known.wait();
  if (!s.good) return;
  const std::uint32_t rows = s.rows_begin[k.c.world] * k.parts;
  const std::uint32_t padding = k.c.zero_pad && k.c.layout == LayoutKind::Ragged ? k.experts : 0;
  for (;;) {
    std::uint32_t unit = 0;
    if (threadIdx.x % 32 == 0) unit = atomicAdd(&s.next, 1) * gridDim.x + blockIdx.x;
    unit = __shfl_sync(~0u, unit, 0);  // neighbours go to different multiprocessors: small steps use them all
    if (unit < rows) {
      if (!receive_part<kPlain>(a, step, unit, s, e)) return;
    } else if (unit < rows + padding) {
      s.placed.wait();
      zero_padding(a, e, unit - rows, s.ragged_rows);
    } else {
      return;
    }
  }
}

}  // namespace pplx::cuda
