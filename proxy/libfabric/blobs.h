// The two blobs that libfabric endpoints exchange out of band: an endpoint address and the description of a registered region.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../fabric.h"

namespace pplx::libfabric {

struct RegionDescription {
  std::uint64_t base = 0;
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> keys;           // indexed by endpoint
};

struct Address {
  std::string provider;
  std::string host;                          // boot id: the same for all processes of one host
  std::uint64_t pid_namespace = 0;           // a pid means something only inside it
  std::uint32_t pid = 0;
  std::uint64_t start_time = 0;              // with the pid, names one process: pids are used again
  std::vector<Blob> endpoints;               // the provider's form of the address
  std::vector<std::string> shm_names;        // files in /dev/shm that the provider made for these endpoints
  RegionDescription scratch;                 // a place that writes of zero bytes can aim at
};

Blob encode(const RegionDescription& description);
RegionDescription decode_region(const Blob& blob);     // both throw FabricError on a blob that is not theirs
Blob encode(const Address& address);
Address decode_address(const Blob& blob);

}  // namespace pplx::libfabric
