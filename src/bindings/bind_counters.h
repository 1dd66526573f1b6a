// The counters of an AllToAll as Python has them, from either module.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../host/counters.h"

namespace pplx {

inline pybind11::dict to_dict(const Counters& c) {
  pybind11::dict d;
  d["counted"] = c.counted;
  d["steps"] = c.steps;
  d["tokens"] = c.tokens;
  d["large_dispatches"] = c.large_dispatches;
  d["large_combines"] = c.large_combines;
  const auto by_rank = [&](const char* name, auto of) {
    pybind11::list values;
    for (const PeerCounters& peer : c.peers) values.append(of(peer));
    d[name] = values;
  };
  by_rank("rows_sent", [](const PeerCounters& peer) { return peer.rows_sent; });
  by_rank("rows_received", [](const PeerCounters& peer) { return peer.rows_received; });
  by_rank("bytes_sent", [](const PeerCounters& peer) { return peer.bytes_sent; });
  by_rank("bytes_received", [](const PeerCounters& peer) { return peer.bytes_received; });
  by_rank("dispatch_wait_seconds", [](const PeerCounters& peer) { return 1e-9 * static_cast<double>(peer.waited[0]); });
  by_rank("combine_wait_seconds", [](const PeerCounters& peer) { return 1e-9 * static_cast<double>(peer.waited[1]); });
  d["expert_rows"] = c.expert_rows;
  pybind11::dict phases;
  for (std::uint32_t i = 0; i < kTimed; ++i) {
    pybind11::dict phase;
    phase["seconds"] = 1e-9 * static_cast<double>(c.times[i].nanoseconds);
    phase["buckets"] = std::vector<std::uint64_t>(std::begin(c.times[i].counts), std::end(c.times[i].counts));
    phases[kTimedNames[i]] = phase;
  }
  d["phases"] = phases;
  return d;
}

}  // namespace pplx
