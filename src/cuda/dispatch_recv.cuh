// dispatch_recv: all counts give the experts' offsets, which two warps find out; meanwhile the others fetch what has come of their rows.
// A warp copies a part of a row to all of its places.
#pragma once

#include "arrivals.cuh"
#include "barriers.cuh"
#include "hooks.cuh"
#include "passed_rounds.cuh"
#include "remote.cuh"
#include "rows.cuh"

namespace pplx::cuda {

// A row as a warp sees it: lane i has choice i.
struct ArrivedRow {
  std::uint32_t source, at;  // at: among the rows of all sources
  std::uint32_t token, choices;  // choices: a bit each
  std::uint32_t expert, place;  // of this lane's choice; place is kNone where there is none, or the output is too small
  float weight;
};

struct ReceiveShared {
  Gate rows_known;  // rows_begin
  Gate placed;  // base, below
  std::uint32_t rows_begin[kMaxPeers + 1];
  std::uint32_t rows[kMaxPeers];
  std::uint32_t showing[kMaxPeers];  // how many of them, the first ones, show by themselves that they have come
  std::uint64_t many;  // see ReceivedView
  std::uint32_t choices[kMaxPeers];  // of all experts here; where they are checked
  std::uint32_t next;  // unit of this thread block
  bool good, placed_all;  // all counts came: of rows, and of choices
  std::uint32_t ragged_rows;  // that the output must have
};

// base[source][expert] becomes the output row of the source's first row of the expert; base[world] is where the expert ends. A source
// has whole pieces of four experts.
struct Experts {
  std::uint32_t* base;
  std::uint32_t pieces;  // of a source
  __device__ std::uint32_t& at(std::uint32_t source, std::uint32_t expert) const {
    return base[source * pieces * kNumbersOfPiece + expert];
  }
  __device__ uint4& piece(std::uint32_t i) const { return reinterpret_cast<uint4*>(base)[i]; }
};

// The thread block that tells the caller what has come: it is the least likely to have sent anything.
__device__ inline bool reports_counts() { return blockIdx.x == gridDim.x - 1; }

// By any warp: until it is known where rows go. Compact: a row's number says so, whatever the experts are. False: nobody knows.
__device__ inline bool await_places(const Common& k, ReceiveShared& s) {
  if (k.c.layout == LayoutKind::Compact) return true;
  s.placed.wait();
  return s.placed_all;
}

// Counts that a source cannot mean. What follows from them is checked against the output's size row by row, whoever looks first.
__device__ inline void check_counts(const Common& k, std::uint32_t step, const ReceiveShared& s) {
#pragma unroll 1
  for (std::uint32_t source = threadIdx.x % 32; source < k.c.world; source += 32) {
    const std::uint32_t rows = s.rows[source], choices = s.choices[source];
    if (choices < rows || choices > rows * k.c.top_k)
      fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, source, step}, rows, choices);
  }
}

// Replicas that do not hold the same tokens.
static __device__ __noinline__ void check_replicas(const Common& k, std::uint32_t step) {
  const auto compared = [&](std::uint32_t rank, std::uint32_t (&n)[kNumbersOfPiece]) {
    const char* place = k.peers[k.c.rank] + k.heap.compared_at(k.c, set_of(k.c, step), rank);
    uint4 piece = make_uint4(0, 0, 0, 0);
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

// A piece of counts: looked at first, waited for if it has not come. Those of the dead never come.
__device__ inline bool await_counts(const Common& k, std::uint32_t step, const char* place, std::uint32_t source, uint4& piece) {
  if (is_tagged(k, piece, step)) return true;
  if ((k.dead >> source & 1) == 0) return await_tagged(k, place, Phase::DispatchRecv, step, source, piece);
  piece = make_uint4(0, 0, 0, 0);
  return true;
}

// How many rows each source has sent.
__device__ inline bool read_rows(const Common& k, std::uint32_t step, ReceiveShared& s) {
  const std::uint32_t lane = threadIdx.x % 32;
  bool good = true;
  std::uint64_t many = 0;
#pragma unroll 1
  for (std::uint32_t first = 0; first < k.c.world; first += 32) {
    const std::uint32_t source = first + lane;
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (source < k.c.world) {
      const char* place = k.peers[k.c.rank] + k.heap.rows_at(k.c, set_of(k.c, step), source);
      piece = load_piece(place);
      good = await_counts(k, step, place, source, piece) && good;
      s.rows[source] = piece.x;
      s.showing[source] = piece.y;
    }
    many |= std::uint64_t{__ballot_sync(~0u, piece.z != 0)} << first;
    if (!good || piece.x <= k.most_rows) continue;
    fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, source, step}, k.most_rows, piece.x);
    good = false;
  }
  if (lane == 0) s.many = many;
  return all_of_warp(good);
}

