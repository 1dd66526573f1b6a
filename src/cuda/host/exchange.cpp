#include "exchange.h"

#include <algorithm>
#include <bitset>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <thread>

#include "../../host/atomic.h"
#include "../../protocol/deadlines.h"
#include "../large/tuning.h"

namespace pplx::cuda {
namespace {

// Generations whose graphs are known to be old. A call that allocates may wait for the device, so all are there from the start.
constexpr std::uint32_t kControls = 64;

std::size_t counter_bytes(const Common& k) { return sizeof(DeviceCounters) + 8 * std::size_t{k.experts}; }

Control fresh_control(const Config& c) {
  Control control{};
  control.step = static_cast<unsigned long long>(c.first_step) << 32;
  for (auto& shares : control.shares) std::fill(std::begin(shares), std::end(shares), c.first_step - 1);
  for (std::uint32_t set = 0; set < c.in_flight; ++set) control.closed[set] = closed_word(first_step_of_set(c, set) - c.in_flight);
  return control;
}

// The most that a step may have.
std::uint32_t most_chunks(const Config& c) {
  if (most_rounds(c) != 0 && tokens_of_round(c) < kFewTokensOfChunk) return c.max_tokens;
  return std::max(ceil_div(c.max_tokens, kFewTokensOfChunk), std::min(c.max_tokens, kMostBlocks));
}

std::uint32_t attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return static_cast<std::uint32_t>(value);
}
std::uint32_t sms_of_gpu(int device) { return attribute_of(device, cudaDevAttrMultiProcessorCount); }

// Steps in flight share the GPU: each must find room beside the others, and leave some to the caller.
std::uint32_t sms_of_launch(const Config& c, std::uint32_t of_gpu, std::uint32_t num_sms) {
  std::uint32_t sms = of_gpu;
  if (c.in_flight > 1) sms = sms > kSmsLeft ? std::max(1u, (sms - kSmsLeft) / c.in_flight) : 1;
  sms = std::min(sms, kMostBlocks / std::max(kDispatchBlocksPerSm, kCombineBlocksPerSm));
  return num_sms > 0 ? std::min(num_sms, sms) : sms;
}

// Sets how much of a dispatch row travels: c.hidden of its numbers.
void set_rows(Common& k, const Config& c) {
  k.payload_bytes = payload_bytes(c);
  k.parts = ceil_div(k.payload_bytes, kPartBytes);
  k.part_bytes = static_cast<std::uint32_t>(align_up(ceil_div(k.payload_bytes, k.parts), 16));
  k.by_parts = Divider(k.parts);
  k.dispatch.scales_at = dispatch_block(c).scales_at;
  k.scale_vec16s = ceil_div(scale_words(c), 4);
}

// Returns what follows from the configuration alone.
Common common_of(const Config& c, double timeout_seconds) {
  Common k;
  k.c = c;
  k.heap = heap_of(c);
  k.dispatch = dispatch_block(c);
  k.combine = combine_block(c);
  k.weights = weights_block(c);
  k.dispatch_parts = part_sizes(c, Op::Dispatch);
  k.combine_parts = part_sizes(c, Op::Combine);
  k.per_rank = Divider(experts_per_rank(c));
  k.top_k = Divider(c.top_k);
  k.experts = local_experts(c, c.rank);
  k.most_rows = max_rows_of_block(c);
  k.experts_per_rank = experts_per_rank(c);
  k.expert_vec16s = expert_vec16s(c);
  k.align_mask = (c.align & (c.align - 1)) == 0 ? c.align - 1 : kNone;
  while (1u << k.group_shift < c.top_k) ++k.group_shift;
  set_rows(k, c);
  k.scales_in_pieces = !c.scale_tma && scale_bytes(c) % 16 == 0;
  k.showing_rows = k.scale_vec16s <= 32 ? kShowingRows : 0;  // a warp looks at all of them at once
  k.row_bytes = c.hidden * dtype_bytes(c.dtype);
  // The dividend is a strip's number among those of all rows.
  const std::uint64_t strips = ceil_div(k.row_bytes, kReceivedVectorsOfFew * 512);
  const std::uint64_t most = (std::uint64_t{c.world} * k.most_rows + 1) * strips;
  if (most * strips >> 32 != 0)
    throw Misuse("device='cuda': rows times row bytes exceed the 32-bit index of strips; reduce max_tokens_per_rank");
  // With relays a wait may be for what another rank waits for: see relays.cuh.
  const double longer = c.node_ranks != 0 ? (deadlines::kAnswered.seconds + deadlines::kPassedOn.seconds) * deadlines::kApart : 0;
  k.timeout_ns = static_cast<std::uint64_t>((timeout_seconds + longer) * 1e9);
#ifdef PPLX_CUDA_FUZZ
  if (const char* seed = std::getenv("PPLX_COMM_CUDA_FUZZ")) k.fuzz_seed = std::strtoull(seed, nullptr, 0);
#endif
  return k;
}

}  // namespace

