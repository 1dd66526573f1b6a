// The composite floor: what a dispatch or a combine reads and stores, and nothing else. A warp has eight 16-byte vectors a lane under
// way; a thread block's warps take its units as they come, and load the next one's addresses while they are at this one.
#include "cuda/common/number.cuh"
#include "cuda/common/rows.cuh"
#include "kernels.h"

namespace pplx::cuda {
namespace {

// Sums spill with 64 registers a thread; both have as much under way as 1024 threads with seven vectors each.
constexpr std::uint32_t kSpreadThreads = 1024, kGatherThreads = 896;
constexpr std::uint32_t kBulkWarps = 24;    // a part of a row each fills shared memory
constexpr std::uint32_t kChunkBytes = 512;  // sixteen bytes of each lane
constexpr int kVectors = 8;

struct Taken {
  std::uint32_t next;
};

struct Loads {
  std::uint64_t of_warp[kBulkWarps];
};

struct Unit {
  char* one;
  unsigned long long other;  // the address of this lane
  std::uint32_t packed;      // fewer registers while the next one waits

  __device__ std::uint32_t part() const { return packed & 0xffffu; }
  __device__ std::uint32_t n() const { return packed >> 16 & 0xffu; }
  __device__ std::uint32_t kind() const { return packed >> 24; }
};

// A block's nth; n is 0 behind the last one. Each round of all blocks begins one further on: kinds take turns in the list, and a block
// would have one kind alone.
__device__ inline Unit load_unit(const CompositeArguments& a, std::uint32_t nth) {
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint64_t at = std::uint64_t{nth} * gridDim.x + (blockIdx.x + nth) % gridDim.x;
  if (at >= a.count) return {};
  const uint4 v = load_input(reinterpret_cast<const char*>(a.units + at));
  Unit unit{reinterpret_cast<char*>(v.x | std::uint64_t{v.y} << 32), 0, v.z};
  if (lane < a.most) unit.other = a.others[at * a.most + lane];
  return unit;
}

template <std::uint32_t kThreads, typename Work>
__device__ inline void work_off(const CompositeArguments& a, const Work& work) {
  PPLX_SHARED(Taken, taken);
  if (threadIdx.x == 0) taken.next = kThreads / 32;
  __syncthreads();
  Unit unit = load_unit(a, threadIdx.x / 32);
#pragma unroll 1
  while (unit.n() != 0) {
    std::uint32_t nth = 0;
    if (threadIdx.x % 32 == 0) nth = atomicAdd(&taken.next, 1u);
    const Unit next = load_unit(a, __shfl_sync(~0u, nth, 0));
    work(unit);
    unit = next;
  }
}

__device__ inline char* other_of(const Unit& unit, std::uint32_t i) {
  return reinterpret_cast<char*>(__shfl_sync(~0u, unit.other, static_cast<int>(i)));
}

__device__ inline uint4 either(const uint4& a, const uint4& b) { return make_uint4(a.x ^ b.x, a.y ^ b.y, a.z ^ b.z, a.w ^ b.w); }

// One row to several places. kFold: sixteen bytes are made of kFold times sixteen, as a quantiser does.
template <int kFold, bool kArrived>
__device__ inline void spread(const CompositeRow& row, const Unit& unit) {
  constexpr int kChunks = kVectors / kFold;
  const std::uint32_t lane_at = threadIdx.x % 32 * 16;
  const std::uint32_t begin = unit.part() * row.part_bytes, end = min(row.bytes, begin + row.part_bytes);
  const std::uint32_t source_end = min(row.source_bytes, end * kFold);
#pragma unroll 1
  for (std::uint32_t at = begin; at < end; at += kChunks * kChunkBytes) {
    uint4 v[kChunks * kFold];
#pragma unroll
    for (int i = 0; i < kChunks * kFold; ++i) {
      const std::uint32_t from = min(at * kFold + i * kChunkBytes + lane_at, source_end - 16);
      v[i] = kArrived ? load_arrived(unit.one + from) : load_input(unit.one + from);
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
#pragma unroll
      for (int f = 1; f < kFold; ++f) v[j * kFold] = either(v[j * kFold], v[j * kFold + f]);
    }
#pragma unroll 1
    for (std::uint32_t i = 0; i < unit.n(); ++i) {
      char* to = other_of(unit, i) + at + lane_at;
#pragma unroll
      for (int j = 0; j < kChunks; ++j)
        if (at + j * kChunkBytes + lane_at < end) store16(to + j * kChunkBytes, v[j * kFold]);
    }
  }
}

template <typename T>
struct Sum {
  float of[T::kPerVector] = {};

