#include "exchange.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "../cpu/atomic.h"
#include "error.h"

namespace pplx::cuda {
namespace {

// Long enough for kernels whose peers are alive, short enough for close() to return within 2 s.
constexpr double kCloseWait = 0.8;

// Generations whose graphs are known to be old. A call that allocates may wait for the device, so all are there from the start.
constexpr std::uint32_t kControls = 64;

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
  return capture != cudaStreamCaptureStatusNone;
}

// How a peer ended the step otherwise than this rank.
std::string difference_text(std::uint32_t mine, std::uint32_t theirs) {
  const std::uint32_t differ = mine ^ theirs;
  if ((differ & kReleased) != 0)
    return (theirs & kReleased) != 0 ? "a release() of a step that this rank combines"
                                     : "a combine of a step that this rank released";
  const std::string argument = (differ & kHasTail) != 0 ? "tail=" : (differ & kUsesWeights) != 0 ? "weights=" : "accumulate=";
  return (theirs & differ) != 0 ? "a combine with " + argument + ", which this rank did not pass"
                                : "a combine without " + argument + ", which this rank passed";
}

Control fresh_control(const Config& c) {
  Control control{};
  control.dispatch = static_cast<unsigned long long>(c.first_step) << 32;
  return control;
}

Control retired_control() {
  Control control{};
  control.dispatch = kRetiredUnits;
  control.failure = abort_word({AbortReason::User, Phase::None, kNoRank, kNoRank, 0});
  return control;
}

}  // namespace

// The calling thread's current device is the caller's business.
class Exchange::OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

BufferLayout buffer_layout(const Config& c) {
  BufferLayout b;
  const auto take = [&](std::uint64_t bytes) {
    const std::uint64_t at = b.bytes;
    b.bytes = align_up(at + bytes, 256);
    return at;
  };
  const bool padded = c.layout == LayoutKind::Padded, compact = c.layout == LayoutKind::Compact;
  const std::uint64_t experts = local_experts(c, c.rank), scales = scales_per_row(c);
  const std::uint64_t received = std::uint64_t{c.world} * max_rows_of_block(c);
  b.rows = padded ? experts * c.max_per_expert : c.max_rows;
  b.counts = take(4 * experts);
  if (c.layout == LayoutKind::Ragged) b.offsets = take(4 * (experts + 1));
  if (compact) b.num_rows = take(4);
  b.step = take(4);
  b.overflowed = take(4);
  b.rows_begin = take(4 * (c.world + 1));
  b.choices = take(4 * received);
  b.place = take(4 * received * (compact ? 1 : c.top_k));
  if (!compact) b.weight = take(4 * received * c.top_k);
  b.src_rank = take(4 * b.rows);
  b.src_token = take(4 * b.rows);
  if (compact) b.topk_ids = take(4 * b.rows * c.top_k);
  if (!compact) b.weights = take(4 * b.rows);
  if (compact) b.topk_weights = take(4 * b.rows * c.top_k);
  if (scales > 0) {
    const std::uint64_t group = padded ? c.max_per_expert : b.rows, each = scale_bytes_each(c.wire);
    const std::uint64_t column = align_up(each * group, 16);   // TMA: columns start at multiples of 16 bytes
    b.scale = c.scale_tma ? Strides{each, column, column * scales} : Strides{each * scales, each, each * scales * group};
    b.scales = take(c.scale_tma ? column * scales * (padded ? experts : 1) : each * scales * b.rows);
  }
  b.x = take(b.rows * payload_bytes(c));
  return b;
}

