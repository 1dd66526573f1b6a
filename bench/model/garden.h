// pplx-garden's protocol on the modelled fabric, to compare the model with published figures. Per step:
//
//   dispatch: route counts to every rank; tokens that fit the private buffers to every remote rank, one NIC a peer; once all counts
//             are here, the rest, split by bytes over the NICs; then a barrier of immediates
//   combine:  one range to every remote rank, split by bytes over the NICs; then a barrier
//
// A token travels once per expert that wants it. Taken from its sources: the order of peers, the halves in which NICs take them, a
// first write on every NIC at once and then up to 32 a round, and what each step waits for.
#pragma once

#include "routing.h"
#include "simulation.h"

namespace pplx::model {

struct GardenCosts {
  double first_us = 15;            // from the launch until the worker knows the routes
  double dispatch_tail_us = 18.0;  // the receive kernels, once everything is there
  double combine_tail_us = 13.7;
  double submit_us = 1.4;          // from the worker to the NIC's thread, up to its first write
  double flag_us = 1.45;           // from the worker's flag to the kernel that reads it
  double route_row_us = 0.005;     // the worker's part in a received copy's place
  std::uint32_t private_copies = 256;
};

Result run_garden(const Shape& shape, const Routing& routing, const FabricCosts& fabric, const GardenCosts& costs, Op op);

}  // namespace pplx::model
