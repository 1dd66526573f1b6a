// The floor: what the network does for a program that has nothing else to do.
#pragma once

#include <chrono>
#include <cstddef>
#include <vector>

#include "../fabric.h"

namespace pplx {

struct BareWrite {
  int peer = 0;
  const RemoteRegion* target = nullptr;
  std::size_t bytes = 0;
  std::size_t source_offset = 0;
  std::size_t target_offset = 0;
};

// Posts `writes` (write i on endpoint i mod endpoints) and polls until all are Sent and `expected_arrivals` have Arrived; how long that took.
// Throws FabricError on a failed write, or past `timeout` with the counts so far. Arrivals beyond the expected (a peer that is ahead) are the
// next run's: `early_arrivals` carries them over, it starts at 0.
std::chrono::nanoseconds run_bare_writes(Fabric& fabric, const LocalRegion& source, const std::vector<BareWrite>& writes,
                                         std::size_t expected_arrivals, std::size_t& early_arrivals, std::chrono::nanoseconds timeout);

}  // namespace pplx
