// Python's view of the model: costs and shapes in, times out.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "garden.h"
#include "micro.h"
#include "ours.h"
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
  if (shape.groups > kGroups || (shape.groups > 0 && (shape.experts % kGroups != 0 || shape.experts / kGroups < 2 ||
      shape.groups * (shape.experts / kGroups) < shape.top_k)))
    throw py::value_error("a token chooses among all its groups' experts, of 8 equal groups");
  if (shape.node_size == 0 || shape.ranks % shape.node_size != 0) throw py::value_error("nodes are of one size");
  if (fabric.nics < 1 || fabric.nics > static_cast<std::uint32_t>(kMaxEndpoints)) throw py::value_error("1 to 16 NICs a rank");
  if (fabric.bytes_per_us <= 0 || fabric.chunk_bytes == 0 || fabric.depth == 0)
    throw py::value_error("a NIC needs bandwidth, chunks and a queue");
}

std::vector<Result> ours(const Shape& shape, const FabricCosts& fabric, const OurCosts& costs, std::uint64_t seed) {
  check(shape, fabric);
  if (costs.combine_fp8 && !costs.by_node) throw py::value_error("only relays send rows in FP8 back");
  return run_ours(shape, random_routing(shape, seed), fabric, costs);
}

// A dispatch, and its combine.
template <typename Run>
std::vector<Result> both(const Shape& shape, const FabricCosts& fabric, std::uint64_t seed, const Run& run) {
  check(shape, fabric);
  const Routing routing = random_routing(shape, seed);
  return {run(routing, Op::Dispatch), run(routing, Op::Combine)};
}

std::vector<Result> garden(const Shape& shape, const FabricCosts& fabric, const GardenCosts& costs, std::uint64_t seed) {
  if (shape.ranks == shape.node_size) throw py::value_error("on one node the replay has nothing to send");
  return both(shape, fabric, seed, [&](const Routing& routing, Op op) { return run_garden(shape, routing, fabric, costs, op); });
}

std::vector<Result> rows(const Shape& shape, const FabricCosts& fabric, const RowsCosts& costs, std::uint64_t seed) {
  return both(shape, fabric, seed,
              [&](const Routing& routing, Op op) { return run_rows(shape, routing, fabric, costs, op, seed); });
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
      .def_readwrite("groups", &Shape::groups)
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
      .def_readwrite("signal_us", &OurCosts::signal_us)
      .def_readwrite("by_node", &OurCosts::by_node)
      .def_readwrite("combine_fp8", &OurCosts::combine_fp8)
      .def_readwrite("pass_on_us", &OurCosts::pass_on_us)
      .def_readwrite("pull_us", &OurCosts::pull_us)
      .def_readwrite("pull_bytes_per_us", &OurCosts::pull_bytes_per_us);
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
      .def_readonly("writes", &Result::writes)
      .def_readonly("bytes_posted", &Result::bytes_posted)
      .def_readonly("bytes_landed", &Result::bytes_landed)
      .def_readonly("host_us", &Result::host_us);
  py::class_<Routing>(m, "Routing")
      .def_readonly("ids", &Routing::ids)
      .def("rows_to", &Routing::rows_to)
      .def("rows_to_node", &Routing::rows_to_node);
  m.def("random_routing", &random_routing, py::arg("shape"), py::arg("seed"), Unlocked());
  m.def("run_ours", &ours, py::arg("shape"), py::arg("fabric"), py::arg("costs"), py::arg("seed"), Unlocked());
  m.def("run_garden", &garden, py::arg("shape"), py::arg("fabric"), py::arg("costs"), py::arg("seed"), Unlocked());
  m.def("run_rows", &rows, py::arg("shape"), py::arg("fabric"), py::arg("costs"), py::arg("seed"), Unlocked());
  m.def("single_write_us", &single_write_us, py::arg("fabric"), py::arg("submit_us"), py::arg("bytes"));
  m.def("paged_writes_us", &paged_writes_us, py::arg("fabric"), py::arg("submit_us"), py::arg("bytes"), py::arg("pages"));
}

}  // namespace pplx::model