void only_beginnings(Common& k) {
  Config c = k.c;  // k's own says where blocks lie
  c.hidden = std::min(c.hidden, 512u);  // whole vec16s of codes, and of scales
  set_rows(k, c);
}

std::uint32_t tuned_large_tokens(const Config& c, int device, std::uint32_t num_sms) {
  const std::uint32_t sms = sms_of_gpu(device);
  const std::uint32_t many = large_tokens({sms, sms_of_launch(c, sms, num_sms), c.hidden * dtype_bytes(c.dtype), c.world, c.layout != LayoutKind::Compact});
  return in_pieces(c) ? std::min(many, c.whole_tokens + 1) : many;
}

void clear(const SharedMemory& heap, cudaStream_t stream) {
  set_now(heap.data(), 0, heap.bytes(), stream);
}

void leave_blank(const Config& c, const SharedMemory& heap, cudaStream_t stream) {
  const Heap h = heap_of(c);
  const std::uint64_t from = h.counts, to = h.slot_at(c, 0, Op::Weights, c.mapped_first);
  set_now(heap.data() + from, 0xff, to - from, stream);
  if (c.replicas > 1) set_now(heap.data() + h.slices, 0xff, h.mapped_bytes - h.slices, stream);
}

Exchange::Exchange(const Config& config, Memory memory, int device, double timeout_seconds, std::uint32_t num_sms, std::uint32_t large_tokens,
                   std::uint32_t sending_share, bool counts)
    : device_(device), memory_(std::move(memory)), layout_(buffer_layout(config)), steps_(config), large_tokens_(large_tokens),
      sending_share_(sending_share) {
  if (const char* what = invalid(config)) throw Misuse(what);
  if (const char* what = invalid_pieces(config)) throw Misuse(what);
  if (config.world > kMaxPeers) throw Misuse("device='cuda' takes at most " + std::to_string(kMaxPeers) + " ranks");
  if (config.num_experts > kMostExperts) throw Misuse("device='cuda' takes at most " + std::to_string(kMostExperts) + " experts");
  if (const char* what = invalid_nodes(config, memory_.nodes)) throw Misuse(what);
  if (!groups_sums(memory_.nodes)) memory_.nodes.clear();
  if (config.node_ranks != 0 && (memory_.nodes.empty() || !memory_.proxied || in_pieces(config)))
    throw Misuse("node_ranks needs several nodes, some with several ranks, a proxy and whole blocks");
  const OnDevice on(device_);
  common_ = common_of(config, timeout_seconds);
  for (std::uint32_t peer = 0; peer < config.world; ++peer) {
    if (peer != config.rank && !memory_.peers.at(peer)) continue;
    const SharedMemory& theirs = peer == config.rank ? *memory_.own : *memory_.peers.at(peer);
    if (theirs.bytes() < common_.heap.mapped_bytes)
      throw Misuse("the mapped memory of rank " + std::to_string(peer) + " is smaller than its heap");
    common_.peers[peer] = theirs.data();
  }
  common_.remote = common_.rails = memory_.remote;
  if (memory_.proxied && config.node_ranks == 0) lay_host();
#ifdef PPLX_CARRIER
  const Symmetric& symmetric = memory_.symmetric;
  if (symmetric.base != nullptr && symmetric.bytes < common_.heap.bytes) throw Misuse("the symmetric memory is smaller than the heap that is to lie there");
  common_.blocks = symmetric.base;
  std::copy_n(symmetric.pes.begin(), std::min<std::size_t>(symmetric.pes.size(), kMaxPeers), common_.pe);
  std::copy(memory_.slot_at.begin(), memory_.slot_at.end(), common_.slot_at);
#endif
  sms_ = most_sms_ = wanted_sms_ = sms_of_launch(config, sms_of_gpu(device_), num_sms);
  common_.combine_blocks = sms_ * kCombineBlocksPerSm;
  if (common_.heap.in_pieces) check_pieces();
  check(load_dispatches(config, false, false), "loading the kernels of dispatches");
  check(load_combines(config, false), "loading the kernels of combines");
  std::vector<bool> alive(config.world, true);
  for (std::uint32_t peer = 0; peer < config.world; ++peer)
    alive[peer] = common_.peers[peer] != nullptr || (memory_.remote >> peer & 1) != 0;
  rebuild_order(alive);
  check(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  if (counts) {
    allocate(common_.counters, counter_bytes(common_), "cudaMalloc of the counters");
    allocate(common_.kept, kKeptSteps * sizeof *common_.kept, "cudaMalloc of the steps that are kept");
    check(launch_clock(&common_.counters->made, own_stream_), "launching the clock");
    made_ = std::make_unique<StreamEvent>(cudaEventDefault);
    made_->record(own_stream_);
  }
  allocate(controls_, kControls * sizeof(Control), "cudaMalloc of the Controls");
  common_.control = controls_ + common_.generation % kControls;
  write_control(common_.generation, fresh_control(config));
  make_chunk_counts();
  if (common_.heap.in_pieces) make_round_counts();
  check(cudaHostAlloc(reinterpret_cast<void**>(&common_.report), sizeof(Report), cudaHostAllocMapped | cudaHostAllocPortable),
        "cudaHostAlloc");
  *common_.report = Report{};
#ifdef PPLX_CARRIER
  if (symmetric.base != nullptr) {  // else no rank is put to
    allocate(common_.puts, sizeof(PutCounts), "cudaMalloc of the PutCounts");
    rebase();
  }
#endif
  listen();
}

template <typename T>
void Exchange::allocate(T*& memory, std::uint64_t bytes, const char* what) {
  check(cudaMalloc(reinterpret_cast<void**>(&memory), bytes), what);
  allocated_.push_back(memory);
  set_now(memory, 0, bytes, own_stream_);
}

void Exchange::lay_host() {
  const Config& c = common_.c;
  host_.reset();  // before there is another one
  auto blocks = memory_.blocks_on_gpu ? std::make_unique<BlockMemory>(device_, common_.heap.bytes, c.node_ranks != 0) : nullptr;
  std::string why_not;
  auto arrivals = memory_.gdrcopy ? GdrMemory::make(device_, common_.heap.counts, why_not) : nullptr;   // the first part of a heap
  host_ = std::make_shared<HostHeap>(c, common_.rails, memory_.slot_at, std::move(blocks), std::move(arrivals));
  common_.host = host_->words_at();
  common_.arrivals = host_->arrivals_at();
  common_.blocks = host_->blocks_at();
}

// Only relays and their sources have memory for each other, and these are others after a reset.
void Exchange::lay_rails(const std::vector<bool>& alive, const Rails& relays) {
  Config& c = common_.c;
  const std::vector<std::uint64_t> rails = rail_peers(c, memory_.nodes, alive);
  const auto count = [](std::uint64_t peers) { return static_cast<std::uint32_t>(std::bitset<64>(peers).count()); };
  const auto number_at = [&](std::uint32_t of, std::uint32_t rank) { return count(rails[rank] & ((1ull << of) - 1)); };
  common_.rails = rails[c.rank];
  c.remote_peers = count(common_.rails);
  c.remote_slots = 1;
  for (std::uint32_t rank = 0; rank < c.world; ++rank) {
    c.remote_slots = std::max(c.remote_slots, count(rails[rank]));
    memory_.slot_at[rank] = number_at(c.rank, rank);
    relays_.slot[rank] = static_cast<std::uint8_t>(number_at(rank, relays.holder[rank]));
  }
  common_.heap = heap_of(c);
  lay_host();
}

std::vector<std::uint32_t> Exchange::network_peers() const {
  std::vector<std::uint32_t> peers;
  for (std::uint32_t peer = 0; peer < common_.c.world; ++peer)
    if (((common_.rails & ~common_.dead) >> peer & 1) != 0) peers.push_back(peer);
  return peers;
}

void Exchange::use_hooks() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const OnDevice on(device_);
  const Config& c = common_.c;
  check(load_hooks(), "loading the kernels of hooks");
  if (chunk_memory_ != nullptr) check(load_dispatches(c, true, true), "loading the kernels of large dispatches with hooks");
  has_hooks_ = true;
  const std::uint32_t sms = sms_of_gpu(device_), most = sms > kSmsLeft ? sms - kSmsLeft : 1;
  sms_ = most_sms_ = wanted_sms_ = std::min(sms_, most);
  common_.combine_blocks = sms_ * kCombineBlocksPerSm;
}

