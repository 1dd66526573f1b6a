// The cost of a handover between a GPU and a host thread: a kernel and this thread answer each other; then a kernel plays the
// device of an AllToAll whose network costs nothing.
#pragma once

#include <cstdint>
#include <vector>

namespace pplx::cuda {

// Nanoseconds of each round: a word that the host stores, the kernel's answer, seen by the host.
std::vector<double> ping(int device, std::uint32_t rounds);

struct Handover {
  // Nanoseconds of each operation. From before the kernel's first mailbox store: until the first, and the last, of the writes for
  // all peers was posted; until the kernel has seen the arrival words of all. The clocks are compared by pings: the first two may
  // be off by half of the fastest ping.
  std::vector<double> first, last, seen;
  double ping = 0;   // the fastest
};
Handover handover(int device, std::uint32_t peers, int endpoints, std::uint32_t operations);

}  // namespace pplx::cuda