// How many choices of each expert, as their pieces come: two of a lane's are asked for at once, 256 experts in all.
__device__ inline bool read_choices(const Common& k, std::uint32_t step, bool sums, ReceiveShared& s, const Experts& e) {
  constexpr std::uint32_t kAtOnce = 2;
  const std::uint32_t all = k.c.world * e.pieces;
  const char* counts = k.peers[k.c.rank] + k.heap.counts_at(k.c, set_of(k.c, step), 0);
  bool good = true;
#pragma unroll 1
  for (std::uint32_t first = threadIdx.x % 32; first < all; first += 32 * kAtOnce) {
    uint4 piece[kAtOnce];
#pragma unroll
    for (std::uint32_t j = 0; j < kAtOnce; ++j)
      if (first + 32 * j < all) piece[j] = load_piece(counts + kPieceBytes * (first + 32 * j));
#pragma unroll
    for (std::uint32_t j = 0; j < kAtOnce; ++j) {
      const std::uint32_t i = first + 32 * j;
      if (i >= all) continue;
      if (!is_tagged(k, piece[j], step)) good = await_counts(k, step, counts + kPieceBytes * i, i / e.pieces, piece[j]) && good;
      std::uint32_t n[kNumbersOfPiece];
      unpack_numbers({{piece[j].x, piece[j].y, piece[j].z}}, n);
      e.piece(i) = make_uint4(n[0], n[1], n[2], n[3]);
      // More than there can be is as good as any number that is too large.
      if (sums) atomicAdd(&s.choices[i / e.pieces], min(n[0] + n[1] + n[2] + n[3], kMaxChoices + 1));
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
  std::uint32_t before = 0;
#pragma unroll 1
  for (std::uint32_t r = threadIdx.x % 32; r - threadIdx.x % 32 < k.c.world; r += 32) {
    const std::uint32_t n = r < k.c.world ? s.rows[r] : 0;
    std::uint32_t all = 0;
    const std::uint32_t begin = before + sum_before(n, all);
    before += all;
    if (r >= k.c.world) continue;
    s.rows_begin[r] = begin;
    if (r + 1 == k.c.world) s.rows_begin[k.c.world] = before;
    if (!reports) continue;
    a.received.rows_begin[r] = begin;
    if (r + 1 == k.c.world) a.received.rows_begin[k.c.world] = before;
    if (r == 0) *a.received.many = s.many;
  }
}

// How much room a segment with so many rows takes.
__device__ inline std::uint32_t room_of(const Common& k, std::uint32_t rows) {
  return k.align_mask != kNone ? (rows + k.align_mask) & ~k.align_mask : ceil_div(rows, k.c.align) * k.c.align;
}

__device__ inline uint4 add(const uint4& a, const uint4& b) { return make_uint4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Tells the caller the counts and offsets of four experts.
__device__ inline void report_experts(const DispatchArguments& a, std::uint32_t first, const uint4& count, const uint4& start) {
  const std::uint32_t counts[] = {count.x, count.y, count.z, count.w}, starts[] = {start.x, start.y, start.z, start.w};
#pragma unroll
  for (std::uint32_t j = 0; j < kNumbersOfPiece; ++j) {
    if (first + j >= a.common.experts) continue;
    a.out.counts[first + j] = static_cast<std::int32_t>(counts[j]);
    if (a.out.offsets != nullptr) a.out.offsets[first + j] = static_cast<std::int32_t>(starts[j]);
  }
}

__device__ inline void report_totals(const DispatchArguments& a, const ReceiveShared& s, bool too_many_of_one) {
  const Common& k = a.common;
  const std::uint32_t rows = s.rows_begin[k.c.world];
  const bool compact = k.c.layout == LayoutKind::Compact, padded = k.c.layout == LayoutKind::Padded;
  const bool overflowed = padded ? too_many_of_one : (compact ? rows : s.ragged_rows) > k.c.max_rows;
  *a.received.overflowed = overflowed;
  if (overflowed) k.report->notices.overflowed = 1 + k.c.rank;
  if (a.out.offsets != nullptr) a.out.offsets[k.experts] = static_cast<std::int32_t>(s.ragged_rows);
  if (a.out.num_rows != nullptr) *a.out.num_rows = static_cast<std::int32_t>(rows);
}

// Counts become places: a lane has four experts after each other. One thread block reports what the caller is told. True: an expert
// has more than Padded has room for.
__device__ inline bool place_experts(const DispatchArguments& a, bool reports, ReceiveShared& s, const Experts& e) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, room = k.c.max_per_expert;
  std::uint32_t offset = 0, largest = 0;
#pragma unroll 1
  for (std::uint32_t p = lane; p - lane < e.pieces; p += 32) {
    const std::uint32_t first = p * kNumbersOfPiece;
    uint4 count = make_uint4(0, 0, 0, 0);
    if (p < e.pieces)
#pragma unroll 2
      for (std::uint32_t r = 0; r < k.c.world; ++r) count = add(count, e.piece(r * e.pieces + p));
    const uint4 rooms = make_uint4(room_of(k, count.x), room_of(k, count.y), room_of(k, count.z), room_of(k, count.w));
    std::uint32_t all = 0;
    const std::uint32_t before = offset + sum_before(rooms.x + rooms.y + rooms.z + rooms.w, all);
    offset += all;
    if (p >= e.pieces) continue;
    const std::uint32_t second = before + rooms.x, third = second + rooms.y;
    const uint4 start = make_uint4(before, second, third, third + rooms.z);
    uint4 at = k.c.layout == LayoutKind::Padded ? make_uint4(first * room, (first + 1) * room, (first + 2) * room, (first + 3) * room) : start;
#pragma unroll 2
    for (std::uint32_t r = 0; r < k.c.world; ++r) {
      const uint4 n = e.piece(r * e.pieces + p);
      e.piece(r * e.pieces + p) = at;
      at = add(at, n);
    }
    e.piece(k.c.world * e.pieces + p) = at;
    largest = max(largest, max(max(count.x, count.y), max(count.z, count.w)));
    if (reports) report_experts(a, first, count, start);
  }
  if (lane == 0) s.ragged_rows = offset;
  return __any_sync(~0u, largest > room);
}

// Behind the last expert a header has anything.
__device__ inline PackedNumbers packed_counts(const Common& k, std::uint32_t first, const uint4& counts) {
  const auto of = [&](std::uint32_t j, std::uint32_t n) { return first + j < k.experts ? n & kMostOfNumber : 0; };
  return pack_numbers({of(0, counts.x), of(1, counts.y), of(2, counts.z), of(3, counts.w)});
}

// In pieces: keeps what the first header of a source says of its rounds. False: it cannot be so.
__device__ inline bool keep_first_piece(const DispatchArguments& a, std::uint32_t step, const BlockHeader& h) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  std::uint32_t* const kept = kept_rounds(p, h.source);
  kept[0] = h.pieces;
  kept[1] = 0;
  if (h.pieces > 1 && h.pieces <= p.most) kept[2] = h.end;
  const bool whole = h.pieces == 0, fits = h.piece == 0 && h.begin == 0 && h.pieces <= p.most && h.end <= min(h.rows, p.tokens);
  if (whole ? h.rows <= k.heap.slot_rows : fits && (h.pieces > 1 || h.end == h.rows)) return true;
  fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, h.source, step}, p.most, h.pieces);
  return false;
}
// The same for a later one.
__device__ inline bool keep_piece(const DispatchArguments& a, std::uint32_t step, std::uint32_t source, std::uint32_t piece) {
  const Common& k = a.common;
  const PieceArguments& p = a.pieces;
  std::uint32_t* const kept = kept_rounds(p, source);
  const std::uint32_t set = set_of(k.c, step), pieces = kept[0], begin = kept[1 + piece];
  const std::uint32_t rows = load_piece(k.peers[k.c.rank] + k.heap.rows_at(k.c, set, source)).x;
  const BlockHeader h = load_piece_header(own_slot(k, set, Op::Dispatch, source) + k.heap.piece_at(Op::Dispatch, piece));
  const std::uint32_t most = min(rows, begin + p.tokens), end = piece + 1 < pieces ? min(max(begin, h.end), most) : rows;
  if (piece + 1 < pieces) kept[2 + piece] = end;
  return end <= most && check_piece_header(k, h, Phase::DispatchRecv, step, source, piece, pieces, {begin, end});
}