void leave_blank(const Config& c, const SharedMemory& heap, cudaStream_t stream) {
  const Heap h = heap_of(c);
  const std::uint64_t from = h.slots[std::uint32_t(Op::Combine)], to = h.slots[std::uint32_t(Op::Weights)];
  check(cudaMemsetAsync(heap.data() + from, 0xff, to - from, stream), "cudaMemsetAsync");
  if (c.replicas > 1) check(cudaMemsetAsync(heap.data() + h.share, 0xff, h.shared_bytes - h.share, stream), "cudaMemsetAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

Exchange::Exchange(const Config& config, Memory memory, int device, double timeout_seconds, std::uint32_t num_sms)
    : device_(device), memory_(std::move(memory)), layout_(buffer_layout(config)), next_step_(config.first_step) {
  if (const char* what = invalid(config)) throw Misuse(what);
  if (config.world > kMaxPeers) throw Misuse("device='cuda' takes at most " + std::to_string(kMaxPeers) + " ranks");
  if (config.num_experts > kMostExperts) throw Misuse("device='cuda' takes at most " + std::to_string(kMostExperts) + " experts");
  const OnDevice on(device_);
  common_.c = config;
  common_.heap = heap_of(config);
  common_.dispatch = dispatch_block(config);
  common_.combine = combine_block(config);
  common_.weights = weights_block(config);
  common_.per_rank = Divider(experts_per_rank(config));
  common_.top_k = Divider(config.top_k);
  common_.world = Divider(config.world);
  common_.experts = local_experts(config, config.rank);
  common_.most_rows = max_rows_of_block(config);
  common_.timeout_ns = static_cast<std::uint64_t>(timeout_seconds * 1e9);
#ifdef PPLX_CUDA_FUZZ
  if (const char* seed = std::getenv("PPLX_COMM_CUDA_FUZZ")) common_.fuzz_seed = std::strtoull(seed, nullptr, 0);
#endif
  for (std::uint32_t peer = 0; peer < config.world; ++peer) {
    if (peer != config.rank && !memory_.peers.at(peer)) continue;
    const SharedMemory& theirs = peer == config.rank ? *memory_.own : *memory_.peers.at(peer);
    if (theirs.bytes() < common_.heap.shared_bytes)
      throw Misuse("the mapped memory of rank " + std::to_string(peer) + " is smaller than its heap");
    common_.peers[peer] = theirs.data();
  }
  if (memory_.proxied) {
    auto blocks = memory_.blocks_on_gpu ? std::make_unique<BlockMemory>(device_, common_.heap.bytes) : nullptr;
    std::string why_not;
    auto arrivals = memory_.gdrcopy ? GdrMemory::make(device_, common_.heap.counts, why_not) : nullptr;   // the first part of a heap
    host_ = std::make_shared<HostHeap>(config, memory_.remote, std::move(blocks), std::move(arrivals));
    common_.host = host_->words_at();
    common_.arrivals = host_->arrivals_at();
    common_.blocks = host_->blocks_at();
  }
  common_.remote = memory_.remote;
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device_), "cudaDeviceGetAttribute");
  // Steps in flight share the GPU: each must find room beside the others, and leave some to the caller.
  if (config.in_flight > 1) sms = std::max(1, (sms - 4) / static_cast<int>(config.in_flight));
  sms_ = num_sms > 0 ? std::min(num_sms, static_cast<std::uint32_t>(sms)) : static_cast<std::uint32_t>(sms);
  check(load_kernels(config), "loading the kernels");
  std::vector<bool> alive(config.world, true);
  for (std::uint32_t peer = 0; peer < config.world; ++peer)
    alive[peer] = common_.peers[peer] != nullptr || (memory_.remote >> peer & 1) != 0;
  rebuild_order(alive);
  check(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaMalloc(reinterpret_cast<void**>(&controls_), kControls * sizeof(Control)), "cudaMalloc of the Controls");
  common_.control = controls_ + common_.generation % kControls;
  write_control(common_.generation, fresh_control(config));
  check(cudaHostAlloc(reinterpret_cast<void**>(&common_.report), sizeof(Report), cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  *common_.report = Report{};
  check(cudaEventCreateWithFlags(&sent_, cudaEventDisableTiming), "cudaEventCreate");
  listen();
}

void Exchange::listen() {
  if (!host_) return;
  host_->listen([this](const Abort& abort, const std::string& message) {
    const bool left = abort.peer < kMaxPeers && (load_acquire(&common_.report->left) >> abort.peer & 1) != 0;
    Abort told = abort;
    if (left) told.reason = AbortReason::Closed;   // that is why its network is gone
    fail(told, left ? rank_text(abort.peer) + " closed its Communicator, and then " + message : message);
  });
}

Exchange::~Exchange() {
  if (host_) host_->listen(nullptr);
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  if (!ended(kCloseWait)) {
    fail({AbortReason::Closed, Phase::None, config().rank, config().rank, 0}, "");
    ended(kCloseWait);
  }
  memory_.peers.clear();
  memory_.own.reset();
  host_.reset();
  cudaFree(controls_);
  cudaFreeHost(common_.report);
  cudaEventDestroy(sent_);
  for (const Mark& mark : combined_)
    if (mark.event != nullptr) cudaEventDestroy(mark.event);
  cudaStreamDestroy(own_stream_);
  cudaGetLastError();
  cudaSetDevice(before);
}

// Sends are one sequence, whatever streams they run on. A receive half on another stream than the last send waits for it, too: its
// thread blocks could fill the GPU before the send half has found room, and wait there for what it is to send.
void Exchange::follow(cudaStream_t stream, bool sends) {
  if (is_capturing(stream)) return;   // whoever launches the graph orders it
  const bool same = !streams_.empty() && streams_.back() == stream;
  if (same) {
    sent_any_ = sent_any_ || sends;
    return;
  }
  if (sent_any_) {
    if (sends) check(cudaEventRecord(sent_, streams_.back()), "cudaEventRecord");
    check(cudaStreamWaitEvent(stream, sent_, 0), "cudaStreamWaitEvent");
  }
  const auto found = std::find(streams_.begin(), streams_.end(), stream);
  if (found != streams_.end()) streams_.erase(found);
  streams_.insert(sends ? streams_.end() : streams_.begin(), stream);
  sent_any_ = sent_any_ || sends;
}

// What a receive half on another stream waits for.
void Exchange::mark_send(cudaStream_t stream) {
  if (!is_capturing(stream)) check(cudaEventRecord(sent_, stream), "cudaEventRecord");
}

// A receive half makes the places of its rows blank, and on a stream of its own nothing else says when: the dispatch that lets the
// peers write there again waits for it.
void Exchange::mark(Mark& m, cudaStream_t stream) {
  if (is_capturing(stream)) return;
  if (m.event == nullptr) check(cudaEventCreateWithFlags(&m.event, cudaEventDisableTiming), "cudaEventCreate");
  check(cudaEventRecord(m.event, stream), "cudaEventRecord");
  m.stream = stream;
  m.waits = true;
}

void Exchange::after(Mark& m, cudaStream_t stream) {
  if (!m.waits || is_capturing(stream)) return;
  if (m.stream != stream) check(cudaStreamWaitEvent(stream, m.event, 0), "cudaStreamWaitEvent");
  m.waits = false;
}

// Whether all that was launched has ended, after at most so many seconds. A stream that is gone has nothing under way.
bool Exchange::ended(double seconds) const {
  std::vector<cudaStream_t> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex_);  // not while waiting: fail() wants it
    streams = streams_;
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (const cudaStream_t stream : streams)
    while (cudaStreamQuery(stream) == cudaErrorNotReady) {
      if (std::chrono::steady_clock::now() > until) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  cudaGetLastError();
  return true;
}

namespace {

template <typename T>
void point(T*& to, char* buffer, std::uint64_t at) {
  to = at == BufferLayout::none ? nullptr : reinterpret_cast<T*>(buffer + at);
}

ReceivedView received_view(const BufferLayout& b, char* buffer) {
  ReceivedView r;
  point(r.step, buffer, b.step);
  point(r.overflowed, buffer, b.overflowed);
  point(r.rows_begin, buffer, b.rows_begin);
  point(r.choices, buffer, b.choices);
  point(r.place, buffer, b.place);
  point(r.weight, buffer, b.weight);
  return r;
}

PlanView plan_view(const Config& c, std::uint64_t tokens, char* plan) {
  PlanView p;
  const std::uint64_t choices = 4 * align_up(tokens * c.top_k, 4);
  p.counts = reinterpret_cast<std::uint32_t*>(plan);
  p.rows = reinterpret_cast<std::uint32_t*>(plan + plan_rows_at(c));
  p.ids_digest = reinterpret_cast<std::uint64_t*>(plan + plan_digest_at(c));
  p.weights = reinterpret_cast<float*>(plan + plan_weights_at(c));
  char* at = plan + plan_weights_at(c) + choices;
  p.ids = reinterpret_cast<std::int32_t*>(at);
  p.index = reinterpret_cast<std::uint32_t*>(at + choices);
  p.token_rows = reinterpret_cast<std::uint32_t*>(at + 2 * choices);
  return p;
}

}  // namespace

std::uint32_t Exchange::dispatch(cudaStream_t stream, unsigned halves, const Tokens& tokens, char* plan, char* buffer,
                                 const Rows& rows) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Config& c = common_.c;
  if ((halves & kSend) != 0 && open_.size() == c.in_flight)
    throw Misuse("dispatch: a step is still open, and in_flight=" + std::to_string(c.in_flight) +
                 " allows no further one: combine it or call d.release() first");
  const Lane& lane = common_.lane;
  if ((halves & kSend) != 0 && lane.tokens(tokens.count) > common_.most_rows)
    throw Misuse(too_many_tokens_text(tokens.count, lane.of, common_.most_rows));
  const OnDevice on(device_);
  const BufferLayout& b = layout_;
  DispatchArguments a;
  a.common = common_;
  a.x = tokens.x;
  a.x_stride = tokens.stride;
  a.scales = tokens.scales;
  a.scale = tokens.scale;
  a.ids = tokens.ids;
  a.wide_ids = tokens.wide_ids;
  a.send = (halves & kSend) != 0;
  a.recv = (halves & kRecv) != 0;
  a.tokens = tokens.count;
  a.own = lane.tokens(a.tokens);
  a.weights = tokens.weights;
  a.plan = plan_view(c, tokens.count, plan);
  a.received = received_view(b, buffer);
  point(a.out.x, buffer, b.x);
  point(a.out.scales, buffer, b.scales);
  a.out.scale = b.scale;
  point(a.out.counts, buffer, b.counts);
  point(a.out.offsets, buffer, b.offsets);
  point(a.out.weights, buffer, b.weights);
  point(a.out.src_rank, buffer, b.src_rank);
  point(a.out.src_token, buffer, b.src_token);
  point(a.out.topk_ids, buffer, b.topk_ids);
  point(a.out.topk_weights, buffer, b.topk_weights);
  point(a.out.num_rows, buffer, b.num_rows);
  if (rows.x != nullptr) {
    a.out.x = rows.x;
    a.out.scales = rows.scales;
    (c.layout == LayoutKind::Compact ? a.out.topk_weights : a.out.weights) = rows.weights;
  }
  const std::uint32_t blocks = sms_ * kDispatchBlocksPerSm;
  // Long runs share a release and count earlier tokens less often; short ones spread a small step over all multiprocessors.
  a.tokens_per_unit = std::min(kMostTokensOfUnit, std::max(1u, ceil_div(a.own, 2 * blocks)));
  follow(stream, a.send);
  if (a.send) after(combined_[set_of(c, next_step_)], stream);
  check(launch_dispatch(a, blocks, stream), "launching dispatch");
  if (!a.recv) mark_send(stream);
  if (!a.send) return 0;
  open_.push_back({buffer, next_step_});
  return next_step_++;
}

void Exchange::combine(cudaStream_t stream, unsigned halves, const Outputs& outputs, const Result& result, char* plan,
                       char* buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const OnDevice on(device_);
  CombineArguments a;
  a.common = common_;
  a.expert_out = outputs.expert_out;
  a.expert_stride = outputs.stride;
  a.expert_rows = outputs.rows;
  a.weighted = outputs.weighted;
  a.uses_weights = outputs.uses_weights;
  a.release = outputs.release;
  a.weights = outputs.weights;
  a.has_tail = result.has_tail;
  a.tail = outputs.tail;
  a.tail_rows = outputs.tail_rows;
  a.tail_out = result.tail;
  a.accumulate = result.accumulate;
  a.send = (halves & kSend) != 0;
  a.recv = (halves & kRecv) != 0;
  a.tokens = result.tokens;
  a.own = common_.lane.tokens(a.tokens);
  a.plan = plan_view(common_.c, result.tokens, plan);
  a.received = received_view(layout_, buffer);
  a.y = result.y;
  a.y_stride = result.stride;
  follow(stream, a.send);
  check(launch_combine(a, sms_ * kCombineBlocksPerSm, stream), "launching combine");
  if (!a.recv) {
    mark_send(stream);
    return;
  }
  const auto step = opened(buffer);
  if (!a.send) mark(combined_[set_of(common_.c, step->step)], stream);
  open_.erase(step);
  ++steps_;
}

// The step whose outputs these are; the oldest, where a compiler has moved them.
std::vector<Exchange::OpenStep>::iterator Exchange::opened(const char* buffer) {
  if (open_.empty()) throw Misuse("no dispatch is open: this one was combined or released already");
  const auto found = std::find_if(open_.begin(), open_.end(), [&](const OpenStep& step) { return step.buffer == buffer; });
  return found == open_.end() ? open_.begin() : found;
}

void Exchange::push(cudaStream_t stream, const std::vector<std::uint64_t>& bytes) {
  const OnDevice on(device_);
  PushArguments a;
  a.common = common_;
  for (std::size_t peer = 0; peer < bytes.size() && peer < kMaxPeers; ++peer)
    a.bytes[peer] = std::min(bytes[peer], common_.heap.slot_bytes[static_cast<int>(Op::Combine)]);
  check(launch_push(a, sms_, stream), "launching push");
}

void Exchange::fail(const Abort& abort, const std::string& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (store_if_zero(&common_.report->abort, abort_word(abort))) message_ = message;   // it is that of the word
}

void Exchange::peer_left(std::uint32_t peer) { __atomic_fetch_or(&common_.report->left, 1ull << peer, __ATOMIC_RELEASE); }

void Exchange::drain(cudaStream_t current, double seconds) {
  const OnDevice on(device_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    follow(current, false);
  }
  store_if_zero(&common_.report->abort, abort_word({AbortReason::User, Phase::None, config().rank, config().rank, 0}));
  if (!ended(seconds))
    throw Misuse("reset: the streams that this AllToAll was used on are still at work; what they wait for must end first");
}

void Exchange::reset(std::uint32_t generation, const std::vector<bool>& alive) {
  if (host_) host_->listen(nullptr);  // before the lock: what is being told now wants it, too
  const std::lock_guard<std::mutex> lock(mutex_);
  const OnDevice on(device_);
  write_control(common_.generation, retired_control());
  write_control(generation, fresh_control(common_.c));
  static constexpr std::uint64_t nothing = 0;
  check(cudaMemcpyAsync(common_.peers[common_.c.rank] + Heap::abort_at(generation), &nothing, sizeof nothing,
                        cudaMemcpyHostToDevice, own_stream_),
        "cudaMemcpyAsync");
  leave_blank(common_.c, *memory_.own, own_stream_);
  if (host_) host_->reset(generation);
  listen();
  common_.generation = generation;
  common_.control = controls_ + generation % kControls;
  rebuild_order(alive);
  Report fresh{};
  fresh.left = load_acquire(&common_.report->left);
  *common_.report = fresh;
  message_.clear();
  open_.clear();
  for (Mark& mark : combined_) mark.waits = false;
  next_step_ = common_.c.first_step;
}

void Exchange::rebuild_order(const std::vector<bool>& alive) {
  const Config& c = common_.c;
  common_.living = 0;
  common_.dead = 0;
  for (const bool remote : {true, false})
    for (std::uint32_t i = 1; i <= c.world; ++i) {
      const std::uint32_t peer = (c.rank + i) % c.world;
      if (((common_.remote >> peer & 1) != 0) != remote) continue;
      if (alive[peer])
        common_.order[common_.living++] = static_cast<std::uint8_t>(peer);
      else
        common_.dead |= 1ull << peer;
    }
  common_.lane = lane_of(c, c.rank, &alive);
  common_.replicas = 0;
  for (std::uint32_t peer = first_replica(c, c.rank); peer < first_replica(c, c.rank) + c.replicas; ++peer)
    if (peer != c.rank && alive[peer]) common_.replicas |= 1ull << peer;
  if ((common_.replicas & common_.remote) != 0) throw Misuse("replicas must share a node, and one is behind the proxy");
}

void Exchange::write_control(std::uint32_t generation, const Control& value) {
  check(cudaMemcpyAsync(controls_ + generation % kControls, &value, sizeof value, cudaMemcpyHostToDevice, own_stream_),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(own_stream_), "cudaStreamSynchronize");
}

void Exchange::raise_failure() {
  // What a kernel saw says more than what others say.
  std::uint64_t word = load_acquire(&common_.report->failure);
  if (word == 0) word = load_acquire(&common_.report->abort);
  if (word == 0) return;
  const Abort a = read_abort(word);
  std::string message;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool told = word == load_acquire(&common_.report->abort) && !message_.empty();
    const bool own = a.origin == config().rank && a.peer < networks_.size();
    message = told ? message_ : abort_text(a, own ? networks_[a.peer] : "");
  }
  const std::uint64_t expected = common_.report->expected;
  const auto mine = static_cast<std::uint32_t>(expected), theirs = static_cast<std::uint32_t>(common_.report->seen);
  if (a.origin == config().rank && a.reason == AbortReason::Protocol && (expected & kFlags) != 0) {
    constexpr std::uint32_t named = kFlagsAlike | kAccumulates;
    message += ": " + difference_text(mine & named, theirs & named);
  }
  if (a.origin == config().rank && a.reason == AbortReason::Protocol && (expected & (kFlags | kTokens)) == kTokens)
    message = tokens_apart_text(a.step, {a.peer, theirs}, {config().rank, mine});
  PeerFailure failure(message, a.reason, a.peer, a.phase, a.step);
  if (a.origin == config().rank && (a.reason == AbortReason::Timeout || a.reason == AbortReason::Closed)) {
    failure.expected = word_text(common_.report->expected);
    failure.seen = word_text(common_.report->seen);
  }
  throw failure;
}

