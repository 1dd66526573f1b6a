#include "bare_writes.h"

#include <sched.h>

#include <string>

namespace pplx {

std::chrono::nanoseconds run_bare_writes(Fabric& fabric, const LocalRegion& source, const std::vector<BareWrite>& writes,
                                         std::size_t expected_arrivals, std::size_t& early_arrivals,
                                         std::chrono::nanoseconds timeout) {
  using Clock = std::chrono::steady_clock;
  constexpr int kCapacity = 64;
  const Clock::time_point start = Clock::now();
  const auto endpoints = static_cast<std::size_t>(fabric.endpoints());
  std::size_t posted = 0, sent = 0, arrived = early_arrivals;
  Write next;
  next.source = &source;
  Completion completions[kCapacity];
  while (sent < writes.size() || arrived < expected_arrivals) {
    while (posted < writes.size()) {
      const BareWrite& write = writes[posted];
      next.endpoint = static_cast<int>(posted % endpoints);
      next.peer = write.peer;
      next.source_offset = write.source_offset;
      next.bytes = write.bytes;
      next.target = write.target;
      next.target_offset = write.target_offset;
      next.immediate = static_cast<std::uint32_t>(posted);
      next.context = posted;
      if (fabric.write(next) == Post::Again) break;
      ++posted;
    }
    const int count = fabric.poll(completions, kCapacity);
    for (int i = 0; i < count; ++i) {
      if (completions[i].kind == Completion::Kind::Failed)
        throw FabricError("bare writes: " + fabric.describe_error(completions[i]));
      (completions[i].kind == Completion::Kind::Sent ? sent : arrived) += 1;
    }
    if (count > 0) continue;
    if (Clock::now() - start > timeout) {
      throw FabricError("bare writes: after " +
                        std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count()) + " ms posted " +
                        std::to_string(posted) + ", sent " + std::to_string(sent) + " of " + std::to_string(writes.size()) +
                        ", arrived " +
                        std::to_string(arrived) + " of " + std::to_string(expected_arrivals) + " [" + fabric.name() + "]");
    }
    sched_yield();
  }
  early_arrivals = arrived - expected_arrivals;
  return Clock::now() - start;
}

}  // namespace pplx
