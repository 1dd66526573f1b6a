// bench/_instruments_cuda: the instruments that are kernels, or whose network is the GPU's copy engine.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <tuple>
#include <vector>

#include "copy_fabric.h"
#include "cuda/host/runtime.h"
#include "handover.h"
#include "kernels.h"

namespace py = pybind11;

namespace pplx::cuda {
namespace {

using Address = std::uintptr_t;
using Unlocked = py::call_guard<py::gil_scoped_release>;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

using RowBytes = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t>;

CompositeArguments composite(Address units, std::uint64_t count, Address others, std::uint32_t most,
                             const std::vector<RowBytes>& rows) {
  if (rows.size() != 2 || most > kMostCompositeOthers)
    throw py::value_error("a composite has rows of two kinds, and up to 32 others");
  CompositeArguments a;
  a.units = pointer<const CompositeUnit>(units);
  a.count = count;
  a.others = pointer<const std::uint64_t>(others);
  a.most = most;
  for (std::size_t kind = 0; kind < rows.size(); ++kind) {
    const auto& [bytes, part_bytes, source_bytes] = rows[kind];
    if (bytes % 16 != 0 || source_bytes % 16 != 0 || part_bytes % 128 != 0 || part_bytes > kMostCompositePart)
      throw py::value_error("a composite's rows are multiples of 16 bytes, their parts of 128, up to 8192");
    a.rows[kind] = {bytes, part_bytes, source_bytes};
  }
  return a;
}

void bind(py::module_& m) {
  py::class_<CompositeArguments>(m, "Composite",
                                 "Reads and stores of a step, all addresses known: see kernels.h and bench/gpu/composite.py.")
      .def(py::init(&composite), py::kw_only(), py::arg("units"), py::arg("count"), py::arg("others"), py::arg("most"),
           py::arg("rows"),
           "Addresses in GPU memory. `rows`: of each kind the bytes that are stored, those of a part, and those of the row that is "
           "read.")
      .def(
          "spread",
          [](const CompositeArguments& a, Address stream, std::uint32_t blocks, std::uint32_t fold) {
            check(launch_spread(a, fold, blocks, pointer<CUstream_st>(stream)), "launching spread");
          },
          py::arg("stream"), py::arg("blocks"), py::arg("fold"),
          "Each row to its places. `fold`: how many bytes of kind 0 become one.")
      .def(
          "gather",
          [](const CompositeArguments& a, Address stream, std::uint32_t blocks, Dtype dtype) {
            check(launch_gather(a, dtype, blocks, pointer<CUstream_st>(stream)), "launching gather");
          },
          py::arg("stream"), py::arg("blocks"), py::arg("dtype"), "The sum of rows to each place.")
      .def(
          "bulk",
          [](const CompositeArguments& a, Address stream, std::uint32_t blocks) {
            check(launch_bulk(a, blocks, pointer<CUstream_st>(stream)), "launching bulk");
          },
          py::arg("stream"), py::arg("blocks"), "A spread without a fold, by bulk copies.");
  m.def(
      "hold",
      [](Address words, std::uint32_t multiprocessors, double seconds, Address stream) {
        const auto limit = static_cast<std::uint64_t>(seconds * 1e9);
        check(launch_hold(pointer<std::uint64_t>(words), multiprocessors, limit, pointer<CUstream_st>(stream)), "launching hold");
      },
      py::arg("words"), py::arg("multiprocessors"), py::arg("seconds"), py::arg("stream"),
      "Holds multiprocessors until words[0] is not zero, and no longer than that; each sets one of the words after it. "
      "int64 in pinned memory.");
  m.def("ping", &ping, py::arg("device"), py::arg("rounds"), Unlocked(),
        "Nanoseconds from the host to the GPU and back, of each round.");
  m.def(
      "handover",
      [](int device, std::uint32_t peers, int endpoints, std::uint32_t operations) {
        Handover h;
        {
          const py::gil_scoped_release unlocked;
          h = handover(device, peers, endpoints, operations);
        }
        py::dict d;
        d["first"] = h.first;
        d["last"] = h.last;
        d["seen"] = h.seen;
        d["ping"] = h.ping;
        return d;
      },
      py::arg("device"), py::arg("peers"), py::arg("endpoints"), py::arg("operations"),
      "Nanoseconds from a kernel's first mailbox store to the first post, to the last, and to all arrivals seen, over a network "
      "that costs nothing; `ping`: the fastest way there and back, whose half the first two may be off by.");
  py::class_<CopyFabric, Fabric, std::shared_ptr<CopyFabric>>(
      m, "CopyFabric", "A fabric between the AllToAlls of one process, whose NIC is the GPU's copy engine.")
      .def(py::init<int>(), py::arg("device"))
      .def_property_readonly("provider", [](const CopyFabric&) { return "copy"; })
      .def_property_readonly("why", [](const CopyFabric&) { return "a test asks for it"; })
      .def_property_readonly("proxy_cpu", [](const CopyFabric&) { return -1; })
      .def("close", &CopyFabric::close, Unlocked());
}

}  // namespace
}  // namespace pplx::cuda

PYBIND11_MODULE(_instruments_cuda, m) {
  m.doc() = "Instruments of the benchmarks and tests that need CUDA; no part of pplx_comm.";
  pybind11::module_::import("pplx_comm._core");   // has the fabrics and their errors
  pplx::cuda::bind(m);
}
