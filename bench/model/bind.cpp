// Python's view of the model: costs and shapes in, times out.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "garden.h"
#include "micro.h"
#include "ours.h"
#include "protocol/block.h"
#include "proxy/fabric.h"
#include "rows.h"

namespace py = pybind11;

namespace pplx::model {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

void check(const Shape& shape, const FabricCosts& fabric) {
  Config c = config_of(shape, 0);
  if (const char* why = invalid(c)) throw py::value_error(why);
  if (shape.top_k > shape.experts) throw py::value_error("a token cannot choose more experts than there are");
  if (shape.node_size == 0 || shape.ranks % shape.node_size != 0) throw py::value_error("nodes are of one size");
  if (fabric.nics < 1 || fabric.nics > static_cast<std::uint32_t>(kMaxEndpoints)) throw py::value_error("1 to 16 NICs a rank");
  if (fabric.bytes_per_us <= 0 || fabric.chunk_bytes == 0 || fabric.depth == 0)
    throw py::value_error("a NIC needs bandwidth, chunks and a queue");
}

std::vector<Result> run_ours(const Shape& shape, const FabricCosts& fabric, const OurCosts& costs, std::uint64_t seed) {
  check(shape, fabric);
  const Routing routing = random_routing(shape, seed);
  Ours ours(shape, routing, fabric, costs);
  Result dispatch = ours.dispatch();
  return {std::move(dispatch), ours.combine()};
}

std::vector<Result> run_garden(const Shape& shape, const FabricCosts& fabric, const GardenCosts& costs, std::uint64_t seed) {
  check(shape, fabric);
  if (shape.ranks == shape.node_size) throw py::value_error("on one node the replay has nothing to send");
  const Routing routing = random_routing(shape, seed);
  Garden garden(shape, routing, fabric, costs);
  Result dispatch = garden.dispatch();
  return {std::move(dispatch), garden.combine()};
}

std::vector<Result> run_rows(const Shape& shape, const FabricCosts& fabric, const RowsCosts& costs, std::uint64_t seed) {
  check(shape, fabric);
  const Routing routing = random_routing(shape, seed);
  Rows rows(shape, routing, fabric, costs, seed);
  Result dispatch = rows.dispatch();
  return {std::move(dispatch), rows.combine()};
}

// The bytes that must have travelled between nodes: {dispatch, combine}, headers included.
std::vector<std::uint64_t> bytes_between_nodes(const Shape& shape, std::uint64_t seed) {
  const Routing routing = random_routing(shape, seed);
  const Config c = config_of(shape, 0);
  std::vector<std::uint64_t> bytes(2, 0);
  for (std::uint32_t a = 0; a < shape.ranks; ++a)
    for (std::uint32_t b = 0; b < shape.ranks; ++b)
      if (!shape.same_node(a, b)) {
        bytes[0] += block_layout(c, Op::Dispatch).bytes(routing.rows_to(a, b));
        bytes[1] += block_layout(c, Op::Combine).bytes(routing.rows_to(a, b));
      }
  return bytes;
}

}  // namespace

