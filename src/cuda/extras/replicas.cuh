// Rows of the output that replicas finish for each other. They travel as the rows of a combine do. A tail has an arrival word behind its
// row. The header, whose word is raised by itself, says what replicas must have in common.
//
// No deadlock: a rank sends all that it owes its replicas before it waits for theirs. Running thread blocks claim its own rows.
#pragma once

#include "../decode/combine_recv.cuh"
#include "../remote/proxy.cuh"

namespace pplx::cuda {

// The rank that has the nth slice of the tokens of this rank's group; n counts on past the last.
__device__ inline std::uint32_t member(const Common& k, std::uint32_t n) {
  unsigned long long ranks = k.replicas | 1ull << k.c.rank;
  for (n %= k.slice.of; n > 0; --n) ranks &= ranks - 1;
  return lowest_rank(ranks);
}

// The block into which `from` stores the rows that it finishes for `to`.
__device__ inline char* slice_block(const Common& k, std::uint32_t step, std::uint32_t to, std::uint32_t from) {
  return k.peers[to] + k.heap.slice_at(k.c, set_of(k.c, step), from);
}

// Claims a warp's next unit. The very last claim leaves the count as the set's next step must find it.
__device__ inline std::uint32_t claim_slice(const Common& k, std::uint32_t step, std::uint32_t units) {
  std::uint32_t* count = &k.control->slices[set_of(k.c, step)];
  return of_first_lane([&] {
    const std::uint32_t unit = atomicAdd(count, 1);
    if (unit == units + kCombineWarps * gridDim.x - 1) *count = 0;
    return unit;
  });
}

__device__ inline std::uint32_t slice_flags(const CombineArguments& a) { return a.accumulate ? kAccumulates : 0u; }

__device__ inline void send_slice_header(const CombineArguments& a, std::uint32_t step, std::uint32_t replica) {
  const Common& k = a.common;
  write_header(k, slice_block(k, step, replica, k.c.rank), step, a.own, slice_flags(a), threadIdx.x % 32);
  __syncwarp();
  if (threadIdx.x % 32 == 0) raise_at_peer(k, step, Signal::Slice, replica);
}

// `value`: the float of this lane's choice.
__device__ inline void give_tail(const Common& k, std::uint32_t step, std::uint32_t own, std::uint32_t value) {
  const std::uint32_t lane = threadIdx.x % 32;
  for (std::uint32_t i = 1; i < k.slice.of; ++i) {
    char* row = slice_block(k, step, member(k, k.slice.number + i), k.c.rank) + k.combine.row_at(own);
    if (lane < k.c.top_k) reinterpret_cast<std::uint32_t*>(row + k.combine.tail_at)[lane] = value;
    __syncwarp();
    if (lane == 0) publish(k, row + k.combine.arrival_at, arrival_word(k.generation, step));
  }
}

// Takes a strip of a token that a replica finishes, by a warp, in the order in which tokens have them. False: it will not come.
__device__ inline bool take_strip(const CombineArguments& a, std::uint32_t step, std::uint32_t unit) {
  const Common& k = a.common;
  const std::uint32_t lane = threadIdx.x % 32, others = k.slice.of - 1, strips = a.received_in.strips;
  const std::uint32_t nth = a.received_in.by_strips.divide(unit), strip = unit - nth * strips, row = nth / others;
  const std::uint32_t number = nth % others + (nth % others >= k.slice.number ? 1 : 0), replica = member(k, number);
  const std::uint64_t token = Slice{number, k.slice.of}.token(row);
  char* from = slice_block(k, step, k.c.rank, replica) + k.combine.row_at(row);
  const std::uint32_t bytes = a.received_in.bytes(), begin = strip * bytes + lane * 16;
  ArrivingStrips<kReceivedVectors> arriving(begin, min(k.row_bytes, (strip + 1) * bytes));
  if (!await_strips<true>(a, step, 0, 1, from, replica << 20, arriving)) return false;
#pragma unroll
  for (int j = 0; j < kReceivedVectors; ++j)
    if (arriving.has(j)) store16(a.y + token * a.y_stride + begin + j * 512, arriving.v[0][j]);
  arriving.make_places_blank();
  if (!a.has_tail || strip != strips - 1) return true;
  const bool good = lane != 0 || wait<Match::Exact>(k, from + k.combine.arrival_at, Phase::CombineRecv, step, replica);
  if (!all_of_warp(good)) return false;
  if (lane < k.c.top_k)
    a.tail_out[token * k.c.top_k + lane] = __ldcg(reinterpret_cast<const std::uint32_t*>(from + k.combine.tail_at) + lane);
  return true;
}

// number: of the replica's slice.
__device__ inline void receive_slice_header(const CombineArguments& a, std::uint32_t step, std::uint32_t number) {
  const Common& k = a.common;
  const std::uint32_t replica = member(k, number), flags = slice_flags(a);
  if (!wait<Match::Reached>(k, arrival(k, step, Signal::Slice, replica), Phase::CombineRecv, step, replica)) return;
  const BlockHeader h = load_header(slice_block(k, step, k.c.rank, replica));
  if (!check_header(k, h, Phase::CombineRecv, step, replica)) return;
  const std::uint32_t rows = Slice{number, k.slice.of}.tokens(a.tokens);
  if (h.flags != flags)
    blame(k, Phase::CombineRecv, step, replica, kFlags | flags, h.flags);
  else if (h.rows != rows)
    blame(k, Phase::CombineRecv, step, replica, rows, h.rows);
}

}  // namespace pplx::cuda