// The counts of n remote peers' headers, as peers of the node write them. A look across PCIe takes a microsecond: several are asked for
// at once, whoever they are of.
__device__ inline void pass_on_counts(const Common& k, std::uint32_t step, const std::uint8_t* group, std::uint32_t n) {
  constexpr std::uint32_t kAtOnce = 4;
  const std::uint32_t set = set_of(k.c, step), lane = threadIdx.x % 32, vectors = k.expert_pieces;
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
      const PackedNumbers p = packed_counts(k, i % vectors * kNumbersOfPiece, counts[j]);
      store_tagged(k, k.peers[k.c.rank] + k.heap.counts_at(k.c, set, group[i / vectors]) + kPieceBytes * (i % vectors), step, p.words[0], p.words[1], p.words[2]);
    }
  }
}

// In pieces, after all first headers: the later ones, and what has room of those that this launch sends.
__device__ inline void pass_on_later_pieces(const DispatchArguments& a, std::uint32_t step) {
  const PieceArguments& p = a.pieces;
  const std::uint32_t sent = a.send && p.chunks != 0 ? (a.own + p.tokens - 1) / p.tokens : 0;
  const auto begin = [&](PassedPeer& of) {
    of.landed = 1;
    of.all_landed = kept_rounds(p, of.peer)[0];
    of.all_room = rounds_to_be_free(p, sent);
  };
  const auto take = [&](std::uint32_t peer, std::uint32_t piece) { return keep_piece(a, step, peer, piece); };
  pass_on_rounds(a.common, p, step, {Op::Dispatch, Phase::DispatchSend, Phase::DispatchRecv}, begin, take);
}