PYBIND11_MODULE(_model, m) {
  m.doc() = "A discrete-event model of hosts' proxies and NICs.";
  py::class_<FabricCosts>(m, "FabricCosts")
      .def(py::init<>())
      .def_readwrite("nics", &FabricCosts::nics)
      .def_readwrite("bytes_per_us", &FabricCosts::bytes_per_us)
      .def_readwrite("latency_us", &FabricCosts::latency_us)
      .def_readwrite("ack_us", &FabricCosts::ack_us)
      .def_readwrite("nic_message_us", &FabricCosts::nic_message_us)
      .def_readwrite("post_us", &FabricCosts::post_us)
      .def_readwrite("completion_us", &FabricCosts::completion_us)
      .def_readwrite("poll_us", &FabricCosts::poll_us)
      .def_readwrite("depth", &FabricCosts::depth)
      .def_readwrite("interleave", &FabricCosts::interleave)
      .def_readwrite("chunk_bytes", &FabricCosts::chunk_bytes);
  py::class_<Shape>(m, "Shape")
      .def(py::init<>())
      .def_readwrite("ranks", &Shape::ranks)
      .def_readwrite("node_size", &Shape::node_size)
      .def_readwrite("tokens", &Shape::tokens)
      .def_readwrite("experts", &Shape::experts)
      .def_readwrite("top_k", &Shape::top_k)
      .def_readwrite("hidden", &Shape::hidden)
      .def_property(
          "fp8", [](const Shape& s) { return s.wire == Wire::FP8; },
          [](Shape& s, bool fp8) { s.wire = fp8 ? Wire::FP8 : Wire::Native; });
  py::class_<KernelTime>(m, "KernelTime")
      .def(py::init([](double fixed_us, double row_us) { return KernelTime{fixed_us, row_us}; }), py::arg("fixed_us"),
           py::arg("row_us"))
      .def_readwrite("fixed_us", &KernelTime::fixed_us)
      .def_readwrite("row_us", &KernelTime::row_us);
  py::class_<OurCosts>(m, "OurCosts")
      .def(py::init<>())
      .def_readwrite("dispatch_send", &OurCosts::dispatch_send)
      .def_readwrite("dispatch_recv", &OurCosts::dispatch_recv)
      .def_readwrite("combine_send", &OurCosts::combine_send)
      .def_readwrite("combine_recv", &OurCosts::combine_recv)
      .def_readwrite("mailbox_us", &OurCosts::mailbox_us)
      .def_readwrite("arrival_us", &OurCosts::arrival_us)
      .def_readwrite("mapped_us", &OurCosts::mapped_us)
      .def_readwrite("block_us", &OurCosts::block_us)
      .def_readwrite("word_us", &OurCosts::word_us)
      .def_readwrite("shard_bytes", &OurCosts::shard_bytes)
      .def_readwrite("part_bytes", &OurCosts::part_bytes)
      .def_readwrite("by_gpu", &OurCosts::by_gpu)
      .def_readwrite("gpu_post_us", &OurCosts::gpu_post_us)
      .def_readwrite("signal_us", &OurCosts::signal_us);
  py::class_<GardenCosts>(m, "GardenCosts")
      .def(py::init<>())
      .def_readwrite("first_us", &GardenCosts::first_us)
      .def_readwrite("dispatch_tail_us", &GardenCosts::dispatch_tail_us)
      .def_readwrite("combine_tail_us", &GardenCosts::combine_tail_us)
      .def_readwrite("submit_us", &GardenCosts::submit_us)
      .def_readwrite("flag_us", &GardenCosts::flag_us)
      .def_readwrite("route_row_us", &GardenCosts::route_row_us)
      .def_readwrite("private_copies", &GardenCosts::private_copies);
  py::class_<RowsCosts>(m, "RowsCosts")
      .def(py::init<>())
      .def_readwrite("dispatch", &RowsCosts::dispatch)
      .def_readwrite("combine", &RowsCosts::combine)
      .def_readwrite("gpu_post_us", &RowsCosts::gpu_post_us)
      .def_readwrite("signal_us", &RowsCosts::signal_us);
  py::class_<Result>(m, "Result")
      .def_readonly("finished", &Result::finished)
      .def_readonly("posted", &Result::posted)
      .def_readonly("free", &Result::free)
      .def_readonly("writes", &Result::writes)
      .def_readonly("again", &Result::again)
      .def_readonly("bytes_posted", &Result::bytes_posted)
      .def_readonly("bytes_landed", &Result::bytes_landed)
      .def_readonly("most_bytes_in", &Result::most_bytes_in)
      .def_readonly("host_us", &Result::host_us);
  m.def("run_ours", &run_ours, py::arg("shape"), py::arg("fabric"), py::arg("costs"), py::arg("seed"), Unlocked(),
        "A dispatch, and its combine.");
  m.def("run_garden", &run_garden, py::arg("shape"), py::arg("fabric"), py::arg("costs"), py::arg("seed"), Unlocked());
  m.def("run_rows", &run_rows, py::arg("shape"), py::arg("fabric"), py::arg("costs"), py::arg("seed"), Unlocked());
  m.def("bytes_between_nodes", &bytes_between_nodes, py::arg("shape"), py::arg("seed"), Unlocked());
  m.def("single_write_us", &single_write_us, py::arg("fabric"), py::arg("submit_us"), py::arg("bytes"));
  m.def("paged_writes_us", &paged_writes_us, py::arg("fabric"), py::arg("submit_us"), py::arg("bytes"), py::arg("pages"));
  m.def(
      "bare_writes",
      [](const FabricCosts& fabric, std::uint32_t ranks, const std::vector<std::tuple<double, std::uint32_t, std::uint32_t,
         std::uint32_t, std::uint64_t>>& writes) {
        std::vector<BareWrite> all;
        for (const auto& [at, source, target, nic, bytes] : writes) {
          if (source >= ranks || target >= ranks || nic >= fabric.nics) throw py::value_error("there is no such rank or NIC");
          all.push_back({at, source, target, nic, bytes});
        }
        std::vector<std::pair<double, double>> times;
        for (const Times& t : bare_writes(fabric, ranks, all)) times.emplace_back(t.landed, t.acknowledged);
        return times;
      },
      py::arg("fabric"), py::arg("ranks"), py::arg("writes"),
      "Writes of (at, source, target, nic, bytes): when each landed and was acknowledged.");
}

}  // namespace pplx::model
