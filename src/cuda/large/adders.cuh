// Rows that one warp of a thread block, a dealer, looks up and asks for, and that others, the adders, take out of shared memory together, each
// its part: a ring of places that rows, or parts of long ones, come to.
#pragma once

#include "../decode/combine_send.cuh"
#include "ring.cuh"
#include "tuning.h"

namespace pplx::cuda {

// The end of a run of rows to send: its source is told.
struct RunEnd {
  std::uint16_t round = 0;
  std::uint8_t source = 0, rows = 0;  // rows: 0 if no run ends
};

// A row, or a part of one, on its way to shared memory. Those of a sum come after each other.
struct DealtRow {
  char* row = nullptr;  // this part, where its place is made blank
  char* to = nullptr;  // rows to send: where the sum goes that it is an input of
  std::uint32_t token = 0;  // one of this rank's
  std::uint32_t at = 0;  // where in the row
  float weight = 1.0f;
  std::uint8_t own = 0, peers = 0;  // rows of the sum: own ones, and what peers have sent
  std::uint8_t before = 0;  // those of peers that come before the sum of own ones
  std::uint8_t what = 0;
  RunEnd run;  // the run that ends with this part
};
inline constexpr std::uint8_t kHasOwn = 1;  // also where none of them has a place
inline constexpr std::uint8_t kMakeBlank = 2;  // a later step of few tokens has a row here that shows by itself
inline constexpr std::uint8_t kRowsShow = 4;  // the row that is sent shows by itself that it has come
inline constexpr std::uint8_t kNoMore = 8;
inline constexpr std::uint8_t kEndsNode = 16;  // the last row of a node
inline constexpr std::uint8_t kCodes = 32;  // the row came as codes, with scales behind those of a whole part
inline constexpr std::uint8_t kLeavesAsIs = 64;  // a row to send that is no sum: adders leave it where it came to

// Bytes of the codes and of the scales of these numbers: copies are of whole vectors.
constexpr std::uint32_t bytes_of_codes(std::uint32_t numbers) { return ceil_div(numbers, 16) * 16; }
constexpr std::uint32_t bytes_of_scales(std::uint32_t numbers) { return ceil_div(numbers, 4 * scale_block(Wire::FP8)) * 16; }

inline constexpr std::uint32_t kMostDealtRows = 16;
inline constexpr std::uint32_t kDealtPart = kAdders * kVectorsOfAdder * 512;

// Warps that add up together, and the vectors of a part that each lane of them has.
template <std::uint32_t warps, int vectors>
struct AddersOf {
  static constexpr std::uint32_t kWarps = warps;
  static constexpr int kVectors = vectors;
  static_assert(warps * vectors * 512 == kDealtPart, "all together a part");
};

struct DealtRows {
  std::uint64_t loaded[kMostDealtRows], used[kMostDealtRows];  // turns
  DealtRow rows[kMostDealtRows];

  // Initialises the ring, by one warp, before the first `__syncthreads`. `adders`: consumer warps.
  __device__ void init(std::uint32_t adders) {
    const std::uint32_t lane = threadIdx.x % 32;
    if (lane < kMostDealtRows) mbarrier_init(loaded + lane, 1);
    if (lane < kMostDealtRows) mbarrier_init(used + lane, adders);
    fence_mbarriers();
  }
};

// Where a ring's rows come to.
struct RingMemory {
  char* memory;
  std::uint32_t parts;  // its room, in parts of kDealtPart

  // Those of `part` bytes.
  __device__ std::uint32_t places(std::uint32_t part) const { return min(parts * kDealtPart / part, kMostDealtRows); }
};

// The common part of dealers: a warp with a choice of a token, or of a row, in each lane, those of some after each other.
class RowDealer {
 public:
  __device__ RowDealer(const CombineArguments& a, std::uint32_t step, CombineShared& s, DealtRows& ring, const RingMemory& memory)
      : a_(a), k_(a.common), step_(step), s_(s), ring_(ring), memory_(memory.memory), part_(min(k_.row_bytes, kDealtPart)),
        place_(memory.places(part_)), last_(place_) {}

 protected:
  __device__ std::uint32_t lane() const { return threadIdx.x % 32; }
  __device__ std::uint32_t choice() const { return lane() & ((1u << k_.group_shift) - 1); }
  __device__ std::uint32_t together() const { return 32u >> k_.group_shift; }
  // The lanes of the nth that are looked up together.
  __device__ std::uint32_t lanes_of(std::uint32_t nth) const { return (~0u >> (32 - (1u << k_.group_shift))) << (nth << k_.group_shift); }

  // kNone in place of a place that the caller's rows do not have.
  __device__ std::uint32_t checked(std::uint32_t place) const {
    if (place == kNone || place < a_.expert_rows) return place;
    k_.report->notices.short_output = 1;
    return kNone;
  }
  __device__ const char* expert_row(std::uint32_t place) const { return a_.expert_out + (place == kNone ? 0 : place) * a_.expert_stride; }

  __device__ void tell(std::uint32_t token, std::uint8_t what) {
    DealtRow dealt;
    dealt.token = token;
    dealt.what = what;
    add(0, dealt, nullptr, 0);
  }

