// What combine() of many tokens adds up, in tiles that bulk copies bring to shared memory, and who tells peers of rows that have been stored.
#pragma once

#include "combine_send.cuh"
#include "many_plan.cuh"

namespace pplx::cuda {

inline constexpr std::uint32_t kSumTileBytes = strip_bytes(kVectorsOfTile);
inline constexpr std::uint32_t kCombinerBytes = (kSumTiles + kSumTilesOut) * kSumTileBytes;

// Tiles on their way to shared memory, in the order in which they were asked for. For a warp.
class ArrivingTiles {
 public:
  __device__ ArrivingTiles(char* memory, std::uint64_t* loaded) : memory_(memory), loaded_(loaded) {}

  __device__ bool full() const { return asked_ - used_ + given_ == kSumTiles; }
  // Any lane may know where from; all call.
  __device__ void ask(const char* from, std::uint32_t bytes) {
    if (threadIdx.x % 32 == 0) {
      std::uint64_t* const turns = loaded_ + asked_ % kSumTiles;
      turns_expect(turns, bytes);
      bulk_load(memory_ + asked_ % kSumTiles * kSumTileBytes, from, bytes, turns);
    }
    ++asked_;
  }
  // The next one, which has so many bytes.
  __device__ void take(std::uint32_t bytes, uint4 (&v)[kVectorsOfTile]) {
    take_back();
    await_turn(loaded_ + used_ % kSumTiles, used_ / kSumTiles);
    const char* const from = memory_ + used_ % kSumTiles * kSumTileBytes;
#pragma unroll
    for (int j = 0; j < kVectorsOfTile; ++j) {
      const std::uint32_t at = j * 512 + threadIdx.x % 32 * 16;
      v[j] = at < bytes ? *reinterpret_cast<const uint4*>(from + at) : make_uint4(0, 0, 0, 0);
    }
    __syncwarp();  // its place is asked for next
    ++used_;
  }
  // Of a warp that ends: what it has asked for must not come to memory that others have by then.
  __device__ void drop() {
    for (; used_ != asked_; ++used_) await_turn(loaded_ + used_ % kSumTiles, used_ / kSumTiles);
  }
  // The next one goes on as it is: a group of stores. A few are on their way at once.
  __device__ void give(char* to, std::uint32_t bytes) {
    await_turn(loaded_ + used_ % kSumTiles, used_ / kSumTiles);
    if (threadIdx.x % 32 == 0) {
      bulk_store(to, memory_ + used_ % kSumTiles * kSumTileBytes, bytes);
      bulk_end_group();
      bulk_await_stored<kMostGiven>();
    }
    __syncwarp();
    ++used_;
    given_ = min(given_ + 1, kMostGiven);
  }

 private:
  static constexpr std::uint32_t kMostGiven = kSumTilesOut - 1;

  __device__ void take_back() {
    if (given_ == 0) return;
    if (threadIdx.x % 32 == 0) bulk_await_stored<0>();
    __syncwarp();
    given_ = 0;
  }

  char* const memory_;
  std::uint64_t* const loaded_;
  std::uint32_t asked_ = 0, used_ = 0;
  std::uint32_t given_ = 0;  // of those that were used, the last ones, which may still be read
};

// What a warp adds up for a row: up to 32 rows of memory, a lane each. Their tiles are asked for in the order in which they are added.
struct Inputs {
  const char* from = nullptr;  // of this lane's
  float weight = 1.0f;
  std::uint32_t n = 0;  // the first lanes
  std::uint32_t next = 0, at = 0;  // to be asked for

  __device__ bool all_asked(std::uint32_t row_bytes) const { return n == 0 || at >= row_bytes; }
  __device__ void ask(ArrivingTiles& tiles, std::uint32_t row_bytes) {
    while (!all_asked(row_bytes) && !tiles.full()) {
      const auto of = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(from), static_cast<int>(next));
      tiles.ask(reinterpret_cast<const char*>(of) + at, min(kSumTileBytes, row_bytes - at));
      if (++next < n) continue;
      next = 0;
      at += kSumTileBytes;
    }
  }
};

// Rows of memory in place of a row's choices: those that it has, choices ascending. By a warp. places: checked.
__device__ inline Inputs inputs_of(const CombineArguments& a, const Places& places) {
  const std::uint32_t lane = threadIdx.x % 32, there = __ballot_sync(~0u, places.place != kNone);
  std::uint32_t bits = there;
  for (std::uint32_t i = 0; i < lane; ++i) bits &= bits - 1;
  const int of = bits == 0 ? 0 : __ffs(static_cast<int>(bits)) - 1;
  Inputs inputs;
  inputs.n = __popc(there);
  inputs.from = a.expert_out + __shfl_sync(~0u, places.place, of) * a.expert_stride;
  inputs.weight = __shfl_sync(~0u, places.weight, of);
  return inputs;
}

// Runs of rows that senders have stored and peers have yet to hear of. One warp of the thread block tells for all: a fence takes microseconds
// while stores are under way, and one does for whatever has been stored before it.
struct StoredRuns {
  std::uint64_t posted[kCombiners], taken[kCombiners];  // turns
  char* rows[kCombiners];  // null: the sender has ended
  std::uint32_t n[kCombiners];

  // By the first lane of each warp that may send, before the block meets for the first time.
  __device__ void begin(std::uint32_t sender) {
    turns_init(posted + sender, 1);
    turns_init(taken + sender, 1);
  }
  // By a sender's first lane, which has awaited the stores.
  __device__ void post(std::uint32_t sender, std::uint32_t before, char* its_rows, std::uint32_t its_n) {
    if (before != 0) await_turn(taken + sender, before - 1);
    rows[sender] = its_rows;
    n[sender] = its_n;
    turns_arrive(posted + sender);
  }
  // By one warp, until all of these have ended. A sender's runs are a lane's.
  __device__ void tell(const Common& k, std::uint32_t step, std::uint32_t senders) {
    const std::uint32_t lane = threadIdx.x % 32;
    bool ended = lane >= senders;
    for (std::uint32_t told = 0; !__all_sync(~0u, ended);) {
      const bool there = !ended && turn_is_over(posted + lane, told & 1);
      if (!__any_sync(~0u, there)) {
        __nanosleep(kBetweenPostsNs);
        continue;
      }
      fence_system();
      if (!there) continue;
      if (rows[lane] == nullptr) {
        ended = true;
        continue;
      }
      for (std::uint32_t i = 0; i < n[lane]; ++i) {
        linger(k, std::uint64_t{step} << 32 | i);
        store_relaxed(rows[lane] + std::uint64_t{i} * k.combine.row_bytes + k.combine.arrival_at, arrival_word(k.generation, step));
      }
      turns_arrive(taken + lane);
      ++told;
    }
    __syncwarp();
  }
};

}  // namespace pplx::cuda
