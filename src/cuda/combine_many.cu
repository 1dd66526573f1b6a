// combine() of many tokens inside a node: one launch, or one per half.
#include <algorithm>

#include "copied_rows.cuh"
#include "dealt_sends.cuh"
#include "dealt_sums.cuh"
#include "kernels.h"
#include "many_combine_kernel.cuh"

namespace pplx::cuda {
namespace {

template <typename T>
__device__ __forceinline__ void run_combine_many(const CombineArguments& a) {
  PPLX_LAUNCHED_SHARED(words);
  PPLX_SHARED(CombineManyShared, s);
  const Common& k = a.common;
  const std::uint64_t begun = k.stamps != nullptr ? nanoseconds() : 0;
  note(k, Stage::CombineBegins);
  Spends::begin();
  const std::uint32_t warp = threadIdx.x / 32;
  const bool combines = warp < kCombiners;
  if (combines && threadIdx.x % 32 == 0) s.turns[warp].init();
  std::uint32_t step = 0;
  if (!begin_combine(a, step, 0, s.combine)) return;
  if (a.recv) begin_to_close(k, step);
  if (combines) {
    ManyCombiner<T, false> combiner(a, step, s.combine, reinterpret_cast<char*>(words) + warp * kCombinerBytes, s.turns[warp]);
    const std::uint32_t senders = a.recv ? senders_of(gridDim.x, kSumTilesOut * kSumTileBytes, kSendingCombiners) : kCombiners;
    if (a.send && warp < senders) combiner.send(senders);
    if (a.recv) combiner.receive();
  } else {
    if (a.send) begin_to_send(a, step, s.combine);
    if (a.recv) receive_all_headers(a, step);
  }
  if (a.recv) close_set(k, step);
  note(k, Stage::CombineEnds);
  Spends::end(k);
  stamp(k, Op::Combine, step, begun);
}

// Warps of a plain one whose rows are only copied: those of copies, adders, and the dealer, who looks after headers, too.
inline constexpr std::uint32_t kLoader = kAdders, kStorer = kLoader + 1, kCopyTeller = kStorer + 1, kDealer = kCopyTeller + 1;
inline constexpr std::uint32_t kPlainThreads = 32 * (kDealer + 1);
inline constexpr std::uint32_t kPlainBytes = kCombinerBytes + kCopiesBytes + kDealtParts * kDealtPart;

struct CombinePlainShared {
  CombineShared combine;
  CombinerTurns turns;
  CopyRings copies;
  DealtRows dealt;
  std::uint32_t next;  // of this thread block's tokens
};

struct CombineFetchingShared : CombinePlainShared {
  char* rows_at[kMaxPeers];
};

// kFetches: rows of peers that offer theirs.
template <typename T, bool kFetches>
__device__ __forceinline__ void run_combine_plain(const CombineArguments& a) {
  using Shared = std::conditional_t<kFetches, CombineFetchingShared, CombinePlainShared>;
  PPLX_LAUNCHED_SHARED(words);
  PPLX_SHARED(Shared, s);
  const Common& k = a.common;
  const std::uint64_t begun = k.stamps != nullptr ? nanoseconds() : 0;
  note(k, Stage::CombineBegins);
  Spends::begin();
  const std::uint32_t warp = threadIdx.x / 32;
  if (threadIdx.x == 32 * kLoader) s.turns.init();
  if (threadIdx.x == 32 * kStorer) s.copies.init();
  if (threadIdx.x == 32 * kDealer) s.next = 0;
  if (warp == kDealer) s.dealt.init(kAdders);
  std::uint32_t step = 0;
  if (!begin_combine(a, step, 0, s.combine)) return;
  if (a.recv) begin_to_close(k, step);
  char* const memory = reinterpret_cast<char*>(words);
  char* const copies = memory + kCombinerBytes;
  const RingMemory dealt{copies + kCopiesBytes, kDealtParts};
  char** rows_at = nullptr;
  if constexpr (kFetches) rows_at = s.rows_at;
  if (warp < kAdders) {
    if (a.recv) SumAdder<T, AddersOf<kAdders, kVectorsOfAdder>>(a, step, s.dealt, dealt, warp).add_up();
  } else if (warp == kLoader) {
    if (a.send) CopyLoader<T>(a, step, s.combine, memory, s.turns, s.copies, copies).load();
  } else if (warp == kStorer) {
    if (a.send) CopyStorer(a, s.copies, copies).store();
  } else if (warp == kCopyTeller) {
    if (a.send) tell_of_copies(k, step, s.copies);
  } else if (warp == kDealer) {
    if (a.send) begin_to_send(a, step, s.combine);
    if (a.recv) SumDealer<kFetches>(a, step, s.combine, s.dealt, dealt, s.next, rows_at).deal();
    if (a.recv) receive_all_headers(a, step);
  }
  if (a.recv) close_set(k, step);
  note(k, Stage::CombineEnds);
  Spends::end(k);
  stamp(k, Op::Combine, step, begun);
}

// Warps of a plain one whose rows are sums: two teams of adders and a dealer, and the teller, who looks after what is to be sent of headers, too. One
// team sends, and then receives as the other one does from the start.
using TeamAdders = AddersOf<kAddersOfTeam, kVectorsOfTeam>;
inline constexpr std::uint32_t kSendDealer = 2 * kAddersOfTeam, kSumDealer = kSendDealer + 1, kTeller = kSumDealer + 1;
inline constexpr std::uint32_t kSumsThreads = 32 * (kTeller + 1);
// The team that sends meets there when it is done: rows that it receives come to memory that rows to send were in.
inline constexpr std::uint32_t kInSendingTeam = 1, kSendingTeam = 32 * (kAddersOfTeam + 1);
inline constexpr std::uint32_t kSumsBytes = 2 * kPartsOfTeam * kDealtPart + kOutBytes;

struct CombineSumsShared {
  CombineShared combine;
  DealtRows to_send, dealt[2];  // of the team that sends, to send; of each team
  PartsOut out;
  std::uint32_t next;  // of this thread block's tokens
};

template <typename T>
__device__ __forceinline__ void run_combine_sums(const CombineArguments& a) {
  PPLX_LAUNCHED_SHARED(words);
  PPLX_SHARED(CombineSumsShared, s);
  const Common& k = a.common;
  const std::uint64_t begun = k.stamps != nullptr ? nanoseconds() : 0;
  note(k, Stage::CombineBegins);
  Spends::begin();
  const std::uint32_t warp = threadIdx.x / 32;
  if (warp == kSendDealer) s.to_send.init(kAddersOfTeam);
  if (warp == kSendDealer) s.dealt[0].init(kAddersOfTeam);
  if (warp == kSumDealer) s.dealt[1].init(kAddersOfTeam);
  if (threadIdx.x == 32 * kTeller) s.out.init(kAddersOfTeam);
  if (threadIdx.x == 32 * kTeller) s.next = 0;
  std::uint32_t step = 0;
  if (!begin_combine(a, step, 0, s.combine)) return;
  if (a.recv) begin_to_close(k, step);
  const bool dealer = warp == kSendDealer || warp == kSumDealer;
  const std::uint32_t team = warp == kSumDealer || (warp >= kAddersOfTeam && !dealer) ? 1 : 0;
  // Each team has half of the ring's memory. In a launch that receives nothing the team that sends has both halves.
  char *const out = reinterpret_cast<char*>(words), *const in = out + kOutBytes;
  const RingMemory to_send{in, a.recv ? kPartsOfTeam : 2 * kPartsOfTeam}, dealt{in + team * kPartsOfTeam * kDealtPart, kPartsOfTeam};
  if (warp == kTeller) {
    if (a.send) begin_to_send(a, step, s.combine);
    if (a.send) SendTeller(a, step, s.out, out).tell_all();
  } else if (dealer) {
    if (a.send && team == 0) {
      s.combine.claimed.wait();
      SendDealer(a, step, s.combine, s.to_send, to_send).deal();
      barrier_sync<kInSendingTeam, kSendingTeam>();
    }
    if (a.recv) SumDealer<false>(a, step, s.combine, s.dealt[team], dealt, s.next).deal();
    if (a.recv && team == 1) receive_all_headers(a, step);
  } else {
    if (a.send && team == 0) {
      SendAdder<T, TeamAdders>(a, step, s.to_send, to_send, warp, s.out, out).add_up();
      barrier_sync<kInSendingTeam, kSendingTeam>();
    }
    if (a.recv) SumAdder<T, TeamAdders>(a, step, s.dealt[team], dealt, warp - team * kAddersOfTeam).add_up();
  }
  if (a.recv) close_set(k, step);
  note(k, Stage::CombineEnds);
  Spends::end(k);
  stamp(k, Op::Combine, step, begun);
}

// Warps of one whose rows are offered: teams of adders and a dealer, of which each receives from the start, and one more that offers, and sends what must
// be sent.
using FetchingAdders = AddersOf<kAddersOfFetchingTeam, kVectorsOfFetchingTeam>;
inline constexpr std::uint32_t kFetchingAdders = kFetchingTeams * kAddersOfFetchingTeam, kOfferer = kFetchingAdders + kFetchingTeams;
inline constexpr std::uint32_t kFetchedThreads = 32 * (kOfferer + 1);
inline constexpr std::uint32_t kFetchedBytes = kCombinerBytes + kFetchingTeams * kPartsOfFetchingTeam * kDealtPart;

struct CombineFetchedShared {
  CombineShared combine;
  CombinerTurns turns;
  DealtRows dealt[kFetchingTeams];
  char* rows_at[kFetchingTeams][kMaxPeers];
  std::uint32_t next;  // of this thread block's tokens
};

template <typename T>
__device__ __forceinline__ void run_combine_fetched(const CombineArguments& a) {
  PPLX_LAUNCHED_SHARED(words);
  PPLX_SHARED(CombineFetchedShared, s);
  const Common& k = a.common;
  const std::uint64_t begun = k.stamps != nullptr ? nanoseconds() : 0;
  note(k, Stage::CombineBegins);
  Spends::begin();
  const std::uint32_t warp = threadIdx.x / 32;
  const bool dealer = warp >= kFetchingAdders && warp < kOfferer;
  const std::uint32_t team = dealer ? warp - kFetchingAdders : warp / kAddersOfFetchingTeam;
  if (dealer) s.dealt[team].init(kAddersOfFetchingTeam);
  if (threadIdx.x == 32 * kOfferer) s.turns.init();
  if (threadIdx.x == 32 * kOfferer) s.next = 0;
  std::uint32_t step = 0;
  if (!begin_combine(a, step, 0, s.combine)) return;
  if (a.recv) begin_to_close(k, step);
  char* const memory = reinterpret_cast<char*>(words);
  const RingMemory dealt{memory + kCombinerBytes + team * kPartsOfFetchingTeam * kDealtPart, kPartsOfFetchingTeam};
  if (warp == kOfferer) {
    if (a.send) {
      begin_to_offer(a, step, s.combine);
      ManyCombiner<T, true>(a, step, s.combine, memory, s.turns).send_rest();
    }
    if (a.recv) receive_all_headers(a, step);
  } else if (dealer) {
    if (a.recv) SumDealer<true>(a, step, s.combine, s.dealt[team], dealt, s.next, s.rows_at[team]).deal();
  } else {
    if (a.recv) SumAdder<T, FetchingAdders>(a, step, s.dealt[team], dealt, warp % kAddersOfFetchingTeam).add_up();
  }
  if (a.recv) close_set(k, step);
  note(k, Stage::CombineEnds);
  Spends::end(k);
  stamp(k, Op::Combine, step, begun);
}

template <typename T>
__global__ void __launch_bounds__(kCombineManyThreads, 1) combine_many_kernel(const __grid_constant__ CombineArguments a) {
  run_combine_many<T>(a);
}
template <typename T>
__global__ void __launch_bounds__(kPlainThreads, 1) combine_many_plain_kernel(const __grid_constant__ CombineArguments a) {
  run_combine_plain<T, false>(a);
}
template <typename T>
__global__ void __launch_bounds__(kPlainThreads, 1) combine_many_fetching_kernel(const __grid_constant__ CombineArguments a) {
  run_combine_plain<T, true>(a);
}
template <typename T>
__global__ void __launch_bounds__(kFetchedThreads, 1) combine_many_fetched_kernel(const __grid_constant__ CombineArguments a) {
  run_combine_fetched<T>(a);
}
template <typename T>
__global__ void __launch_bounds__(kSumsThreads, 1) combine_many_sums_kernel(const __grid_constant__ CombineArguments a) {
  run_combine_sums<T>(a);
}

using Kernel = void (*)(CombineArguments);

struct Launch {
  Kernel kernel;
  std::uint32_t threads, bytes;
};

// Fetches: rows of peers that offer theirs, and sends its own. Offers: fetches, and sends next to nothing.
enum class Way { Any, Copies, Fetches, Offers, Sums };

Way way_of(const CombineArguments& a) {
  if (!is_plain(a)) return Way::Any;
  if (a.fetches) return a.made_at != 0 || !a.send ? Way::Offers : Way::Fetches;
  return a.common.c.layout == LayoutKind::Compact ? Way::Copies : Way::Sums;
}

template <typename T>
Launch launch_of(Way way) {
  switch (way) {
    case Way::Copies:
      return {combine_many_plain_kernel<T>, kPlainThreads, kPlainBytes};
    case Way::Fetches:
      return {combine_many_fetching_kernel<T>, kPlainThreads, kPlainBytes};
    case Way::Offers:
      return {combine_many_fetched_kernel<T>, kFetchedThreads, kFetchedBytes};
    case Way::Sums:
      return {combine_many_sums_kernel<T>, kSumsThreads, kSumsBytes};
    case Way::Any:
      return {combine_many_kernel<T>, kCombineManyThreads, kCombineManyBytes};
  }
  return {};
}
Launch launch_of(Dtype dtype, Way way) {
  switch (dtype) {
    case Dtype::BFloat16:
      return launch_of<BFloat16>(way);
    case Dtype::Float16:
      return launch_of<Float16>(way);
    case Dtype::Float32:
      return launch_of<Float32>(way);
  }
  return {};
}

constexpr std::size_t kMostBytes = std::max({kCombineManyBytes + kBytesOfObject<CombineManyShared>, kPlainBytes + kBytesOfObject<CombineFetchingShared>,
                                             kFetchedBytes + kBytesOfObject<CombineFetchedShared>, kSumsBytes + kBytesOfObject<CombineSumsShared>});

cudaError_t load(const Launch& launch) {
  const void* const function = reinterpret_cast<const void*>(launch.kernel);
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, function);
  return error != cudaSuccess ? error : cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(launch.bytes));
}

}  // namespace

bool can_combine_many(const Config& c, std::uint32_t shared_bytes) {
  return (in_pieces(c) || (c.replicas == 1 && c.remote_peers == 0)) && kMostBytes <= shared_bytes;
}

cudaError_t load_combine_many(const Config& c) {
  cudaError_t error = load(launch_of(c.dtype, Way::Any));
  if (error == cudaSuccess) error = load(launch_of(c.dtype, c.layout == LayoutKind::Compact ? Way::Copies : Way::Sums));
  for (const Way way : {Way::Fetches, Way::Offers})
    if (error == cudaSuccess && c.lent != 0) error = load(launch_of(c.dtype, way));
  return error;
}

cudaError_t launch_combine_many(const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream) {
  void* parameters[] = {const_cast<CombineArguments*>(&arguments)};
  const Launch launch = launch_of(arguments.common.c.dtype, way_of(arguments));
  return cudaLaunchKernel(launch.kernel, dim3(blocks), dim3(launch.threads), parameters, launch.bytes, stream);
}

}  // namespace pplx::cuda