// A warp's part: what remote peers' headers say becomes pieces of counts, as a peer of the node writes them, and their arrival words come
// to device memory: of 32 peers at once.
template <bool kPieces = false>
__device__ inline void pass_on_dispatches(const DispatchArguments& a, std::uint32_t step) {
  const Common& k = a.common;
  const std::uint32_t set = set_of(k.c, step), lane = threadIdx.x % 32;
  bool mine = false;
  if (lane == 0) mine = claim_words(k, step, Op::Dispatch);
  if (!__any_sync(~0u, mine)) return;
  const std::uint32_t peers = remote_peers(k);
  for (std::uint32_t begin = 0; begin < peers; begin += 32) {
    const std::uint8_t* group = k.order + begin;  // which begins with those of other nodes
    const std::uint32_t n = min(32u, peers - begin), peer = group[min(lane, n - 1)];
    const bool there = lane >= n || wait_for_block<kPieces>(k, step, Op::Dispatch, Phase::DispatchRecv, peer);
    if (!all_of_warp(there)) return;
    note(k, Stage::Heard);
    BlockHeader h;
    if constexpr (kPieces)
      h = load_piece_header(own_slot(k, set, Op::Dispatch, peer));
    else
      h = load_header(own_slot(k, set, Op::Dispatch, peer));
    pass_on_counts(k, step, group, n);
    // Nobody does anything with counts before they know how many rows there are.
    bool good = lane >= n || check_header(k, h, Phase::DispatchRecv, step, peer);
    if constexpr (kPieces) good = good && (lane >= n || keep_first_piece(a, step, h));
    if (good && lane < n) {
      store_tagged(k, k.peers[k.c.rank] + k.heap.rows_at(k.c, set, peer), step, h.rows, kPieces && h.pieces == 0 ? k.showing_rows : 0, 0);
      if constexpr (kPieces) {
        pass_on(k, step, Signal::Dispatch, peer);
        store_release_here(parts_word(k, k.peers[k.c.rank], step, Op::Dispatch, peer), pieces_word(k.generation, step, 1));
        store_release_here(remote_word(k, a.pieces, RemoteWord::Landed, step, Op::Dispatch, peer), pieces_word(k.generation, step, 1));
      }
    }
    note(k, Stage::PassedOn);
    if (!__all_sync(~0u, good)) return;
  }
  if constexpr (!kPieces) {
    for (std::uint32_t i = lane; i < peers; i += 32)
      pass_on_rows(k, step, Op::Dispatch, Phase::DispatchRecv, k.order[i], load_piece(k.peers[k.c.rank] + k.heap.rows_at(k.c, set, k.order[i])).x);
    __syncwarp();
  }
  for (std::uint32_t i = lane; i < peers; i += 32) {
    if constexpr (kPieces)
      see_pieces_leave(k, a.pieces, step, Op::Combine, Phase::CombineSend, k.order[i]);
    else
      see_it_leave(k, step, Op::Combine, Phase::CombineSend, k.order[i]);
    see_it_leave(k, step, Op::Weights, Phase::Weights, k.order[i]);
  }
  if constexpr (kPieces) pass_on_later_pieces(a, step);
}

