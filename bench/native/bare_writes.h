// The floor: the bare network, for a program that does nothing else.
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include "proxy/fabric.h"

namespace pplx {

struct BareWrite {
  int peer = 0;
  const RemoteRegion* target = nullptr;
  std::size_t bytes = 0;
  std::size_t source_offset = 0;
  std::size_t target_offset = 0;
};

// Posts `writes` (write i on endpoint i mod endpoints) and polls until all are Sent and `expected_arrivals` have Arrived; returns
// the time. Throws FabricError on a failed write, or past `timeout` with the counts so far. Arrivals beyond the expected ones, from
// a peer that is ahead, belong to the next run: `early_arrivals` carries them over and starts at 0.
std::chrono::nanoseconds run_bare_writes(Fabric& fabric, const LocalRegion& source, const std::vector<BareWrite>& writes,
                                         std::size_t expected_arrivals, std::size_t& early_arrivals,
                                         std::chrono::nanoseconds timeout);

}  // namespace pplx