void Exchange::listen() {
  if (!host_) return;
  host_->listen([this](const LostNetwork& loss) {
    const std::uint32_t peer = loss.abort.peer;
    const bool left = peer < kMaxPeers && (load_acquire(&common_.report->left) >> peer & 1) != 0;
    const LostNetwork told = left ? loss.after_goodbye() : loss;
    fail(told.abort, told.message);
  });
}

Exchange::~Exchange() {
  if (fork_.in_child()) return;   // the GPU is the parent's
  if (host_) host_->listen(nullptr);
  int before = 0;   // no OnDevice, which throws
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  if (!all_ended(deadlines::kCloseKernels.seconds)) {
    fail({AbortReason::Closed, Phase::None, config().rank, config().rank, 0}, "");
    all_ended(deadlines::kCloseAborted.seconds);
  }
  memory_.peers.clear();
  memory_.own.reset();
  relay_areas_.clear();
  relay_blocks_.clear();
  host_.reset();
  for (void* memory : allocated_) cudaFree(memory);
  cudaFreeHost(common_.report);
  timeline_.reset();
  cudaStreamDestroy(own_stream_);
  cudaGetLastError();
  if (has_context(before)) cudaSetDevice(before);
}

bool Exchange::ended(double seconds) const {
  const OnDevice on(device_);   // a stream may be its default one
  return all_ended(seconds);
}