// Where this lane's choice of a row goes, as far as the rest of the row says. place: of the route, if the choice is here. False: it is not one
// that the source may send.
__device__ inline bool find_place(const DispatchArguments& a, bool here, std::uint32_t place, const Experts& e, ArrivedRow& r) {
  const Common& k = a.common;
  const bool compact = k.c.layout == LayoutKind::Compact;
  r.expert = route_expert(place);
  r.place = compact && r.at < k.c.max_rows ? r.at : kNone;
  bool good = r.choices != 0 && (!here || r.expert < k.experts);
  if (good && here && !compact) {
    const std::uint32_t begin = e.at(r.source, r.expert), end = e.at(r.source + 1, r.expert), at = begin + route_index(place);
    good = at - begin < end - begin;
    const bool fits = k.c.layout == LayoutKind::Padded ? at - r.expert * k.c.max_per_expert < k.c.max_per_expert : at < k.c.max_rows;
    if (good && fits) r.place = at;
  }
  return good;
}

// False: the row is not one that this peer may send. `piece`: of the route, this lane's choice.
__device__ inline bool read_route(const DispatchArguments& a, std::uint32_t step, const uint4& piece, const Experts& e, ArrivedRow& r) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  const bool here = lane < k.c.top_k && piece.x != kNowhere;
  r.token = __shfl_sync(~0u, piece.z, 0);
  r.choices = __ballot_sync(~0u, here);
  r.weight = __uint_as_float(piece.y);
  if (__all_sync(~0u, find_place(a, here, piece.x, e, r))) return true;
  if (lane == 0) fail(k, {AbortReason::Protocol, Phase::DispatchRecv, k.c.rank, r.source, step}, r.at, r.choices);
  return false;
}

// The lanes whose places get a copy of the row.
__device__ inline std::uint32_t copies_of(const Common& k, const ArrivedRow& r) {
  return k.c.layout == LayoutKind::Compact ? (r.place != kNone ? 1u : 0u) : __ballot_sync(~0u, r.place != kNone);
}

// Places everything that goes with a row, except its payload. lane: among those of the row.
__device__ inline void place_words(const DispatchArguments& a, const ArrivedRow& r, std::uint32_t lane = threadIdx.x % 32) {
  const Common& k = a.common;
  const std::uint64_t at = r.at;
  const bool here = (r.choices >> lane & 1) != 0, compact = k.c.layout == LayoutKind::Compact;
  if (lane == 0) a.received.choices[at] = r.choices;
  if (compact && lane == 0) a.received.place[at] = r.place;
  if (!compact && here) {
    const std::uint64_t entry = at * k.c.top_k + __popc(r.choices & ((1u << lane) - 1));
    a.received.place[entry] = r.place;
    a.received.weight[entry] = r.weight;
  }
  if (r.place == kNone) return;
  if (compact && lane < k.c.top_k) {
    a.out.topk_ids[at * k.c.top_k + lane] = here ? static_cast<std::int32_t>(r.expert) : -1;
    a.out.topk_weights[at * k.c.top_k + lane] = here ? r.weight : 0.0f;
  }
  if (compact ? lane != 0 : !here) return;
  if (!compact) a.out.weights[r.place] = r.weight;
  a.out.src_rank[r.place] = static_cast<std::int32_t>(r.source);
  a.out.src_token[r.place] = static_cast<std::int32_t>(r.token);
}

__device__ inline char* scale_place(const DispatchArguments& a, std::uint32_t place, std::uint32_t expert) {
  const bool padded = a.common.c.layout == LayoutKind::Padded;
  const std::uint32_t group = padded ? expert : 0;
  return a.out.scales + group * a.out.scale.group + std::uint64_t{place - group * a.common.c.max_per_expert} * a.out.scale.row;
}

