// The proxy's cost between a device's mailbox words and the network: one AllToAll over null fabrics, one for each of its proxies.
// The caller plays the device.
#pragma once

#include <memory>

#include "null_fabric.h"
#include "proxy/proxy.h"

namespace pplx {

struct CostOptions {
  std::uint32_t peers = 8;                     // all of them remote
  int endpoints = 1;
  std::uint32_t rows = 16;                     // rows of every block
  std::uint64_t shard_bytes = 256 * 1024;      // larger blocks are split
  std::uint32_t in_flight = 1;
  std::uint32_t objects = 1;                   // AllToAlls on this proxy; all but one are idle
  std::uint32_t proxies = 1;                   // the peers are split between them
};

class CostRun {
 public:
  explicit CostRun(const CostOptions& options);

  const CostOptions& options() const { return options_; }
  const std::shared_ptr<NullFabric>& fabric(std::uint32_t proxy = 0) const { return fabrics_[proxy]; }
  std::uint64_t writes() const { return writes_; }   // posted for one operation: peers times shards
  void attach(Proxy& proxy, std::uint32_t number = 0);   // all AllToAlls, to the proxy of that number

  // Announces the next operation, dispatch and combine by turns, to all peers; returns when it began.
  NullFabric::Clock::time_point announce();
  // True once the operation's last write was posted, by all proxies or by one.
  bool posted() const;
  bool posted(std::uint32_t proxy) const { return fabrics_[proxy]->operations() == announced_; }
  // True once the block of every peer has left and every peer's own has arrived: then the next may be announced.
  bool settled() const;

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(char* memory) const;
  };
  using Memory = std::unique_ptr<char, Unmap>;

  bool carries(std::uint32_t proxy, std::uint32_t peer) const;
  std::uint64_t* word(std::uint64_t at) const { return reinterpret_cast<std::uint64_t*>(memory_.front().get() + at); }

  CostOptions options_;
  Config config_;
  Heap heap_;
  std::vector<Memory> memory_;                       // indexed by object
  std::vector<std::shared_ptr<NullFabric>> fabrics_;   // indexed by proxy
  std::uint64_t writes_ = 0;
  std::uint64_t announced_ = 0;
  std::uint32_t step_;
  Op op_ = Op::Combine;
};

}  // namespace pplx
