// A fabric between the AllToAlls of one process, for tests of blocks in GPU memory without a NIC: the GPU's copy engine stands in.
// A write is a copy on a stream of this fabric, complete when the event behind it is; then its immediate is in the peer's inbox.
#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "proxy/fabric.h"

namespace pplx::cuda {

class CopyFabric final : public Fabric {
 public:
  explicit CopyFabric(int device);
  ~CopyFabric() override;

  std::string name() const override { return "copies between GPUs"; }
  int endpoints() const override { return 1; }
  std::string endpoint_name(int) const override { return "GPU " + std::to_string(device_); }
  Blob address() const override;
  void insert_peer(int peer, const Blob& address) override;
  void remove_peer(int peer) override;
  LocalRegion register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) override;
  LocalRegion register_device_memory(const DeviceMemory& memory) override;
  void unregister_memory(const LocalRegion&) override {}
  RemoteRegion import_region(int peer, const Blob& description) const override;
  Post write(const Write& write) override;
  int poll(Completion* out, int capacity) override;
  std::string describe_error(const Completion& failed) const override;
  void close();   // waits for its copies

 private:
  struct Inbox;
  struct Copy {
    cudaEvent_t done;
    std::shared_ptr<Inbox> to;
    std::uint64_t context;
    std::uint32_t immediate;
  };
  static constexpr std::size_t kMostUnderWay = 64;

  LocalRegion region(void* base, std::size_t bytes, std::size_t shared_bytes) const;

  const int device_;
  cudaStream_t stream_ = nullptr;
  const std::shared_ptr<Inbox> inbox_;
  std::map<int, std::shared_ptr<Inbox>> peers_;
  std::deque<Copy> under_way_;
  std::vector<cudaEvent_t> spare_;
};

}  // namespace pplx::cuda
