// The result of a simulated operation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simulation.h"

namespace pplx::model {

struct Result {
  std::vector<double> finished;         // indexed by rank: when the kernel would return
  double posted = 0;                    // when the last write was posted
  double free = 0;                      // when the last rank could start the next operation
  std::uint64_t writes = 0, again = 0;
  std::uint64_t bytes_posted = 0, bytes_landed = 0;
  std::uint64_t most_bytes_in = 0;      // the busiest NIC's
  double host_us = 0;                   // CPU time of the busiest host thread
};

// NICs never reset their counters; an operation is the difference.
inline std::vector<std::uint64_t> bytes_in(const Simulation& simulation, std::uint32_t ranks) {
  std::vector<std::uint64_t> bytes;
  for (std::uint32_t rank = 0; rank < ranks; ++rank)
    for (std::uint32_t nic = 0; nic < simulation.costs().nics; ++nic) bytes.push_back(simulation.bytes_in(rank, nic));
  return bytes;
}

inline void note_bytes(Result& result, const std::vector<std::uint64_t>& before, const std::vector<std::uint64_t>& after) {
  for (std::size_t i = 0; i < after.size(); ++i) {
    result.bytes_landed += after[i] - before[i];
    result.most_bytes_in = std::max(result.most_bytes_in, after[i] - before[i]);
  }
}

}  // namespace pplx::model
