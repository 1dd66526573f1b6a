// DeepEP's low-latency protocol on the modelled fabric: its published times test what the model assumes of GPUs that post. Per
// step:
//
//   dispatch: a row of a token to the rank of each of its experts, one put for each; then a count for each expert, behind its rows
//   combine:  a row back for each row that came, and a flag for each expert
//
// Within a node rows go by NVLink. Kernels post all the while that they send; a rank is done when all rows and counts are there.
// Rows of a rank leave in a random order, as tokens choose.
#pragma once

#include "ours.h"

namespace pplx::model {

// Half of a kernel's time is before the network and half behind it, as ours.
struct RowsCosts {
  KernelTime dispatch, combine;
  double gpu_post_us = 1.0;   // as OurCosts has them
  double signal_us = 1.0;
};

Result run_rows(const Shape& shape, const Routing& routing, const FabricCosts& fabric, const RowsCosts& costs, Op op,
                std::uint64_t seed);

}  // namespace pplx::model