// A stream that is gone has nothing under way.
bool Exchange::all_ended(double seconds) const {
  std::vector<cudaStream_t> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex_);  // not while waiting: fail() wants it
    streams = launches_.eager().streams();
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

void Exchange::fail(const Abort& abort, const std::string& message) {
  const std::lock_guard<std::mutex> lock(failing_);   // a reset ends what came before it
  first_.tell(&common_.report->abort, abort, message);
}

void Exchange::peer_left(std::uint32_t peer) { __atomic_fetch_or(&common_.report->left, 1ull << peer, __ATOMIC_RELEASE); }

void Exchange::peer_busy(std::uint32_t peer, bool busy) {
  if (busy)
    __atomic_fetch_or(&common_.report->busy, 1ull << peer, __ATOMIC_RELEASE);
  else
    __atomic_fetch_and(&common_.report->busy, ~(1ull << peer), __ATOMIC_RELEASE);
}

void Exchange::set_num_sms(std::uint32_t num_sms) {
  const std::lock_guard<std::mutex> lock(mutex_);
  wanted_sms_ = std::min(num_sms, most_sms_);
}

void Exchange::follow(cudaStream_t current) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const OnDevice on(device_);
  Launches::Sequence& here = launches_.on(current);
  if (here.eager()) here.follow(current, false);
}

