#include "sim_fabric.h"

#include <cstring>

namespace pplx::sim {
namespace {

template <typename T>
Blob blob_of(const T& value) {
  Blob blob(sizeof value);
  std::memcpy(blob.data(), &value, sizeof value);
  return blob;
}

template <typename T>
T read_blob(const Blob& blob) {
  T value{};
  if (blob.size() != sizeof value) throw Violation("a blob of another length than was given out");
  std::memcpy(&value, blob.data(), sizeof value);
  return value;
}

}  // namespace

std::string SimFabric::endpoint_name(int endpoint) const {
  return "sim" + std::to_string(port_.rank) + "." + std::to_string(endpoint);
}

Blob SimFabric::address() const { return blob_of(port_.number); }

void SimFabric::insert_peer(int peer, const Blob& address) { port_.peers[peer] = read_blob<std::uint32_t>(address); }

void SimFabric::remove_peer(int peer) { port_.peers.erase(peer); }

LocalRegion SimFabric::register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) {
  Network::Region region;
  region.base = static_cast<char*>(base);
  region.bytes = bytes;
  region.shared_bytes = shared_bytes;
  region.key = network_.new_key();
  port_.regions[region.key] = region;
  LocalRegion local;
  local.id = static_cast<int>(region.key);
  local.base = base;
  local.bytes = bytes;
  local.shared_bytes = shared_bytes;
  local.description = blob_of(region);
  return local;
}

void SimFabric::unregister_memory(const LocalRegion& region) { port_.regions.erase(static_cast<std::uint64_t>(region.id)); }

RemoteRegion SimFabric::import_region(int, const Blob& description) const {
  const auto region = read_blob<Network::Region>(description);
  RemoteRegion remote;
  remote.base = network_.profile().offsets ? 0 : reinterpret_cast<std::uint64_t>(region.base);
  remote.bytes = region.shared_bytes;
  for (std::uint64_t& key : remote.key) key = region.key;
  return remote;
}

std::string SimFabric::describe_error(const Completion& failed) const { return "error " + std::to_string(failed.error); }

}  // namespace pplx::sim
