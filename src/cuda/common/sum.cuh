// Adding up rows in fp32, in order.
#pragma once

#include "arrival.cuh"
#include "number.cuh"

namespace pplx::cuda {

// Sums of rows for some 16-byte vectors of each lane, in registers. Four rows are loaded at a time, and added in order.
template <typename T, int kVectors>
struct Sums {
  static constexpr int kBatch = 4;
  float sum[kVectors][T::kPerVector] = {};

  // Rows on their way.
  struct Batch {
    uint4 v[kBatch][kVectors];
    bool here[kBatch] = {};

    // pointer(i): of row i, null if it has none.
    template <typename Pointer>
    __device__ void load(std::uint32_t first, std::uint32_t n, std::uint32_t begin, std::uint32_t end, const Pointer& pointer) {
      const char* row[kBatch];  // all are known before the first is loaded
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        row[i] = pointer(first + i);
        here[i] = first + i < n && row[i] != nullptr;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
          if (here[i] && begin + j * 512 < end) v[i][j] = load_input(row[i] + begin + j * 512);
    }
  };

  // loaded: `rows` has the first of them.
  template <typename Pointer, typename Weight>
  __device__ void add(std::uint32_t n, std::uint32_t begin, std::uint32_t end, const Pointer& pointer, const Weight& weight,
                      Batch rows = {}, bool loaded = false) {
    for (std::uint32_t first = 0; first < n; first += kBatch, loaded = false) {
      if (!loaded) rows.load(first, n, begin, end, pointer);
#pragma unroll
      for (int i = 0; i < kBatch; ++i)
        if (rows.here[i]) add_row(rows.v[i], weight(first + i));
    }
  }

  // A weight of 1 changes nothing: the sum comes of an addition in any case.
  __device__ void add_row(const uint4 (&v)[kVectors], float weight = 1.0f) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) add_vector(j, v[j], weight);
  }
  __device__ void add_vector(int j, const uint4& v, float weight = 1.0f) {
    float f[T::kPerVector];
    T::unpack(v, f);
#pragma unroll
    for (int e = 0; e < T::kPerVector; ++e) sum[j][e] = __fadd_rn(sum[j][e], __fmul_rn(weight, f[e]));
  }

  __device__ void start(float value) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int e = 0; e < T::kPerVector; ++e) sum[j][e] = value;
  }

  // apart: bytes from one of a lane's vectors to the next.
  __device__ void load(const char* from, std::uint32_t begin, std::uint32_t end, std::uint32_t apart = 512) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (begin + j * apart < end) T::unpack(*reinterpret_cast<const uint4*>(from + begin + j * apart), sum[j]);
  }

  // Calls put(place, vec16) for each vector that there is.
  template <typename Put>
  __device__ void store(char* to, std::uint32_t begin, std::uint32_t end, const Put& put, std::uint32_t apart = 512) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
      if (begin + j * apart < end) put(to + begin + j * apart, T::pack(sum[j]));
  }
  __device__ void store(char* to, std::uint32_t begin, std::uint32_t end) const { store(to, begin, end, store16); }
  __device__ void send(char* to, std::uint32_t begin, std::uint32_t end) const { store(to, begin, end, store_vec16); }
  // To a replica. A token without rows leaves what it is accumulated on, numbers of the caller's.
  __device__ void give(char* to, std::uint32_t begin, std::uint32_t end) const { store(to, begin, end, store_numbers); }
};

}  // namespace pplx::cuda
