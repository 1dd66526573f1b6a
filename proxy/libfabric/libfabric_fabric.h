// Fabric over libfabric: one endpoint (domain, endpoint, address vector, completion queue) per NIC, writes are
// fi_writemsg with four bytes of remote CQ data.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../../src/host/fork_check.h"
#include "../fabric.h"
#include "providers.h"
#include "shm_files.h"

namespace pplx {

class LibfabricFabric : public Fabric {
 public:
  explicit LibfabricFabric(const libfabric::Options& options);   // throws FabricError that says why it cannot be opened
  ~LibfabricFabric() override;                                   // never waits for a peer
  LibfabricFabric(const LibfabricFabric&) = delete;
  LibfabricFabric& operator=(const LibfabricFabric&) = delete;

  std::string name() const override;
  int endpoints() const override;
  std::string endpoint_name(int endpoint) const override;
  Blob address() const override;
  void insert_peer(int peer, const Blob& address) override;
  // Forgets the peer: every write to it that is still under way comes back as Failed, once, and whatever the provider says of it
  // later is dropped. The provider is not told: taking a dead peer out of shm's table unmaps memory that its pending writes still
  // use.
  void remove_peer(int peer) override;
  LocalRegion register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) override;
  LocalRegion register_device_memory(const DeviceMemory& memory) override;   // only if opened for it, see Options::device_memory
  void unregister_memory(const LocalRegion& region) override;
  RemoteRegion import_region(int peer, const Blob& description) const override;
  Post write(const Write& write) override;
  int poll(Completion* out, int capacity) override;
  std::string describe_error(const Completion& failed) const override;

  std::string provider() const;                      // one of libfabric::kProviders
  std::string why_these() const;                     // why these NICs were chosen
  int proxy_cpu() const;                             // where its proxy should run; -1: anywhere
  std::size_t max_write_bytes() const;               // the largest write
  std::vector<std::string> shm_names() const;        // files in /dev/shm, see shm_files.h; empty for other providers
  // Does the destructor's work; any later call but close() throws FabricError. In a forked child it does nothing: all of it is the
  // parent's.
  void close();
  // In place of close(), by any thread, when the one that drives this fabric hangs in the provider: only the files in /dev/shm go.
  void abandon() const;

 private:
  struct State;
  State& open() const;
  std::unique_ptr<State> state_;
  const ForkCheck fork_;
};

}  // namespace pplx