// The words of scales [first, first + 4), of the scales that begin at `to`, anywhere: by column, or in rows of any length.
static __device__ __noinline__ void store_scale_words(const DispatchArguments& a, char* to, std::uint32_t first, uint4 words) {
  const Common& k = a.common;
  const std::uint32_t each = scale_bytes_each(k.c.wire), scales = scales_per_row(k.c);
#pragma unroll 1
  for (std::uint32_t i = 0; i < 16; i += each) {
    const std::uint32_t j = 4 * first / each + i / each, pair = i < 8 ? i : i - 8;
    const std::uint64_t half = i < 8 ? words.x | std::uint64_t{words.y} << 32 : words.z | std::uint64_t{words.w} << 32;
    if (j >= scales) return;
    char* place = to + j * a.out.scale.scale;
    if (each == 4)
      *reinterpret_cast<std::uint32_t*>(place) = static_cast<std::uint32_t>(half >> 8 * pair);
    else
      *place = static_cast<char>(half >> 8 * pair);
  }
}

// `piece`: this lane's four words of scales, of which it has the nth. to: where the row's scales begin.
__device__ inline void place_scale(const DispatchArguments& a, char* to, const uint4& piece, std::uint32_t nth) {
  const Common& k = a.common;
  if (nth >= k.scale_pieces) return;
  if (k.scales_in_pieces)
    store16(to + 16 * nth, piece);
  else
    store_scale_words(a, to, 4 * nth, piece);
}

// A warp's part of a row: pieces of payload, of the route, and with the last part of scales. They are loaded before anybody knows where
// they go.
struct ArrivedPart {
  static constexpr std::uint32_t kVectors = kPartBytes / 512;
  static constexpr std::uint32_t kScale = kVectors, kRoute = kVectors + 1;  // bits
  const char* row;
  std::uint32_t begin, end;  // of payload; begin: this lane's
  bool full;  // every lane has all vectors
  uint4 payload[kVectors], scale, route;
  std::uint32_t wanted = 0, missing = 0;  // a bit each

  __device__ ArrivedPart(const Common& k, const char* row, std::uint32_t part) : row(row) {
    const std::uint32_t lane = threadIdx.x % 32;
    begin = part * k.part_bytes + lane * 16;
    end = min(k.payload_bytes, (part + 1) * k.part_bytes);
    full = part * k.part_bytes + kPartBytes <= end && k.payload_bytes % 16 == 0;
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if (begin + j * 512 < end) wanted |= 1u << j;
    if (part == k.parts - 1 && lane < k.scale_pieces) wanted |= 1u << kScale;
    if (lane < k.c.top_k) wanted |= 1u << kRoute;
    missing = wanted;
  }
  __device__ const char* scale_at(const Common& k) const { return row + k.dispatch.scales_at + threadIdx.x % 32 * 16; }
  // Those of `bits`.
  __device__ void load(const Common& k, std::uint32_t bits) {
    if (full && bits == wanted) {
#pragma unroll
      for (std::uint32_t j = 0; j < kVectors; ++j) payload[j] = load_piece(row + begin + j * 512);
    } else {
#pragma unroll
      for (std::uint32_t j = 0; j < kVectors; ++j)
        if ((bits >> j & 1) != 0) payload[j] = load_piece(row + begin + j * 512);
    }
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
    const std::uint32_t bits = looked_at(missing, all);
    load(k, bits);
    note_come(k, step, bits);
    return (missing & bits) == 0;
  }
  __device__ void make_places_blank(const Common& k) const {
    char* to = const_cast<char*>(row) + begin;
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if (full || (wanted >> j & 1) != 0) make_blank(to + j * 512);
    if ((wanted >> kScale & 1) != 0) make_blank(const_cast<char*>(scale_at(k)));
  }
  // To a row of the output.
  __device__ void place(const Common& k, char* out) const {
    out += begin;
    if (full) {
#pragma unroll
      for (std::uint32_t j = 0; j < kVectors; ++j) store16(out + j * 512, payload[j]);
      return;
    }
#pragma unroll
    for (std::uint32_t j = 0; j < kVectors; ++j)
      if ((wanted >> j & 1) != 0) {
        if (k.payload_bytes % 16 == 0)
          store16(out + j * 512, payload[j]);
        else
          store_words(out + j * 512, payload[j], min(16u, k.payload_bytes - begin - j * 512));
      }
  }
};

