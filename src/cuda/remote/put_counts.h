#pragma once

#include "../common/arguments.h"

namespace pplx::cuda {

// A carrier that kernels drive (remote/carrier.cuh) counts its puts here, in device memory: by set, op, part and peer, anew in each
// generation.
struct PutCounts {
  std::uint64_t base[kMaxInFlight][kOps][kMostParts][kMaxPeers];    // this rank's signals at that time
  std::uint64_t turns[kMaxInFlight][kOps][kMostParts][kMaxPeers];   // that were heard of since
  std::uint64_t posted[kMaxInFlight][kOps][kMostParts][kMaxPeers];  // puts for the peer
};

}  // namespace pplx::cuda