void Exchange::raise_notice() {
  Report& r = *common_.report;
  if (r.bad_ids == 0 && r.bad_scales == 0 && r.overflowed == 0 && r.short_output == 0) return;
  std::string text;
  if (r.bad_ids != 0)
    text = "topk_ids of an earlier dispatch had ids that are not 0 to " + std::to_string(config().num_experts - 1) +
           ", nor -1: they counted as -1";
  else if (r.bad_scales != 0)
    text = "x_scale of an earlier dispatch had scales that are no powers of two, which those of wire 'fp8_ue8m0' are: they were "
           "sent as they are";
  else if (r.overflowed != 0)
    text = "the output buffer of " + rank_text(r.overflowed - 1) +
           " was too small in an earlier step: rows that did not fit counted as zero. " + "Give the layout a larger " +
           (config().layout == LayoutKind::Padded ? "Padded(max_tokens_per_expert=...)" : "max_rows") +
           " (d.counts holds the true counts).";
  else
    text = "expert_out or tail of an earlier combine had fewer rows than its dispatch had filled: the missing ones counted as zero";
  r.bad_ids = r.bad_scales = r.overflowed = r.short_output = 0;
  throw Misuse(text);
}

std::uint32_t Exchange::open_steps() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<std::uint32_t>(open_.size());
}

std::uint64_t Exchange::steps() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return steps_;
}

#ifdef PPLX_CUDA_STAGES
void Exchange::note_stages(std::uint64_t* stages, std::uint32_t warps) {
  common_.stages = stages;
  common_.stage_warps = warps;
}
#endif

void Exchange::stamp(std::uint64_t* stamps, std::uint32_t steps) {
  common_.stamps = stamps;
  common_.stamp_steps = std::max(1u, steps);
}

}  // namespace pplx::cuda
