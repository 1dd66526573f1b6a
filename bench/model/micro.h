// Two ranks: the microbenchmarks from which the costs come.
#pragma once

#include <cstdint>

#include "simulation.h"

namespace pplx::model {

// One write, split over the NICs, from the call until its completion was read.
double single_write_us(const FabricCosts& fabric, double submit_us, std::uint64_t bytes);

// The time of many writes of one size, shared by all NICs.
double paged_writes_us(const FabricCosts& fabric, double submit_us, std::uint64_t bytes, std::uint32_t pages);

}  // namespace pplx::model
