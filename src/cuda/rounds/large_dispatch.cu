// dispatch() in pieces, whatever the number of tokens: one launch, or one per half. The receive half sends what the send half must wait for.
#include "../host/launch_table.h"
#include "large_recv.cuh"
#include "large_send.cuh"
#include "../remote/dispatch_extras.cuh"
#include "plan.cuh"

namespace pplx::cuda {
namespace {

inline constexpr std::uint32_t kWorkerBytes = kSenderBytes > kReceiverBytes ? kSenderBytes : kReceiverBytes;

struct RoundShared {
  RoundPlan plan;
  ReceiveShared receive;
  std::uint64_t loaded[kWorkers][kTilesIn > kRowsIn ? kTilesIn : kRowsIn];  // turns
  bool last;  // thread block to leave
};

constexpr std::uint32_t launched_bytes(const Config& c) { return LargeMemory(c).others + kWorkers * kWorkerBytes; }

// One warp more than inside a node: it passes on what the proxy says.
inline constexpr std::uint32_t kRoundsThreads = kManyThreads + 32;

static_assert(kWorkerBytes % kLine == 0, "each worker's memory begins at a line");
static_assert(kReceiverBytes + sizeof(RoundRows) <= kWorkerBytes, "a worker that receives has room for what it knows of a round");

// Returns what RoundSender::parities() does.
template <typename Mode>
__device__ inline std::uint32_t send_rounds(const DispatchArguments& a, RoundShared& s, char* memory, std::uint32_t* sums, char* planner_memory) {
  const std::uint32_t warp = threadIdx.x / 32, senders = sending_workers<Mode>(a);
  if (is_planner()) {
    if (a.pieces.begins) claim_set(a, s.plan);
    if (a.pieces.begins && !s.plan.taken) return 0;
    const SpanTimer plans(a.common, Span::Planning);
    RoundPlanner(a, s.plan, sums, planner_memory).plan();
    return 0;
  }
  if (!is_worker()) return 0;
  if (a.pieces.begins) s.plan.claimed.wait();
  if (a.pieces.begins && !s.plan.taken) return 0;
  const SpanTimer spends(a.common, Span::Counting);
  for (std::uint32_t c = warp * gridDim.x + blockIdx.x; a.ids != nullptr && c < a.chunks; c += kWorkers * gridDim.x)
    if (take_chunk(a, s.plan.step, c)) count_chunk(a, s.plan.step, c, memory, false);
  __syncwarp();
  fence_shared_copies();  // where chunks were counted, tiles come
  RoundSender<Mode> sender(a, s.plan, warp, senders, memory, s.loaded[warp]);
  if (warp < senders) sender.send();
  return sender.parities();
}

}  // namespace

namespace large_rounds {
namespace {

// kHooks: the caller's kernels hear of what has come.
template <typename Mode, bool kHooks>
__global__ void __launch_bounds__(kRoundsThreads, 1) dispatch(const __grid_constant__ DispatchArguments a) {
  PPLX_LAUNCHED_SHARED(words);
  PPLX_SHARED(RoundShared, s);
  const Common& k = a.common;
  const std::uint64_t begun = k.stamps != nullptr ? nanoseconds() : 0;
  mark_stage(k, Stage::DispatchBegins);
  SpanTimer::begin();
  const LargeMemory at(k.c);
  char* const launched = reinterpret_cast<char*>(words);
  const std::uint32_t warp = threadIdx.x / 32;
  char* const memory = launched + at.others + (is_worker() ? warp : 0) * kWorkerBytes;
  prepare(s, sending_workers<Mode>(a));
  if (threadIdx.x % 32 == 0 && is_worker())
    for (std::uint64_t& turns : s.loaded[warp]) mbarrier_init(&turns, 1);
  for (std::uint32_t i = threadIdx.x; a.send && i < chunk_columns(k.c); i += kRoundsThreads) words[i] = 0;
  const Experts experts{reinterpret_cast<std::uint32_t*>(launched + at.places), k.expert_vec16s};
  std::uint32_t step = 0, parities = 0;
  if (!a.pieces.begins && !find_open_step(a, step)) {
    if constexpr (kHooks) HookWords<kHooks>::raise_after_failure(a);
    return;
  }
  if (a.send) {
    if (is_planner()) begin_round_plan(a, s.plan, step);
    __syncthreads();
    step = s.plan.step;
    parities = send_rounds<Mode>(a, s, memory, words, launched + at.counts);
  }
  if (a.recv) {
    if (warp == kWorkers + 1) {
      count_rows(a, step, s.receive);
      hear_of_rounds(a, step, s.receive);
    }
    if (warp == kWorkers + 2) place_rows<true, kHooks>(a, step, s.receive, experts);
    if (warp == kWorkers + 3 && k.remote != 0) pass_on_dispatches<true>(a, step);
    if (is_worker())
      RoundReceiver<kHooks>(a, step, s.receive, experts, memory, s.loaded[warp], parities)
          .receive_rounds(*reinterpret_cast<RoundRows*>(memory + kReceiverBytes));
    if constexpr (kHooks) HookWords<kHooks>::raise_after_failure(a);
  }
  if (a.send) leave_plan(a, s.last);
  mark_stage(k, Stage::DispatchEnds);
  SpanTimer::end(k);
  stamp(k, Op::Dispatch, step, begun);
}

}  // namespace

Choice<DispatchArguments> choose(const Config& c, const DispatchCall& call) {
  return choose_mode(c, call, [&](auto mode) -> Choice<DispatchArguments> {
    using Mode = decltype(mode);
    return {"large_rounds::dispatch", call.hooks ? dispatch<Mode, true> : dispatch<Mode, false>, kRoundsThreads, launched_bytes(c)};
  });
}

}  // namespace large_rounds

bool can_dispatch_rounds(const Config& c, std::uint32_t shared_bytes) {
  return can_dispatch_large(c, shared_bytes) && row_end_bytes(dispatch_block(c), c.top_k) <= kMostRowEndBytes &&
         16 * ceil_div(c.hidden, 512) <= kMostScaleBytes && counting_bytes(c) <= kWorkerBytes && launched_bytes(c) + kBytesOfObject<RoundShared> <= shared_bytes;
}

}  // namespace pplx::cuda
