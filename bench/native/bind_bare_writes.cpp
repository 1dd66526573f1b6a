// The bare provider under the clock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "bare_writes.h"

namespace py = pybind11;

namespace pplx {
namespace {

using WriteTuple = std::tuple<int, const RemoteRegion*, std::size_t, std::size_t, std::size_t>;

std::pair<std::vector<double>, std::size_t> bare_writes(Fabric& fabric, const LocalRegion& source,
                                                        const std::vector<WriteTuple>& tuples,
                                                        std::size_t expected_arrivals, int rounds, double timeout,
                                                        std::size_t early_arrivals) {
  std::vector<BareWrite> writes;
  for (const auto& [peer, target, bytes, source_offset, target_offset] : tuples)
    writes.push_back({peer, target, bytes, source_offset, target_offset});
  const auto limit = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(timeout));
  std::vector<double> seconds;
  const py::gil_scoped_release unlocked;
  for (int round = 0; round < rounds; ++round) {
    const auto took = run_bare_writes(fabric, source, writes, expected_arrivals, early_arrivals, limit);
    seconds.push_back(std::chrono::duration<double>(took).count());
  }
  return {std::move(seconds), early_arrivals};
}

}  // namespace

void bind_bare_writes(py::module_& m) {
  m.def("bare_writes", &bare_writes, py::arg("fabric"), py::arg("source"), py::arg("writes"), py::arg("expected_arrivals"),
        py::kw_only(), py::arg("rounds") = 1, py::arg("timeout") = 30.0, py::arg("early_arrivals") = 0,
        "`writes`: (peer, remote region, bytes, source offset, target offset). Returns the seconds of each round, and how many\n"
        "arrivals belong to the next call, which takes them as early_arrivals.");
}

}  // namespace pplx