void Exchange::drain(cudaStream_t current, double seconds) {
  follow(current);
  store_if_zero(&common_.report->abort, abort_word({AbortReason::User, Phase::None, config().rank, config().rank, 0}));
  if (!ended(seconds))
    throw Misuse("reset: the streams that this AllToAll was used on are still at work; what they wait for must end first");
}

void Exchange::reset(std::uint32_t generation, const std::vector<bool>& alive) {
  if (host_) host_->listen(nullptr);  // before the lock: what is being told now wants it, too
  const std::scoped_lock lock(failing_, mutex_);
  const OnDevice on(device_);
  Control retired{};
  retired.failure = abort_word({AbortReason::User, Phase::None, kNoRank, kNoRank, 0});
  write_control(common_.generation, retired);
  write_control(generation, fresh_control(common_.c));
  static constexpr std::uint64_t nothing = 0;
  copy_now(common_.peers[common_.c.rank] + Heap::abort_at(generation), &nothing, sizeof nothing, own_stream_);
  leave_blank(common_.c, *memory_.own, own_stream_);
  if (chunk_memory_ != nullptr) {
    set_now(chunk_memory_, 0, chunk_bytes_, own_stream_);
    forget_taken_chunks();
  }
  if (round_counts_ != nullptr) set_now(round_counts_, 0, round_bytes_, own_stream_);
  if (common_.kept != nullptr) set_now(common_.kept, 0, kKeptSteps * sizeof *common_.kept, own_stream_);
  common_.generation = generation;
  common_.control = controls_ + generation % kControls;
  rebuild_order(alive);
  if (host_) host_->reset(generation);
  listen();
  Report& report = *common_.report;   // peers may leave, or be busy, meanwhile
  report.abort = report.failure = report.expected = report.seen = 0;
  report.notices = {};
  first_.forget();
  launches_.forget_steps();
  steps_.reset();
}

void Exchange::rebuild_order(const std::vector<bool>& alive) {
  const Config& c = common_.c;
  common_.living = 0;
  common_.dead = 0;
  const std::vector<std::uint32_t> order = peer_order(c, alive);
  for (const bool remote : {true, false})
    for (const std::uint32_t peer : order)
      if (((common_.remote >> peer & 1) != 0) == remote) common_.order[common_.living++] = static_cast<std::uint8_t>(peer);
  for (std::uint32_t peer = 0; peer < c.world; ++peer)
    if (!alive[peer]) common_.dead |= 1ull << peer;
  common_.slice = slice_of(c, c.rank, &alive);
  common_.replicas = 0;
  for (const std::uint32_t peer : other_replicas(c, order, [&](std::uint32_t r) { return (common_.remote >> r & 1) == 0; }))
    common_.replicas |= 1ull << peer;
  find_relays(alive);
}

void Exchange::find_relays(const std::vector<bool>& alive) {
  const Config& c = common_.c;
  const Rails rails = make_rails(c, memory_.nodes, alive);
  relays_ = {};
  relay_areas_.clear();
  relay_blocks_.clear();
  if (c.node_ranks != 0) lay_rails(alive, rails);
  for (std::uint32_t rank = 0; rank < c.world; ++rank) {
    relays_.rep[rank] = static_cast<std::uint8_t>(rails.rep[rank]);
    relays_.number[rank] = static_cast<std::uint8_t>(rails.number[rank]);
    relays_.holder[rank] = static_cast<std::uint8_t>(rails.number[rails.holder[rank]]);
    relays_.nth[rank] = static_cast<std::uint8_t>(rails.nth[rank]);
    if (c.node_ranks != 0 && alive[rank] && (memory_.remote >> rank & 1) != 0) relays_.skipped |= 1ull << rank;
  }
  for (const std::uint32_t rank : rails.rep) relays_.skipped &= ~(1ull << rank);
  for (const std::uint32_t rank : rails.sources) relays_.sources |= 1ull << rank;
  for (const std::uint32_t rank : rails.mates) {
    relays_.mates |= 1u << rails.number[rank];
    relays_.rank[rails.number[rank]] = static_cast<std::uint8_t>(rank);
  }
  relays_.answer = answer_block(c);
  relays_.layout = relay_layout(c, static_cast<std::uint32_t>(rails.sources.size()));
}

