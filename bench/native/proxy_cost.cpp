#include "proxy_cost.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "host/atomic.h"

namespace pplx {

void CostRun::Unmap::operator()(char* memory) const { munmap(memory, bytes); }

CostRun::CostRun(const CostOptions& options) : options_(options) {
  config_.world = options.peers + 1;
  config_.rank = config_.world / 2;
  config_.num_experts = 4 * config_.world;
  config_.top_k = 8;
  config_.hidden = 7168;
  config_.wire = Wire::FP8;
  config_.max_tokens = std::max(options.rows, 1u);
  config_.in_flight = options.in_flight;
  config_.remote_peers = options.peers;
  config_.first_step = step_ = 1;
  heap_ = heap_of(config_);
  step_ -= 1;
  for (std::uint32_t n = 0; n < options.objects; ++n) {
    // Only the words are ever touched; the blocks are not read.
    void* const memory = mmap(nullptr, heap_.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    memory_.emplace_back(static_cast<char*>(memory), Unmap{heap_.bytes});
  }
  const std::uint64_t pieces = (dispatch_block(config_).bytes(options.rows) + options.shard_bytes - 1) / options.shard_bytes;
  for (std::uint32_t proxy = 0; proxy < options.proxies; ++proxy) {
    std::uint64_t peers = 0;
    for (std::uint32_t peer = 0; peer < config_.world; ++peer) peers += carries(proxy, peer);
    const std::uint64_t writes = peers * std::min<std::uint64_t>(pieces, static_cast<std::uint64_t>(options.endpoints));
    fabrics_.push_back(std::make_shared<NullFabric>(options.endpoints, std::size_t{options.peers} * kMaxEndpoints, writes));
    writes_ += writes;
  }
}

bool CostRun::carries(std::uint32_t proxy, std::uint32_t peer) const {
  return peer != config_.rank && proxy_of(config_.rank, peer, options_.proxies) == proxy;
}

bool CostRun::posted() const {
  for (std::uint32_t proxy = 0; proxy < options_.proxies; ++proxy)
    if (!posted(proxy)) return false;
  return true;
}

void CostRun::attach(Proxy& proxy, std::uint32_t number) {
  for (std::uint32_t n = 0; n < options_.objects; ++n) {
    ProxyObject object;
    object.config = config_;
    object.config.object = n;
    object.memory = memory_[n].get();
    object.region = fabrics_[number]->register_memory(object.memory, heap_.bytes, heap_.shared_bytes);
    object.peers.resize(config_.world);
    for (std::uint32_t peer = 0; peer < config_.world; ++peer)
      if (carries(number, peer)) object.peers[peer] = std::make_unique<RemoteRegion>();
    proxy.attach(std::move(object));
  }
}

NullFabric::Clock::time_point CostRun::announce() {
  op_ = op_ == Op::Dispatch ? Op::Combine : Op::Dispatch;
  if (op_ == Op::Dispatch) ++step_;
  const std::uint32_t set = set_of(config_, step_);
  // A combine's rows are longer: take fewer, so that its block is as long as the dispatch's.
  const BlockLayout layout = block_layout(config_, op_);
  const auto rows = static_cast<std::uint32_t>(std::uint64_t{options_.rows} * dispatch_block(config_).row_bytes / layout.row_bytes);
  ++announced_;
  std::atomic_thread_fence(std::memory_order_seq_cst);   // so that the stores of the measurement itself are not waited for below
  const NullFabric::Clock::time_point begin = NullFabric::Clock::now();
  for (std::uint32_t i = 1; i < config_.world; ++i) {
    const std::uint32_t peer = (config_.rank + i) % config_.world;
    const MailboxEntry entry = mailbox_entry(heap_, config_, memory_[0].get(), step_, op_, peer);
    std::uint64_t last = 0;   // settled() looks at `sent` itself
    set_outgoing(entry, heap_.send_at(set, op_));
    pplx::announce<HostAtomics>(entry, 1, {step_, rows}, last);
  }
  return begin;
}

bool CostRun::settled() const {
  const std::uint32_t set = set_of(config_, step_);
  for (std::uint32_t peer = 0; peer < config_.world; ++peer) {
    if (peer == config_.rank) continue;
    const std::uint64_t sent = load_acquire(word(heap_.sent + kWordBytes * heap_.word_index(config_, set, op_, peer)));
    const std::uint64_t arrival = load_acquire(word(heap_.arrival_at(config_, set, signal_of(op_), peer)));
    if (!arrived(sent, 1, step_) || !arrived(arrival, 1, step_)) return false;
  }
  return true;
}

}  // namespace pplx
