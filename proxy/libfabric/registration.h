// Memory that NICs may reach, in two parts: the first that peers may write into, and what is only sent from.
#pragma once

#include <deque>
#include <vector>

#include "blobs.h"
#include "endpoint.h"

namespace pplx::libfabric {

struct Region {
  LocalRegion local;             // without a number
  RegionDescription description;
  std::vector<Handle<fid_mr>> shared, sources;   // indexed by endpoint; empty where that part is

  bool registered() const { return !shared.empty() || !sources.empty(); }
  void unregister() {
    shared.clear();
    sources.clear();
  }
  // The descriptor that the provider wants for the source of a write on that endpoint.
  void* descriptor(std::size_t offset, std::size_t endpoint) const {
    return fi_mr_desc((offset < local.shared_bytes || sources.empty() ? shared : sources).at(endpoint).get());
  }
};

Region register_everywhere(const Provider& provider, std::deque<Endpoint>& endpoints, const DeviceMemory& memory, bool on_device);

}  // namespace pplx::libfabric