  // The lane `by` puts what it has into the next place of the ring.
  __device__ void add(std::uint32_t by, const DealtRow& dealt, const char* from, std::uint32_t bytes) {
    add(by, dealt, [&](char* place, std::uint64_t* loaded) {
      if (bytes == 0) return mbarrier_arrive(loaded);
      mbarrier_expect(loaded, bytes);
      bulk_load(place, from, bytes, loaded);
    });
  }
  // load(place, loaded): asks for it.
  template <typename Load>
  __device__ void add(std::uint32_t by, const DealtRow& dealt, const Load& load) {
    fuzz_delay(k_, std::uint64_t{step_} << 32 | dealt.token);
    if (lane() == by) {
      if (place_.turn != 0) await_turn(ring_.used + place_.at, place_.turn - 1);
      ring_.rows[place_.at] = dealt;
      load(memory_ + place_.at * part_, ring_.loaded + place_.at);
    }
    __syncwarp();
    last_ = place_;
    place_.next();
  }

  const CombineArguments& a_;
  const Common& k_;
  const std::uint32_t step_;
  CombineShared& s_;
  DealtRows& ring_;
  char* const memory_;
  const std::uint32_t part_;  // bytes of a place
  Ring place_, last_;  // the next one; the one that was filled last
};

// The common part of adders: number `number` of them, a warp.
template <typename Adders>
class RowAdder {
 protected:
  static constexpr int kVectors = Adders::kVectors;
  static constexpr std::uint32_t kApart = Adders::kWarps * 512;  // bytes from one of a lane's vectors to the next

 public:
  __device__ RowAdder(const CombineArguments& a, std::uint32_t step, DealtRows& ring, const RingMemory& memory, std::uint32_t number)
      : a_(a), k_(a.common), step_(step), ring_(ring), memory_(memory.memory), number_(number), part_(min(k_.row_bytes, kDealtPart)),
        place_(memory.places(part_)) {}

 protected:
  __device__ std::uint32_t lane() const { return threadIdx.x % 32; }
  // This lane's vector j of a part begins here.
  __device__ std::uint32_t at(int j) const { return ((j * Adders::kWarps + number_) * 32 + lane()) * 16; }

  __device__ const DealtRow& look() {
    await_turn(k_, Span::AwaitingInputs, ring_.loaded + place_.at, place_.turn);
    return ring_.rows[place_.at];
  }
  __device__ void leave() {
    mbarrier_arrive_of_warp(ring_.used + place_.at);
    place_.next();
  }

  // This lane's part of the next row, and its weight.
  __device__ float take(std::uint32_t bytes, uint4 (&v)[kVectors]) {
    const DealtRow& dealt = look();
    const char* const from = memory_ + place_.at * part_;
    const float weight = dealt.weight;
    if (bytes == kDealtPart) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) v[j] = *reinterpret_cast<const uint4*>(from + at(j));
    } else {
#pragma unroll
      for (int j = 0; j < kVectors; ++j) v[j] = at(j) < bytes ? *reinterpret_cast<const uint4*>(from + at(j)) : make_uint4(0, 0, 0, 0);
    }
    if ((dealt.what & kMakeBlank) != 0) {
#pragma unroll
      for (int j = 0; j < kVectors; ++j)
        if (at(j) < bytes) make_blank(dealt.row + at(j));
    }
    leave();
    return weight;
  }

  // This lane's vector j of a part that came as codes.
  template <typename T>
  __device__ uint4 decoded(const char* from, int j) const {
    constexpr std::uint32_t kNumbers = T::kPerVector, kApart = Adders::kWarps * 32 * kNumbers, kTogether = scale_block(Wire::FP8);
    const std::uint32_t first = (number_ * 32 + lane()) * kNumbers;
    const auto* const codes = reinterpret_cast<const std::uint32_t*>(from + first) + j * (kApart / 4);
    const auto* const scales = reinterpret_cast<const float*>(from + bytes_of_codes(part_ * kNumbers / 16)) + first / kTogether;
    return numbers_of<T>([&](std::uint32_t i) { return codes[i]; }, scales[j * (kApart / kTogether)]);
  }

  // Adds the next row, which may have come as codes, a vector at a time: the caller has no registers for all of it.
  template <typename T>
  __device__ void add_next(std::uint32_t bytes, Sums<T, kVectors>& sums) {
    const DealtRow& dealt = look();
    const SpanTimer adds(k_, Span::AddingUp);
    const char* const from = memory_ + place_.at * part_;
    const bool coded = (dealt.what & kCodes) != 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      if (at(j) >= bytes) continue;
      sums.add_vector(j, coded ? decoded<T>(from, j) : *reinterpret_cast<const uint4*>(from + at(j)));
      if ((dealt.what & kMakeBlank) != 0) make_blank(dealt.row + at(j));
    }
    leave();
  }

  // The next n rows, with their weights.
  template <typename T>
  __device__ void add_rows(std::uint32_t n, std::uint32_t bytes, Sums<T, kVectors>& sums) {
    for (; n != 0; --n) {
      uint4 v[kVectors];
      const float weight = take(bytes, v);
      const SpanTimer adds(k_, Span::AddingUp);
      sums.add_row(v, weight);
    }
  }

  const CombineArguments& a_;
  const Common& k_;
  const std::uint32_t step_;
  DealtRows& ring_;
  const char* const memory_;
  const std::uint32_t number_;
  const std::uint32_t part_;  // bytes of a place
  Ring place_;
};

}  // namespace pplx::cuda