// To every place of the row: each lane finds out where its choice's copy goes.
__device__ inline void place_copies(const DispatchArguments& a, const ArrivedRow& r, const ArrivedPart& part, bool with_scales) {
  const Common& k = a.common;
  char *row = nullptr, *scales = nullptr;
  if (r.place != kNone) {
    row = a.out.x + std::uint64_t{r.place} * k.payload_bytes;
    if (with_scales) scales = scale_place(a, r.place, r.expert);
  }
#pragma unroll 1
  for (std::uint32_t copies = copies_of(k, r); copies != 0; copies &= copies - 1) {
    const int of = __ffs(static_cast<int>(copies)) - 1;
    part.place(k, of_lane(row, of));
    if (!with_scales) continue;
    char* const to = of_lane(scales, of);
    place_scale(a, to, part.scale, threadIdx.x % 32);
#pragma unroll 1
    for (std::uint32_t nth = 32 + threadIdx.x % 32; nth < k.scale_pieces; nth += 32)  // more than a warp has lanes
      place_scale(a, to, load_arrived(part.row + k.dispatch.scales_at + 16 * nth), nth);
  }
}

// Ragged(zero_pad=True): a warp clears the rows between this expert's last and the next one's first.
template <bool kHooks>
__device__ inline void zero_padding(const DispatchArguments& a, const Experts& e, std::uint32_t expert, std::uint32_t needed) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, bytes = k.payload_bytes;
  const std::uint32_t end = expert + 1 < k.experts ? e.at(0, expert + 1) : needed;
  for (std::uint32_t place = e.at(k.c.world, expert); place < min(end, k.c.max_rows); ++place) {
    for (std::uint32_t at = lane * 16; at < bytes; at += 512)
      store_words(a.out.x + std::uint64_t{place} * bytes + at, make_uint4(0, 0, 0, 0), min(16u, bytes - at));
    for (std::uint32_t j = 4 * lane; quantised(k.c.wire) && j < scale_words(k.c); j += 4 * 32)
      store_scale_words(a, scale_place(a, place, 0), j, make_uint4(0, 0, 0, 0));
    if (lane == 0) {
      a.out.weights[place] = 0.0f;
      a.out.src_rank[place] = a.out.src_token[place] = -1;
    }
  }
  if (kHooks) count_cleared(a, e.at(k.c.world, expert), min(end, k.c.max_rows));
}

// How many rows of the output that somebody writes lie in the block of a hook's word.
__device__ inline std::uint32_t rows_of_hook(const DispatchArguments& a, const ReceiveShared& s, const Experts& e, std::uint32_t word) {
  const Common& k = a.common;
  if (k.c.layout == LayoutKind::Padded) return min(e.at(k.c.world, word) - e.at(0, word), k.c.max_per_expert);
  const std::uint32_t begin = word * kHookRows, end = min(begin + kHookRows, k.c.max_rows);
  const auto overlap = [&](std::uint32_t from, std::uint32_t to) { return max(min(to, end), begin) - min(max(from, begin), end); };
  if (k.c.layout == LayoutKind::Compact) return overlap(0, s.rows_begin[k.c.world]);
  if (k.c.zero_pad) return overlap(0, s.ragged_rows);
  std::uint32_t first = 0, last = k.experts;  // the first expert that ends behind the block's beginning
  while (first < last) {
    const std::uint32_t middle = (first + last) / 2;
    if (e.at(k.c.world, middle) > begin)
      last = middle;
    else
      first = middle + 1;
  }
  std::uint32_t rows = 0;
  for (; first < k.experts && e.at(0, first) < end; ++first) rows += overlap(e.at(0, first), e.at(k.c.world, first));
  return rows;
}

// After a failure: what the caller launches next must not run on what memory happened to hold. By one warp.
__device__ inline void nothing_received(const DispatchArguments& a) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t e = lane; e <= k.experts; e += 32) {
    if (e < k.experts) a.out.counts[e] = 0;
    if (a.out.offsets != nullptr) a.out.offsets[e] = 0;
  }
  for (std::uint32_t r = lane; r <= k.c.world; r += 32) a.received.rows_begin[r] = 0;
  if (lane == 0) *a.received.many = 0;
  if (lane == 0) *a.received.overflowed = 0;
  if (lane == 0 && a.out.num_rows != nullptr) *a.out.num_rows = 0;
}

