// A network for the stand-in of a carrier that kernels drive: a thread of the process that delivers puts late and in any order, a
// piece at a time. Its source is read when a piece is delivered. One has left when it has landed and a rank has asked often enough;
// a put from where an earlier one has not left ends the process. A link may break: see Cut in network.cpp. Everything follows from
// a seed (PPLX_SEED), but when the thread runs.
#pragma once

#include <cstdint>

namespace emulation {

struct Put {
  const char* own;        // whose blocks these are
  std::uint32_t rank, peer, context;
  char* to;               // as this rank has the same place
  const char* from;
  std::uint64_t bytes;    // 0: the signal alone
  char* signal;           // as this rank has the same place
};

void post(const Put& put);
bool has_left(const char* own, std::uint32_t peer, std::uint32_t context);
std::uint64_t error_of(const char* own, std::uint32_t peer);

}  // namespace emulation
