// The counts of a dispatch, before rows are placed. One warp finds out how many rows each source has sent. Another finds out how
// many choices each expert gets, and from those where each expert's rows begin. One thread block tells the caller.
#pragma once

#include "../common/counters.cuh"
#include "../common/step.cuh"

namespace pplx::cuda {

// Does what only the general kernel does, for peers of other nodes and for replicas: remote/dispatch_extras.cuh.
template <bool kMappedOnly>
struct DispatchExtras;
// Raises the words of hooks, in kernels that have them: extras/hooks.cuh.
template <bool kHooks>
struct HookWords;

struct ReceiveShared {
  Once rows_known;  // rows_begin
  Once placed;  // base, below
  std::uint32_t rows_begin[kMaxPeers + 1];
  std::uint32_t rows[kMaxPeers];
  std::uint32_t showing[kMaxPeers];  // how many of them, the first ones, show by themselves that they have come
  std::uint64_t many;  // see ReceivedView
  std::uint32_t choices[kMaxPeers];  // each source's choices here; only where they are checked
  std::uint32_t next;  // unit of this thread block
  bool good, placed_all;  // all counts came: of rows, and of choices
  std::uint32_t ragged_rows;  // that the output must have
};

// base[source][expert] becomes the output row of a source's first row of an expert, which ends at base[world]. In whole vec16s.
struct Experts {
  std::uint32_t* base;
  std::uint32_t vec16s;  // a source's
  __device__ std::uint32_t& at(std::uint32_t source, std::uint32_t expert) const {
    return base[source * vec16s * kNumbersOfVec16 + expert];
  }
  __device__ uint4& vec16(std::uint32_t i) const { return reinterpret_cast<uint4*>(base)[i]; }
};

// The thread block that tells the caller what has come: it is the least likely to have sent anything.
__device__ inline bool reports_counts() { return blockIdx.x == gridDim.x - 1; }

// Waits, by any warp, until it is known where rows go; false after a failure. Compact: a row's number says so at once.
__device__ inline bool await_places(const Common& k, ReceiveShared& s) {
  if (k.c.layout == LayoutKind::Compact) return true;
  s.placed.wait();
  return s.placed_all;
}

// Fails on counts that a source cannot mean. Rows are checked against the output's size one by one.
__device__ inline void check_counts(const Common& k, std::uint32_t step, const ReceiveShared& s) {
#pragma unroll 1
  for (std::uint32_t source = threadIdx.x % 32; source < k.c.world; source += 32) {
    const std::uint32_t rows = s.rows[source], choices = s.choices[source];
    if (choices < rows || choices > rows * k.c.top_k) blame(k, Phase::DispatchRecv, step, source, rows, choices);
  }
}

// A vec16 of counts: looked at first, waited for if it has not come. Those of the dead never come.
__device__ inline bool await_counts(const Common& k, std::uint32_t step, const char* place, std::uint32_t source, uint4& vec16) {
  if (is_tagged(k, vec16, step)) return true;
  if ((k.dead >> source & 1) == 0) return await_tagged(k, place, Phase::DispatchRecv, step, source, vec16);
  vec16 = make_uint4(0, 0, 0, 0);
  return true;
}

// Reads how many rows each source has sent.
__device__ inline bool read_rows(const Common& k, std::uint32_t step, ReceiveShared& s) {
  const std::uint32_t lane = threadIdx.x % 32;
  bool good = true;
  std::uint64_t many = 0;
#pragma unroll 1
  for (std::uint32_t first = 0; first < k.c.world; first += 32) {
    const std::uint32_t source = first + lane;
    uint4 vec16 = make_uint4(0, 0, 0, 0);
    if (source < k.c.world) {
      const char* place = k.peers[k.c.rank] + k.heap.rows_at(k.c, set_of(k.c, step), source);
      vec16 = load_vec16(place);
      good = await_counts(k, step, place, source, vec16) && good;
      s.rows[source] = vec16.x;
      s.showing[source] = vec16.y;
    }
    many |= std::uint64_t{__ballot_sync(~0u, vec16.z != 0)} << first;
    if (good && vec16.x > k.most_rows) good = blame(k, Phase::DispatchRecv, step, source, k.most_rows, vec16.x);
  }
  if (lane == 0) s.many = many;
  return all_of_warp(good);
}

// Reads how many choices each expert gets, as their vec16s come: two of a lane's are asked for at once, 256 experts in all.
__device__ inline bool read_choices(const Common& k, std::uint32_t step, bool sums, ReceiveShared& s, const Experts& e) {
  constexpr std::uint32_t kAtOnce = 2;
  const std::uint32_t all = k.c.world * e.vec16s;
  const char* counts = k.peers[k.c.rank] + k.heap.counts_at(k.c, set_of(k.c, step), 0);
  bool good = true;
#pragma unroll 1
  for (std::uint32_t first = threadIdx.x % 32; first < all; first += 32 * kAtOnce) {
    uint4 vec16[kAtOnce];
#pragma unroll
    for (std::uint32_t j = 0; j < kAtOnce; ++j)
      if (first + 32 * j < all) vec16[j] = load_vec16(counts + kVec16Bytes * (first + 32 * j));
#pragma unroll
    for (std::uint32_t j = 0; j < kAtOnce; ++j) {
      const std::uint32_t i = first + 32 * j;
      if (i >= all) continue;
      if (!is_tagged(k, vec16[j], step)) good = await_counts(k, step, counts + kVec16Bytes * i, i / e.vec16s, vec16[j]) && good;
      std::uint32_t n[kNumbersOfVec16];
      unpack_numbers({{vec16[j].x, vec16[j].y, vec16[j].z}}, n);
      e.vec16(i) = make_uint4(n[0], n[1], n[2], n[3]);
      // More than there can be is as good as any number that is too large.
      if (sums) atomicAdd(&s.choices[i / e.vec16s], min(n[0] + n[1] + n[2] + n[3], kMaxChoices + 1));
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

// Returns the room that a segment of `rows` rows takes.
__device__ inline std::uint32_t room_of(const Common& k, std::uint32_t rows) {
  return k.align_mask != kNone ? (rows + k.align_mask) & ~k.align_mask : ceil_div(rows, k.c.align) * k.c.align;
}

__device__ inline uint4 add(const uint4& a, const uint4& b) { return make_uint4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Tells the caller the counts and offsets of four experts.
__device__ inline void report_experts(const DispatchArguments& a, std::uint32_t first, const uint4& count, const uint4& start) {
  const std::uint32_t counts[] = {count.x, count.y, count.z, count.w}, starts[] = {start.x, start.y, start.z, start.w};
#pragma unroll
  for (std::uint32_t j = 0; j < kNumbersOfVec16; ++j) {
    if (first + j >= a.common.experts) continue;
    a.out.counts[first + j] = static_cast<std::int32_t>(counts[j]);
    if (a.totals != nullptr) atomicAdd(a.totals + first + j, static_cast<std::int32_t>(counts[j]));
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

// Turns counts into places: a lane has four experts after each other. True: an expert has more than Padded has room for.
__device__ inline bool place_experts(const DispatchArguments& a, bool reports, ReceiveShared& s, const Experts& e) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, room = k.c.max_per_expert;
  std::uint32_t offset = 0, largest = 0;
#pragma unroll 1
  for (std::uint32_t p = lane; p - lane < e.vec16s; p += 32) {
    const std::uint32_t first = p * kNumbersOfVec16;
    uint4 count = make_uint4(0, 0, 0, 0);
    if (p < e.vec16s)
#pragma unroll 2
      for (std::uint32_t r = 0; r < k.c.world; ++r) count = add(count, e.vec16(r * e.vec16s + p));
    const uint4 rooms = make_uint4(room_of(k, count.x), room_of(k, count.y), room_of(k, count.z), room_of(k, count.w));
    std::uint32_t all = 0;
    const std::uint32_t before = offset + sum_before(rooms.x + rooms.y + rooms.z + rooms.w, all);
    offset += all;
    if (p >= e.vec16s) continue;
    const std::uint32_t second = before + rooms.x, third = second + rooms.y;
    const uint4 start = make_uint4(before, second, third, third + rooms.z);
    const bool padded = k.c.layout == LayoutKind::Padded;
    uint4 at = padded ? make_uint4(first * room, (first + 1) * room, (first + 2) * room, (first + 3) * room) : start;
#pragma unroll 2
    for (std::uint32_t r = 0; r < k.c.world; ++r) {
      const uint4 n = e.vec16(r * e.vec16s + p);
      e.vec16(r * e.vec16s + p) = at;
      at = add(at, n);
    }
    e.vec16(k.c.world * e.vec16s + p) = at;
    largest = max(largest, max(max(count.x, count.y), max(count.z, count.w)));
    if (reports) report_experts(a, first, count, start);
  }
  if (lane == 0) s.ragged_rows = offset;
  return __any_sync(~0u, largest > room);
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

// Finds the step of a receive half. False: it is not open, for all threads of the block alike.
__device__ inline bool find_open_step(const DispatchArguments& a, std::uint32_t& step) {
  const std::uint64_t closed = load_closed(a.common);
  step = *a.received.step;
  const bool refused = is_not_open(a.common, step, closed);
  if (!__syncthreads_or(refused)) return true;
  if (refused) refuse(a.common, step, closed, Phase::DispatchRecv);
  if (threadIdx.x < 32 && reports_counts()) nothing_received(a);
  return false;
}

// Finds out how many rows there are, and tells the other warps: a warp's part.
__device__ inline void count_rows(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s) {
  const bool good = read_rows(a.common, step, s);
  if (good) place_sources(a, reports_counts(), s);
  if (threadIdx.x % 32 == 0) s.good = good;
  s.rows_known.set();
}

// Counts how long each source lets this rank wait: one warp that has the least to do.
[[maybe_unused]] static __device__ __noinline__ void count_waits(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s) {
  const Common& k = a.common;
  // The warp that passes on blocks of other nodes counts its own waits; relays' sources are waited for by all.
  const std::uint64_t begun = nanoseconds(), elsewhere = k.dead | (k.c.node_ranks == 0 ? k.remote : 0);
  std::uint64_t missing = (~0ull >> (kMaxPeers - k.c.world)) & ~elsewhere & (0x100000001ull << threadIdx.x % 32);
  for (bool known = false; __any_sync(~0u, missing != 0) && !known;) {
    known = __any_sync(~0u, s.rows_known.is_set());
    for (std::uint64_t left = missing; left != 0; left &= left - 1) {
      const std::uint64_t now = nanoseconds();
      const auto source = static_cast<std::uint32_t>(__ffsll(static_cast<long long>(left)) - 1);
      if (!is_tagged(k, load_vec16(k.peers[k.c.rank] + k.heap.rows_at(k.c, set_of(k.c, step), source)), step)) continue;
      missing &= ~(1ull << source);
      count_wait(k, Op::Dispatch, source, now - begun);
    }
  }
}

// Finds out where rows go, and tells the other warps: another warp's part.
template <bool kMappedOnly, bool kHooks>
__device__ inline void place_rows(const DispatchArguments& a, std::uint32_t step, ReceiveShared& s, const Experts& e) {
  const Common& k = a.common;
  const bool reports = reports_counts();
  bool good = read_choices(k, step, reports, s, e);
  mark_stage(k, step, Stage::CountsThere);
  const bool too_many_of_one = good && place_experts(a, reports, s, e);
  if (threadIdx.x % 32 == 0) s.placed_all = good;
  s.placed.set();
  __syncwarp();
  mark_stage(k, step, Stage::ExpertsPlaced);
  if (!reports) return;
  s.rows_known.wait();
  good = good && s.good;
  if (!good) {
    nothing_received(a);
    return;
  }
  if (threadIdx.x % 32 == 0) report_totals(a, s, too_many_of_one);
  if constexpr (kHooks) HookWords<kHooks>::raise_planned(a, s, e);
  check_counts(k, step, s);
  if constexpr (!kMappedOnly)
    if (k.slice.of > 1) DispatchExtras<kMappedOnly>::check_replicas(k, step);
}

}  // namespace pplx::cuda
