// The simulated network as one rank's Proxy sees it.
#pragma once

#include "network.h"

namespace pplx::sim {

class SimFabric final : public Fabric {
 public:
  SimFabric(Network& network, std::uint32_t rank, int endpoints) : network_(network), port_(network.open(rank, endpoints)) {}
  ~SimFabric() override { network_.close(port_.number); }
  SimFabric(const SimFabric&) = delete;
  SimFabric& operator=(const SimFabric&) = delete;

  Network::Port& port() { return port_; }

  std::string name() const override { return "sim"; }
  int endpoints() const override { return port_.endpoints; }
  std::string endpoint_name(int endpoint) const override;
  Blob address() const override;
  void insert_peer(int peer, const Blob& address) override;
  void remove_peer(int peer) override;
  LocalRegion register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) override;
  void unregister_memory(const LocalRegion& region) override;
  RemoteRegion import_region(int peer, const Blob& description) const override;
  Post write(const Write& write) override { return network_.post(port_, write); }
  int poll(Completion* out, int capacity) override { return network_.poll(port_, out, capacity); }
  std::string describe_error(const Completion& failed) const override;

 private:
  Network& network_;
  Network::Port& port_;
};

}  // namespace pplx::sim
