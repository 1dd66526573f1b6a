#include "null_fabric.h"

#include "protocol/immediate.h"

namespace pplx {

NullFabric::NullFabric(int endpoints, std::size_t capacity, std::uint64_t writes)
    : endpoints_(endpoints), writes_(writes), ring_(2 * capacity) {}

std::string NullFabric::endpoint_name(int endpoint) const { return "null" + std::to_string(endpoint); }

LocalRegion NullFabric::register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) {
  LocalRegion region;
  region.id = 0;
  region.base = base;
  region.bytes = bytes;
  region.shared_bytes = shared_bytes;
  return region;
}

Post NullFabric::write(const Write& write) {
  if (tail_ - head_ + 2 > ring_.size()) return Post::Again;
  Completion& sent = ring_[tail_++ % ring_.size()];
  sent.kind = Completion::Kind::Sent;
  sent.endpoint = write.endpoint;
  sent.context = write.context;
  Immediate answer = unpack(write.immediate);
  answer.source = static_cast<std::uint32_t>(write.peer);
  Completion& arrived = ring_[tail_++ % ring_.size()];
  arrived.kind = Completion::Kind::Arrived;
  arrived.endpoint = write.endpoint;
  arrived.immediate = pack(answer);
  doorbells_ += !write.more;
  if (posted_ == 0) first_ = Clock::now();
  if (++posted_ == writes_) {
    last_ = Clock::now();
    posted_ = 0;
    operations_.store(operations_.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }
  return Post::Accepted;
}

int NullFabric::poll(Completion* out, int capacity) {
  int n = 0;
  while (n < capacity && head_ != tail_) out[n++] = ring_[head_++ % ring_.size()];
  return n;
}

}  // namespace pplx