std::uint64_t Exchange::relay_bytes(std::uint32_t mate) const {
  std::uint32_t sources = 0;
  for (std::uint32_t rank = 0; rank < common_.c.world; ++rank)
    sources += ((memory_.remote & ~common_.dead) >> rank & 1) != 0 && relays_.holder[rank] == relays_.number[mate] ? 1 : 0;
  return relay_layout(common_.c, sources).bytes;
}

void Exchange::lay_relays(ByRank areas, ByRank blocks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const OnDevice on(device_);
  const std::uint32_t here = common_.c.rank;
  for (const auto& [rank, area] : areas) {
    if (area->bytes() < relay_bytes(rank)) throw Misuse("the mapped memory is smaller than the relay's");
    relays_.areas[relays_.number[rank]] = area->data();
  }
  for (const auto& [rank, memory] : blocks) relays_.blocks[relays_.number[rank]] = memory->data();
  relays_.blocks[relays_.number[here]] = common_.blocks;
  set_now(relays_.areas[relays_.number[here]], 0xff, areas.at(here)->bytes(), own_stream_);
  relay_areas_ = std::move(areas);
  relay_blocks_ = std::move(blocks);
}

void Exchange::write_control(std::uint32_t generation, const Control& value) {
  copy_now(controls_ + generation % kControls, &value, sizeof value, own_stream_);
}

