// The base of most fabrics of tests: a region's key is its address, all peers are known, there are no errors to describe.
#pragma once

#include <string>

#include "../../proxy/fabric.h"

namespace pplx::test {

class PlainFabric : public Fabric {
 public:
  std::string name() const override { return "test"; }
  std::string endpoint_name(int endpoint) const override { return "nic" + std::to_string(endpoint); }
  Blob address() const override { return {}; }
  void insert_peer(int, const Blob&) override {}
  void remove_peer(int) override {}
  LocalRegion register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) override {
    LocalRegion region;
    region.base = base;
    region.bytes = bytes;
    region.shared_bytes = shared_bytes;
    return region;
  }
  void unregister_memory(const LocalRegion&) override {}
  RemoteRegion import_region(int, const Blob&) const override { return {}; }
  std::string describe_error(const Completion&) const override { return {}; }
};

}  // namespace pplx::test
