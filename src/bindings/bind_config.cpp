// Python's view of what one AllToAll is, of the routing of a step, and of where a dispatch leaves its tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../host/halves.h"
#include "../host/output_layout.h"
#include "../protocol/hooks.h"
#include "../protocol/heap_layout.h"
#include "../protocol/nodes.h"
#include "../protocol/plan.h"
#include "../protocol/relay_layout.h"

namespace py = pybind11;

namespace pplx {
namespace {

struct HookLayout {
  std::uint32_t arrived, count, words;
};

void bind_config_struct(py::module_& m) {
  py::enum_<Dtype>(m, "Dtype").value("BFLOAT16", Dtype::BFloat16).value("FLOAT16", Dtype::Float16).value("FLOAT32", Dtype::Float32);
  py::enum_<Wire>(m, "Wire")
      .value("NATIVE", Wire::Native)
      .value("FP8", Wire::FP8)
      .value("FP8_UE8M0", Wire::FP8_UE8M0)
      .value("MXFP8", Wire::MXFP8);
  py::enum_<LayoutKind>(m, "LayoutKind")
      .value("RAGGED", LayoutKind::Ragged)
      .value("PADDED", LayoutKind::Padded)
      .value("COMPACT", LayoutKind::Compact);
  py::class_<Config>(m, "Config")
      .def(py::init<>())
      .def_readwrite("rank", &Config::rank)
      .def_readwrite("world", &Config::world)
      .def_readwrite("num_experts", &Config::num_experts)
      .def_readwrite("top_k", &Config::top_k)
      .def_readwrite("hidden", &Config::hidden)
      .def_readwrite("max_tokens", &Config::max_tokens)
      .def_readwrite("replicas", &Config::replicas)
      .def_readwrite("in_flight", &Config::in_flight)
      .def_readwrite("align", &Config::align)
      .def_readwrite("max_rows", &Config::max_rows)
      .def_readwrite("max_per_expert", &Config::max_per_expert)
      .def_readwrite("slot_bytes", &Config::slot_bytes)
      .def_readwrite("part_bytes", &Config::part_bytes)
      .def_readwrite("whole_tokens", &Config::whole_tokens)
      .def_readwrite("remote_peers", &Config::remote_peers)
      .def_readwrite("mapped_first", &Config::mapped_first)
      .def_readwrite("mapped_slots", &Config::mapped_slots)
      .def_readwrite("remote_slots", &Config::remote_slots)
      .def_readwrite("node_ranks", &Config::node_ranks)
      .def_readwrite("combine_fp8", &Config::combine_fp8)
      .def_readwrite("on_gpu", &Config::on_gpu)
      .def_readwrite("first_step", &Config::first_step)
      .def_readwrite("object", &Config::object)
      .def_readwrite("dtype", &Config::dtype)
      .def_readwrite("wire", &Config::wire)
      .def_readwrite("layout", &Config::layout)
      .def_readwrite("zero_pad", &Config::zero_pad)
      .def_readwrite("scale_tma", &Config::scale_tma)
      .def_property_readonly("invalid", [](const Config& c) { return invalid(c) == nullptr ? "" : invalid(c); })
      .def_property_readonly("in_pieces", [](const Config& c) { return in_pieces(c); }, "True if blocks may go in pieces.")
      .def_property_readonly("whole_slot_bytes", [](const Config& c) { return bytes_of_slots(c, max_rows_of_block(c)); },
                             "The least slot_bytes with which all blocks are whole.")
      .def_property_readonly("least_slot_bytes", [](const Config& c) { return least_slot_bytes(c); },
                             "The least slot_bytes for steps that never go in pieces.")
      .def_property_readonly("heap_bytes", [](const Config& c) { return heap_of(c).bytes; })
      .def_property_readonly("relay_bytes",
                             [](const Config& c) {
                               if (c.node_ranks == 0) return std::uint64_t{0};
                               const std::uint32_t others = ceil_div(c.world, c.node_ranks) - 1;
                               return c.on_gpu ? relay_layout(c, others).bytes : rail_area(c, others + 1, others).bytes;
                             },
                             "With node_ranks: size of this rank's rails, where nodes are of one size.")
      .def_property_readonly("mapped_bytes", [](const Config& c) { return heap_of(c).mapped_bytes; },
                             "Size of the part that mapped peers write into; on GPUs a memory of its own.")
      .def_property_readonly("experts_per_rank", [](const Config& c) { return experts_per_rank(c); })
      .def_property_readonly("local_experts", [](const Config& c) { return local_experts(c, c.rank); })
      .def_property_readonly("scales_per_row", [](const Config& c) { return scales_per_row(c); })
      .def_property_readonly("scale_block", [](const Config& c) { return scale_block(c.wire); }, "Elements that share a scale.")
      .def_property_readonly("scale_bytes", [](const Config& c) { return scale_bytes(c); }, "Bytes of a row's scales.")
      .def_property_readonly("payload_bytes", [](const Config& c) { return payload_bytes(c); },
                             "Bytes of a row without its scales.")
      .def("row_bytes", [](const Config& c, int op) { return block_layout(c, Op(op)).row_bytes; },
           "Bytes of a row on the wire, by op.")
      .def("header_bytes", [](const Config& c, int op) { return block_layout(c, Op(op)).header_bytes; },
           "Bytes of a block's header, by op.");
}

void bind_plan(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan", "The destinations of each row, and the place of each choice.")
      .def_readonly("tokens", &Plan::tokens)
      .def_readonly("ids", &Plan::ids)
      .def_readonly("index", &Plan::index)
      .def_readonly("counts", &Plan::counts)
      .def_readonly("rows_begin", &Plan::rows_begin)
      .def_readonly("row_token", &Plan::row_token)
      .def_readonly("token_begin", &Plan::token_begin)
      .def_property_readonly("token_rows",
                             [](const Plan& plan) {
                               std::vector<std::pair<std::uint32_t, std::uint32_t>> rows;
                               for (const RowRef& row : plan.token_rows) rows.emplace_back(row.rank, row.row);
                               return rows;
                             })
      .def("rows", &Plan::rows, py::arg("rank"));
}

void bind_layout(py::module_& m) {
  py::class_<OutputPart>(m, "OutputPart", "A tensor that a dispatch fills.")
      .def_readonly("at", &OutputPart::at, "Bytes from the start of the buffer that has it.")
      .def_readonly("dtype", &OutputPart::dtype, "As torch calls it.")
      .def_readonly("shape", &OutputPart::shape)
      .def_readonly("strides", &OutputPart::strides, "Elements.")
      .def_readonly("nbytes", &OutputPart::bytes);
  py::class_<OutputLayout>(m, "OutputLayout", "The tensors that a dispatch fills, and the buffer that has them.")
      .def_readonly("nbytes", &OutputLayout::bytes, "Size of the buffer.")
      .def_property_readonly("parts", [](const OutputLayout& layout) {
        std::map<std::string, OutputPart> parts;
        for (const auto& [name, part] : kOutputParts)
          if ((layout.*part).exists()) parts.emplace(name, layout.*part);
        return parts;
      }, "Tensors by name; only those that this layout and wire have.");
  m.def("output_layout", &cpu_output_layout, py::arg("config"),
        "On the CPU device: x and scale have memory of their own, all that is small lies in one buffer.");
  py::class_<HookLayout>(m, "HookLayout",
                         "Offsets of the words of a dispatch's hooks, in words from their start. The first one is `planned`.")
      .def_readonly("arrived", &HookLayout::arrived)
      .def_readonly("count", &HookLayout::count, "Words of `arrived`.")
      .def_readonly("words", &HookLayout::words, "All of them.");
  m.def("hook_layout", [](const Config& c) { return HookLayout{hook_arrived_at(c), hook_words(c), hook_words_in_all(c)}; },
        py::arg("config"));
  m.attr("RAISED") = kRaised;
  m.attr("HOOK_ROWS") = kHookRows;
  m.attr("SEND") = static_cast<unsigned>(kSend);
  m.attr("RECV") = static_cast<unsigned>(kRecv);
  m.attr("BOTH") = static_cast<unsigned>(kSend | kRecv);
}

}  // namespace

void bind_config(py::module_& m) {
  bind_config_struct(m);
  bind_plan(m);
  bind_layout(m);
}

}  // namespace pplx