// Makes what the large kernels need, if steps may be large enough. All ranks use these kernels or none does: they decide what rows of
// combine look like.
void Exchange::make_chunk_counts() {
  const Config& c = common_.c;
  const std::uint32_t bytes = attribute_of(device_, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const bool pieces = common_.heap.in_pieces, dispatches = can_dispatch_large(c, bytes);
  if (!pieces && (c.max_tokens < large_tokens_ || (!dispatches && !memory_.across()) || !can_combine_large(c, bytes))) return;
  if (pieces) large_tokens_ = memory_.across() ? 0 : std::min(large_tokens_, tokens_of_round(c) + 1);  // one round at most has few
  common_.word_rows = large_tokens_;
  if (pieces) common_.showing_rows = std::min(common_.showing_rows, large_tokens_);
  check(load_combines(c, true), "loading the kernels of large combines");
  if (!dispatches) return;
  check(load_dispatches(c, true, memory_.remote != 0), "loading the kernels of large dispatches");
  const std::uint64_t columns = chunk_columns(c), chunks = most_chunks(c);
  const std::uint64_t totals = 16, taken = totals + 4 * kTotals * columns, ready = align_up(taken + 4 * chunks, 8), counts = align_up(ready + 8 * chunks, 16);
  chunk_bytes_ = counts + 2 * columns * chunks;
  allocate(chunk_memory_, chunk_bytes_, "cudaMalloc of the counts of chunks");
  auto* const words = reinterpret_cast<std::uint32_t*>(chunk_memory_);
  chunk_counts_.next = words;
  chunk_counts_.counted = words + 1;
  chunk_counts_.left = words + 2;
  chunk_counts_.received = words + 3;
  chunk_counts_.totals = reinterpret_cast<std::uint32_t*>(chunk_memory_ + totals);
  chunk_counts_.taken = reinterpret_cast<std::uint32_t*>(chunk_memory_ + taken);
  chunk_counts_.ready = reinterpret_cast<std::uint64_t*>(chunk_memory_ + ready);
  chunk_counts_.counts = reinterpret_cast<std::uint16_t*>(chunk_memory_ + counts);
  forget_taken_chunks();
}

void Exchange::forget_taken_chunks() {
  const Config& c = common_.c;
  // No step that is near has this number.
  const std::vector<std::uint32_t> taken(most_chunks(c), c.first_step - 1);
  copy_now(chunk_counts_.taken, taken.data(), 4 * taken.size(), own_stream_);
}

void Exchange::check_pieces() const {
  const Config& c = common_.c;
  const std::string instead = ". Give slot_bytes at least " + std::to_string(bytes_of_slots(c, common_.most_rows)) + ", or leave it out";
  const auto refuse = [&](const std::string& why) { throw Misuse("device='cuda' does not take blocks in pieces " + why + instead); };
  if (most_rounds(c) > kMostRounds) refuse("of so few rows: a step would have " + std::to_string(most_rounds(c)) + " rounds, " + std::to_string(kMostRounds) + " at most");
  const std::uint32_t bytes = attribute_of(device_, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  if (!can_dispatch_large(c, bytes) || !can_combine_large(c, bytes))
    refuse("of this shape on this GPU: the kernels need rows of a multiple of 16 bytes, and 227 KiB of shared memory, with room for the counts of all experts");
}

void Exchange::make_round_counts() {
  const Config& c = common_.c;
  const std::uint64_t counts = align_up(std::uint64_t{4} * c.in_flight * round_counts(most_rounds(c)), 8), words = remote_rounds_words(c);
  const bool across = common_.blocks != nullptr;
  const std::uint64_t told = counts + 8 * kRemoteWords * words, stored = 4 * kPlaces * words;
  round_bytes_ = across ? told + stored : counts;
  char* memory = nullptr;
  allocate(memory, round_bytes_, "cudaMalloc of the counts of rounds");
  round_counts_ = reinterpret_cast<std::uint32_t*>(memory);
  if (across) remote_rounds_ = {reinterpret_cast<std::uint64_t*>(memory + counts), reinterpret_cast<std::uint32_t*>(memory + told)};
}

void Exchange::raise_failure() {
  std::uint64_t word = load_acquire(&common_.report->failure);
  if (word == 0) word = load_acquire(&common_.report->abort);
  if (word == 0) return;
  const Abort a = read_abort(word, config().world);
  std::string message = first_.text(word, config());
  const std::uint64_t expected = common_.report->expected;
  const auto mine = static_cast<std::uint32_t>(expected), theirs = static_cast<std::uint32_t>(common_.report->seen);
  const bool own = a.origin == config().rank, refused = own && a.reason == AbortReason::Protocol;
  const bool waited = own && (a.reason == AbortReason::Timeout || a.reason == AbortReason::Closed);
  const bool of_round = waited && (expected & kRound) != 0 && (expected & (kFlags | kTokens)) == 0;
  constexpr std::uint32_t named = kFlagsAlike | kAccumulates;
  if (refused && (expected & kFlags) != 0) message += ": " + difference_text(mine & named, theirs & named);
  if (refused && (expected & (kFlags | kTokens)) == kTokens)
    message = tokens_apart_text(a.step, {a.peer, theirs}, {config().rank, mine});
  if (a.reason == AbortReason::Refused) message = refused_text(a, config().in_flight);
  if (of_round) message += ": it waited for " + round_text(a, mine, (expected & kToBeRead) != 0);
  PeerFailure failure(message, a.reason, a.peer, a.phase, a.step);
  if (waited) {
    failure.expected = of_round ? "piece " + std::to_string(mine) : word_text(expected);
    failure.seen = of_round ? "not all of it" : word_text(common_.report->seen);
  }
  throw failure;
}

std::uint32_t Exchange::open_steps() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<std::uint32_t>(launches_.eager().open_steps());
}

Counters Exchange::counters() const {
  const Config& c = common_.c;
  Counters counters(c.world, common_.experts);
  if (common_.counters == nullptr) {
    const std::lock_guard<std::mutex> lock(mutex_);
    counters.steps = steps_.closed();
    counters.large_dispatches = large_dispatches_;
    counters.large_combines = large_combines_;
    return counters;
  }
  counters.counted = true;
  const OnDevice on(device_);
  const CaptureElsewhere capture;
  std::vector<char> memory(counter_bytes(common_));
  copy_now(memory.data(), common_.counters, memory.size(), own_stream_);
  const auto& d = *reinterpret_cast<const DeviceCounters*>(memory.data());
  counters.steps = d.steps;
  counters.tokens = d.tokens;
  counters.large_dispatches = d.large[0];
  counters.large_combines = d.large[1];
  for (std::uint32_t peer = 0; peer < c.world; ++peer) {
    PeerCounters& p = counters.peers[peer];
    const DeviceCounters::Rows &to = d.dispatched[peer], &back = d.combined[peer];
    p.rows_sent = to.sent + back.sent;
    p.rows_received = to.received + back.received;
    if (peer == c.rank) continue;
    const std::uint64_t headers = d.steps * (common_.dispatch.header_bytes + common_.combine.header_bytes);
    p.bytes_sent = headers + to.sent * common_.dispatch.row_bytes + back.sent * common_.combine.row_bytes;
    p.bytes_received = headers + to.received * common_.dispatch.row_bytes + back.received * common_.combine.row_bytes;
    for (std::uint32_t op = 0; op < kAwaited; ++op) p.waited[op] = d.waited[op][peer];
  }
  std::memcpy(counters.expert_rows.data(), &d + 1, 8 * counters.expert_rows.size());
  for (std::uint32_t i = 0; i < kTimed; ++i) {
    std::copy(std::begin(d.times[i]), std::end(d.times[i]), counters.times[i].counts);
    counters.times[i].nanoseconds = d.nanoseconds[i];
  }
  return counters;
}

#ifdef PPLX_CUDA_STAGES
void Exchange::note_stages(std::uint64_t* stages, std::uint32_t steps, std::uint32_t warps) {
  common_.stages = stages;
  common_.stage_steps = steps;
  common_.stage_warps = warps;
}
#endif

void Exchange::note_kernels() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const OnDevice on(device_);
  const CaptureElsewhere capture;
  if (timeline_ == nullptr) timeline_ = std::make_unique<Timeline>(own_stream_);
  timeline_->begin(kept());
#ifdef PPLX_CUDA_STAGES
  const std::uint32_t warps = sms_of_gpu(device_) * kMostWarps;
  note_stages(timeline_->stages(warps), Timeline::kStageSteps, warps);
#endif
}