  __device__ void add(const uint4& v) {
    float f[T::kPerVector];
    T::unpack(v, f);
#pragma unroll
    for (int e = 0; e < T::kPerVector; ++e) of[e] = __fadd_rn(of[e], f[e]);
  }
};

// The sum of n rows to one place: the registers limit the number of chunks that are added at once. (A template for each n spilled.)
template <typename T>
__device__ inline void gather(const CompositeRow& row, const Unit& unit) {
  const std::uint32_t lane_at = threadIdx.x % 32 * 16, chunks = max(1u, kVectors / unit.n());
  const std::uint32_t begin = unit.part() * row.part_bytes, end = min(row.bytes, begin + row.part_bytes);
#pragma unroll 1
  for (std::uint32_t at = begin; at < end; at += chunks * kChunkBytes) {
    Sum<T> sum;
#pragma unroll 1
    for (std::uint32_t first = 0; first < unit.n(); first += kVectors) {
      uint4 v[kVectors];
      const int slots = static_cast<int>(min(chunks * unit.n() - first, kVectors));
      std::uint32_t i = first, mine = at + lane_at;
#pragma unroll
      for (int slot = 0; slot < kVectors; ++slot) {
        if (slot >= slots) break;
        v[slot] = load_input(other_of(unit, i) + min(mine, end - 16));
        if (++i == unit.n()) i = 0, mine += kChunkBytes;
      }
      i = first, mine = at + lane_at;
#pragma unroll
      for (int slot = 0; slot < kVectors; ++slot) {
        if (slot >= slots) break;
        sum.add(v[slot]);
        if (++i != unit.n()) continue;
        if (mine < end) store16(unit.one + mine, T::pack(sum.of));
        sum = {};
        i = 0, mine += kChunkBytes;
      }
    }
  }
}

// Kind 0: tokens to where they go. Kind 1: what has come to its places.
template <int kFold>
__global__ void __launch_bounds__(kSpreadThreads, 1) spread_kernel(const __grid_constant__ CompositeArguments a) {
  work_off<kSpreadThreads>(a, [&](const Unit& unit) {
    if (unit.kind() == 0)
      spread<kFold, false>(a.rows[0], unit);
    else
      spread<1, true>(a.rows[1], unit);
  });
}

// Kind 0: expert rows to a source's row. Kind 1: what has come to its token.
template <typename T>
__global__ void __launch_bounds__(kGatherThreads, 1) gather_kernel(const __grid_constant__ CompositeArguments a) {
  work_off<kGatherThreads>(a, [&](const Unit& unit) {
    gather<T>(unit.kind() == 0 ? a.rows[0] : a.rows[1], unit);
  });
}

// One part of each warp is in shared memory: the next one is loaded there when the copy engine has read it.
__global__ void __launch_bounds__(kBulkWarps * 32, 1) bulk_kernel(const __grid_constant__ CompositeArguments a) {
  PPLX_LAUNCHED_SHARED(memory);
  PPLX_SHARED(Loads, loads);
  const std::uint32_t warp = threadIdx.x / 32;
  const bool first_lane = threadIdx.x % 32 == 0;
  char* const part = reinterpret_cast<char*>(memory) + warp * kMostCompositePart;
  std::uint64_t* const load = &loads.of_warp[warp];
  if (first_lane) {
    mbarrier_init(load, 1);
    fence_mbarriers();
  }
  std::uint32_t loaded = 0;
  work_off<kBulkWarps * 32>(a, [&](const Unit& unit) {
    const CompositeRow& row = a.rows[unit.kind()];
    const std::uint32_t begin = unit.part() * row.part_bytes, bytes = min(row.bytes - begin, row.part_bytes);
    if (first_lane) {
      bulk_await_read<0>();
      mbarrier_expect(load, bytes);
      bulk_load(part, unit.one + begin, bytes, load);
      while (!phase_wait(load, loaded % 2)) {
      }
      ++loaded;
    }
    for (std::uint32_t i = 0; i < unit.n(); ++i) {
      char* to = other_of(unit, i) + begin;
      if (first_lane) bulk_store(to, part, bytes);
    }
    if (first_lane) bulk_end_group();
  });
  bulk_await_stored<0>();
}

using Kernel = void (*)(const CompositeArguments);

cudaError_t launch(Kernel kernel, const CompositeArguments& arguments, std::uint32_t blocks, std::uint32_t threads,
                   cudaStream_t stream, std::uint32_t shared = 0) {
  void* parameters[] = {const_cast<CompositeArguments*>(&arguments)};
  return cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), parameters, shared, stream);
}

}  // namespace

cudaError_t launch_spread(const CompositeArguments& arguments, std::uint32_t fold, std::uint32_t blocks, cudaStream_t stream) {
  return launch(fold == 4 ? spread_kernel<4> : fold == 2 ? spread_kernel<2> : spread_kernel<1>, arguments, blocks, kSpreadThreads, stream);
}

cudaError_t launch_gather(const CompositeArguments& arguments, Dtype dtype, std::uint32_t blocks, cudaStream_t stream) {
  const Kernel kernel = dtype == Dtype::BFloat16  ? gather_kernel<BFloat16>
                        : dtype == Dtype::Float16 ? gather_kernel<Float16>
                                                  : gather_kernel<Float32>;
  return launch(kernel, arguments, blocks, kGatherThreads, stream);
}

cudaError_t launch_bulk(const CompositeArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  constexpr std::uint32_t shared = kBulkWarps * kMostCompositePart;
  const cudaError_t error = cudaFuncSetAttribute(bulk_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  return error != cudaSuccess ? error : launch(bulk_kernel, arguments, blocks, kBulkWarps * 32, stream, shared);
}

}  // namespace pplx::cuda
