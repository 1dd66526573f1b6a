// A network that costs nothing: every write is accepted at once and carries no bytes, and every peer answers it as if its own block
// of the same step had arrived. The remaining cost is the proxy's own.
#pragma once

#include <atomic>
#include <chrono>
#include <vector>

#include "proxy/fabric.h"

namespace pplx {

class NullFabric final : public Fabric {
 public:
  using Clock = std::chrono::steady_clock;

  // `capacity`: writes that are accepted before their completions are polled; beyond that, Again. `writes`: the number in one
  // operation; the times of its first and last one are noted.
  NullFabric(int endpoints, std::size_t capacity, std::uint64_t writes);

  std::string name() const override { return "null"; }
  int endpoints() const override { return endpoints_; }
  std::string endpoint_name(int endpoint) const override;
  Blob address() const override { return {}; }
  void insert_peer(int, const Blob&) override {}
  void remove_peer(int) override {}
  LocalRegion register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) override;
  void unregister_memory(const LocalRegion&) override {}
  RemoteRegion import_region(int, const Blob&) const override { return {}; }
  Post write(const Write& write) override;
  int poll(Completion* out, int capacity) override;
  std::string describe_error(const Completion&) const override { return "the null fabric has no errors"; }

  // How many operations were posted to their last write; first() and last() are of the latest.
  std::uint64_t operations() const { return operations_.load(std::memory_order_acquire); }
  Clock::time_point first() const { return first_; }
  Clock::time_point last() const { return last_; }

  std::uint64_t doorbells() const { return doorbells_; }   // writes that announced no further one for their endpoint

 private:
  const int endpoints_;
  const std::uint64_t writes_;
  std::vector<Completion> ring_;
  std::uint64_t head_ = 0, tail_ = 0, posted_ = 0, doorbells_ = 0;
  // On a cache line of its own, because another thread polls it.
  alignas(64) std::atomic<std::uint64_t> operations_{0};
  Clock::time_point first_, last_;
};

}  // namespace pplx