void Exchange::tell_kernels() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (timeline_ == nullptr) return;
  const OnDevice on(device_);
  const CaptureElsewhere capture;
  timeline_->tell(common_.c, kept());
}

std::vector<KeptStep> Exchange::kept() const {
  std::vector<KeptStep> steps(common_.kept == nullptr ? 0 : kKeptSteps);
  if (!steps.empty()) copy_now(steps.data(), common_.kept, steps.size() * sizeof steps[0], own_stream_);
  return steps;
}

std::vector<std::uint64_t> Exchange::begins(std::uint32_t steps) const {
  if (common_.kept == nullptr) throw Misuse("begins: nothing is kept with PPLX_COMM_STATS=0");
  const OnDevice on(device_);
  std::vector<KeptStep> latest = kept();
  std::sort(latest.begin(), latest.end(), [](const KeptStep& a, const KeptStep& b) { return a.begun[0] > b.begun[0]; });
  latest.resize(std::min<std::size_t>(steps, latest.size()));
  std::vector<std::uint64_t> begins;
  for (const KeptStep& step : latest)
    for (const Op op : {Op::Combine, Op::Dispatch}) begins.push_back(step.begun[half_of(op, true)]);
  std::reverse(begins.begin(), begins.end());
  return begins;
}

}  // namespace pplx::cuda