// A warp's part: how many rows there are. The others know it from then on.
__device__ inline void count_rows(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s) {
  const bool good = read_rows(a.common, step, s);
  if (good) place_sources(a, reports_counts(), s);
  if (threadIdx.x % 32 == 0) s.good = good;
  s.rows_known.open();
}

// Another warp's: from counts to places. The others know from then on where rows go.
template <bool kPlain, bool kHooks>
__device__ inline void place_rows(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, const Experts& e) {
  const Common& k = a.common;
  const bool reports = reports_counts();
  bool good = read_choices(k, step, reports, s, e);
  note(k, Stage::CountsThere);
  const bool too_many_of_one = good && place_experts(a, reports, s, e);
  if (threadIdx.x % 32 == 0) s.placed_all = good;
  s.placed.open();
  __syncwarp();
  note(k, Stage::ExpertsPlaced);
  if (!reports) return;
  s.rows_known.wait();
  good = good && s.good;
  if (!good) {
    nothing_received(a);
    return;
  }
  if (threadIdx.x % 32 == 0) report_totals(a, s, too_many_of_one);
  if (kHooks) raise_planned(a, [&](std::uint32_t word) { return rows_of_hook(a, s, e, word); });
  check_counts(k, step, s);
  if (!kPlain && k.slice.of > 1) check_replicas(k, step);
}

// Waits for a part of a row. False: it will not come.
template <bool kPlain>
__device__ inline bool fetch_part(const Common& k, std::uint32_t step, std::uint32_t source, std::uint32_t row, bool shows, ArrivedPart& part) {
  if (!shows) {
    bool good = true;
    if (threadIdx.x % 32 == 0)
      good = !kPlain && is_remote(k, source)
                 ? row_was_passed_on(k, step, Op::Dispatch, Phase::DispatchRecv, source, row)
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

// A part of a row. False: something failed.
template <bool kPlain, bool kHooks>
__device__ inline bool receive_part(const DispatchArguments& a, std::uint32_t step, std::uint32_t unit, ReceiveShared& s,
                                    const Experts& e) {
  const Common& k = a.common;
  ArrivedRow r;
  r.at = k.by_parts.divide(unit);
  const std::uint32_t nth = unit - r.at * k.parts;
  r.source = 0;
  while (s.rows_begin[r.source + 1] <= r.at) ++r.source;
  const std::uint32_t number = r.at - s.rows_begin[r.source];
  ArrivedPart part(k, own_slot(k, set_of(k.c, step), Op::Dispatch, r.source) + k.dispatch.row_at(number), nth);
  const bool mapped = kPlain || !is_remote(k, r.source), shows = mapped && number < s.showing[r.source];
  if (!fetch_part<kPlain>(k, step, r.source, number, shows, part)) return false;
  note(k, Stage::RowThere);
  s.placed.wait();
  if (!s.placed_all || !read_route(a, step, part.route, e, r)) return false;
  place_copies(a, r, part, quantised(k.c.wire) && nth == k.parts - 1);
  if (nth == 0) place_words(a, r);
  if (kHooks) count_placed(a, r.place, a.hooks.part_units);
  if (mapped && number < k.showing_rows) part.make_places_blank(k);
  note(k, Stage::RowPlaced);
  return true;
}

// In a step of many tokens: n rows of a source that has few, from row `first` of all sources on.
template <bool kHooks>
static __device__ __noinline__ bool receive_showing(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, const Experts e, std::uint32_t first,
                                                    std::uint32_t n) {
  const std::uint32_t begin = first * a.common.parts;
  for (std::uint32_t unit = begin; unit < begin + n * a.common.parts; ++unit)
    if (!receive_part<true, kHooks>(a, step, unit, s, e)) return false;
  return true;
}

// For any warp of the block, once it has nothing to send.
template <bool kPlain, bool kHooks>
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
      if (!receive_part<kPlain, kHooks>(a, step, unit, s, e)) return;
    } else if (unit < rows + padding) {
      s.placed.wait();
      if (!s.placed_all) return;
      zero_padding<kHooks>(a, e, unit - rows, s.ragged_rows);
    } else {
      return;
    }
  }
}

}  // namespace pplx::cuda
