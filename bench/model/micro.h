// Two ranks: the microbenchmarks from which the costs come, and bare writes to study one mechanism at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "simulation.h"

namespace pplx::model {

// One write, split over the NICs, from the call until its completion was read.
double single_write_us(const FabricCosts& fabric, double submit_us, std::uint64_t bytes);

// The time of many writes of one size, shared by all NICs.
double paged_writes_us(const FabricCosts& fabric, double submit_us, std::uint64_t bytes, std::uint32_t pages);

struct BareWrite {
  double at = 0;
  std::uint32_t source = 0, target = 0, nic = 0;
  std::uint64_t bytes = 0;
};
struct Times {
  double landed = 0, acknowledged = 0;
};

// Without hosts: when each write lands and is acknowledged. A NIC's writes come in the order of their times.
std::vector<Times> bare_writes(const FabricCosts& fabric, std::uint32_t ranks, const std::vector<BareWrite>& writes);

}  // namespace pplx::model
