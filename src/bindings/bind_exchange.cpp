// Python's view of one AllToAll: addresses and numbers in, never a tensor.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "cpu/exchange.h"
#include "memory/mapping.h"
#include "memory/output_pool.h"
#include "shared_exchange.h"

namespace py = pybind11;

namespace pplx {
namespace {

using cpu::Exchange;
using Address = std::uintptr_t;

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

// Ctrl-C while a call waits: only Python can say whether a signal asks for an exception.
void check_signals() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

template <typename Id>
std::shared_ptr<const Plan> plan_of(const Config& c, const Id* ids, std::uint32_t tokens, const std::vector<bool>& alive) {
  for (std::size_t i = 0; i < std::size_t{tokens} * c.top_k; ++i)
    if (ids[i] < -1 || ids[i] >= static_cast<std::int64_t>(c.num_experts))
      throw Misuse("topk_ids[" + std::to_string(i / c.top_k) + ", " + std::to_string(i % c.top_k) + "] is " + std::to_string(ids[i]) +
                   ": expert ids are 0 to " + std::to_string(c.num_experts - 1) + ", or -1 to drop the choice");
  return std::make_shared<const Plan>(make_plan(c, ids, tokens, &alive));
}

std::shared_ptr<const Plan> bound_make_plan(const Config& config, Address ids, bool wide, std::uint32_t tokens,
                                            const std::vector<bool>& alive) {
  const py::gil_scoped_release unlocked;
  return wide ? plan_of(config, pointer<const std::int64_t>(ids), tokens, alive)
              : plan_of(config, pointer<const std::int32_t>(ids), tokens, alive);
}

py::object error_class(const char* name) { return py::module_::import("pplx_comm.errors").attr(name); }

void raise_peer_failure(const PeerFailure& f) {
  const py::object rank = f.peer == kNoRank ? py::object(py::none()) : py::object(py::int_(f.peer));
  const auto text = [](const std::string& s) { return s.empty() ? py::object(py::none()) : py::object(py::str(s)); };
  const py::object cls = error_class(f.reason == AbortReason::Timeout ? "StepTimeout" : "PeerError");
  const py::object error = cls(f.what(), py::arg("peer") = rank, py::arg("phase") = phase_name(f.phase), py::arg("step") = f.step,
                               py::arg("expected") = text(f.expected), py::arg("seen") = text(f.seen));
  PyErr_SetObject(cls.ptr(), error.ptr());
}

void bind_config(py::module_& m) {
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
      .def_readwrite("remote_peers", &Config::remote_peers)
      .def_readwrite("spaced_sends", &Config::spaced_sends)
      .def_readwrite("first_step", &Config::first_step)
      .def_readwrite("object", &Config::object)
      .def_readwrite("dtype", &Config::dtype)
      .def_readwrite("wire", &Config::wire)
      .def_readwrite("layout", &Config::layout)
      .def_readwrite("zero_pad", &Config::zero_pad)
      .def_readwrite("scale_tma", &Config::scale_tma)
      .def_property_readonly("invalid", [](const Config& c) { return invalid(c) == nullptr ? "" : invalid(c); })
      .def_property_readonly("heap_bytes", [](const Config& c) { return heap_of(c).bytes; })
      .def_property_readonly("shared_bytes", [](const Config& c) { return heap_of(c).shared_bytes; }, "Of the part that peers write into.")
      .def_property_readonly("experts_per_rank", [](const Config& c) { return experts_per_rank(c); })
      .def_property_readonly("local_experts", [](const Config& c) { return local_experts(c, c.rank); })
      .def_property_readonly("scales_per_row", [](const Config& c) { return scales_per_row(c); })
      .def_property_readonly("scale_block", [](const Config& c) { return scale_block(c.wire); }, "Elements that share a scale.")
      .def_property_readonly("scale_bytes", [](const Config& c) { return scale_bytes(c); }, "Bytes of a row's scales.")
      .def_property_readonly("payload_bytes", [](const Config& c) { return payload_bytes(c); }, "Bytes of a row without its scales.")
      .def("row_bytes", [](const Config& c, int op) { return block_layout(c, Op(op)).row_bytes; }, "Bytes of a row on the wire, by op.")
      .def("header_bytes", [](const Config& c, int op) { return block_layout(c, Op(op)).header_bytes; }, "Bytes of a block's header, by op.");
}

void bind_plan(py::module_& m) {
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan", "Who gets which row, and where each choice goes.")
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
  m.def("make_plan",
        [](const Config& config, Address ids, bool wide, std::uint32_t tokens, const std::vector<bool>& alive) {
          return std::const_pointer_cast<Plan>(bound_make_plan(config, ids, wide, tokens, alive));
        },
        py::arg("config"), py::arg("ids"), py::arg("wide"), py::arg("tokens"), py::arg("alive"));
  py::class_<cpu::Received, std::shared_ptr<cpu::Received>>(m, "Received")
      .def_readonly("overflowed", &cpu::Received::overflowed)
      .def_readonly("needed_rows", &cpu::Received::needed_rows)
      .def_readonly("generation", &cpu::Received::generation)
      .def("rows", &cpu::Received::rows, py::arg("source"));
}

void bind_memory(py::module_& m) {
  py::class_<Mapping, std::shared_ptr<Mapping>>(m, "Mapping")
      .def(py::init<int, std::size_t>(), py::arg("fd"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("address", [](const Mapping& mapping) { return reinterpret_cast<Address>(mapping.data()); })
      .def_property_readonly("bytes", &Mapping::bytes);
  py::class_<OutputPool::Buffer>(m, "OutputBuffer", py::buffer_protocol()).def_buffer([](OutputPool::Buffer& buffer) {
    return py::buffer_info(reinterpret_cast<std::uint8_t*>(buffer.data()), static_cast<py::ssize_t>(buffer.bytes()), false);
  });
  py::class_<OutputPool, std::shared_ptr<OutputPool>>(m, "OutputPool")
      .def(py::init<>())
      .def("take", &OutputPool::take, py::arg("bytes"))
      .def("close", &OutputPool::close);
}

std::shared_ptr<SharedExchange> make_exchange(const Config& config, std::shared_ptr<Mapping> own,
                                              const std::map<std::uint32_t, std::shared_ptr<Mapping>>& peers, unsigned threads,
                                              double timeout) {
  const std::uint64_t bytes = heap_of(config).bytes;
  Exchange::Memory memory;
  memory.own = own->data();
  memory.peers.assign(config.world, nullptr);
  std::vector<std::shared_ptr<Mapping>> mappings{std::move(own)};
  memory.peers[config.rank] = memory.own;
  for (const auto& [rank, mapping] : peers) {
    memory.peers.at(rank) = mapping->data();
    mappings.push_back(mapping);
  }
  if (mappings.front()->bytes() < bytes) throw Misuse("the mapped memory is smaller than the heap");
  return std::make_shared<SharedExchange>(config, std::move(memory), std::move(mappings), threads, timeout);
}

void bind_phases(py::class_<SharedExchange, Carried, std::shared_ptr<SharedExchange>>& cls) {
  cls.def(
      "dispatch_send",
      [](SharedExchange& e, std::shared_ptr<Plan> plan, Address x, std::uint64_t x_stride, Address scales, std::uint64_t scale_row_stride,
         std::uint64_t scale_stride, Address weights, bool keep_own_rows) {
        cpu::DispatchInput in;
        in.plan = std::move(plan);
        in.x = {pointer<const char>(x), x_stride};
        in.scales = pointer<const char>(scales);
        in.scale_row_stride = scale_row_stride;
        in.scale_stride = scale_stride;
        in.weights = pointer<const float>(weights);
        in.keep_own_rows = keep_own_rows;
        const py::gil_scoped_release unlocked;
        return e.exchange.dispatch_send(in, check_signals);
      },
      py::arg("plan"), py::arg("x"), py::arg("x_stride"), py::arg("scales"), py::arg("scale_row_stride"), py::arg("scale_stride"),
      py::arg("weights"), py::arg("keep_own_rows"));
  cls.def(
      "dispatch_recv",
      [](SharedExchange& e, std::uint32_t step, Address x, Address scales, std::uint64_t scale_row_stride, std::uint64_t scale_stride,
         std::uint64_t scale_group_stride, Address counts, Address offsets, Address weights, Address src_rank, Address src_token, Address topk_ids, Address topk_weights,
         Address num_rows) {
        cpu::DispatchOutput out;
        out.x = pointer<char>(x);
        out.scales = pointer<char>(scales);
        out.scale_row_stride = scale_row_stride;
        out.scale_stride = scale_stride;
        out.scale_group_stride = scale_group_stride;
        out.counts = pointer<std::int32_t>(counts);
        out.offsets = pointer<std::int32_t>(offsets);
        out.weights = pointer<float>(weights);
        out.src_rank = pointer<std::int32_t>(src_rank);
        out.src_token = pointer<std::int32_t>(src_token);
        out.topk_ids = pointer<std::int32_t>(topk_ids);
        out.topk_weights = pointer<float>(topk_weights);
        out.num_rows = pointer<std::int32_t>(num_rows);
        const py::gil_scoped_release unlocked;
        return std::const_pointer_cast<cpu::Received>(e.exchange.dispatch_recv(step, out, check_signals));
      },
      py::arg("step"), py::kw_only(), py::arg("x"), py::arg("scales") = 0, py::arg("scale_row_stride") = 0, py::arg("scale_stride") = 0,
      py::arg("scale_group_stride") = 0, py::arg("counts"), py::arg("offsets") = 0, py::arg("weights") = 0, py::arg("src_rank"), py::arg("src_token"), py::arg("topk_ids") = 0,
      py::arg("topk_weights") = 0, py::arg("num_rows") = 0);
  cls.def(
      "combine_send",
      [](SharedExchange& e, std::uint32_t step, std::shared_ptr<cpu::Received> received, Address expert_out, std::uint64_t stride, bool weighted,
         bool uses_weights, Address weights, std::shared_ptr<Plan> plan, bool has_tail, Address tail) {
        cpu::CombineInput in;
        in.received = std::move(received);
        in.expert_out = {pointer<const char>(expert_out), stride};
        in.weighted = weighted;
        in.uses_weights = uses_weights;
        in.weights = pointer<const float>(weights);
        in.plan = std::move(plan);
        in.has_tail = has_tail;
        in.tail = pointer<const float>(tail);
        const py::gil_scoped_release unlocked;
        e.exchange.combine_send(step, in, check_signals);
      },
      py::arg("step"), py::arg("received"), py::arg("expert_out"), py::arg("stride"), py::arg("weighted"), py::arg("uses_weights"),
      py::arg("weights"), py::arg("plan"), py::arg("has_tail") = false, py::arg("tail") = 0);
  cls.def(
      "combine_recv",
      [](SharedExchange& e, std::uint32_t step, Address y, std::uint64_t stride, bool accumulate, Address tail) {
        const py::gil_scoped_release unlocked;
        e.exchange.combine_recv(step, {pointer<char>(y), stride, accumulate, pointer<float>(tail)}, check_signals);
      },
      py::arg("step"), py::arg("y"), py::arg("stride"), py::arg("accumulate"), py::arg("tail") = 0);
  cls.def(
      "release",
      [](SharedExchange& e, std::uint32_t step) {
        cpu::CombineInput in;
        in.release = true;
        const py::gil_scoped_release unlocked;
        e.exchange.combine_send(step, in, check_signals);
        e.exchange.combine_recv(step, {}, check_signals);
      },
      py::arg("step"));
}

void bind_life(py::class_<SharedExchange, Carried, std::shared_ptr<SharedExchange>>& cls) {
  cls.def(
         "fail",
         [](SharedExchange& e, const std::string& reason, int origin, int peer, std::uint32_t step, const std::string& message) {
           Abort abort;
           abort.reason = reason_named(reason);
           abort.origin = origin < 0 ? kNoRank : static_cast<std::uint32_t>(origin);
           abort.peer = peer < 0 ? kNoRank : static_cast<std::uint32_t>(peer);
           abort.step = step;
           e.exchange.fail(abort, message);
         },
         py::arg("reason"), py::arg("origin"), py::arg("peer"), py::arg("step"), py::arg("message"))
      .def("peer_left", [](SharedExchange& e, std::uint32_t peer) { e.exchange.peer_left(peer); }, py::arg("peer"))
      .def("name_networks", [](SharedExchange& e, std::vector<std::string> by_peer) { e.exchange.name_networks(std::move(by_peer)); },
           py::arg("by_peer"))
      .def("raise_trouble", [](SharedExchange& e) {
        e.exchange.raise_failure();
        e.exchange.raise_notice();
      })
      .def("reset", [](SharedExchange& e, std::uint32_t generation, const std::vector<bool>& alive) { e.exchange.reset(generation, alive); },
           py::arg("generation"), py::arg("alive"))
      .def_property_readonly("generation", [](const SharedExchange& e) { return e.exchange.generation(); })
      .def_property_readonly("open_steps", [](const SharedExchange& e) { return e.exchange.open_steps(); })
      .def_property_readonly("next_step", [](const SharedExchange& e) { return e.exchange.next_step(); })
      .def("stats", [](const SharedExchange& e) {
        const cpu::Stats s = e.exchange.stats();
        py::dict d;
        d["steps"] = s.steps;
        d["rows_sent"] = s.rows_sent;
        d["rows_received"] = s.rows_received;
        d["bytes_sent"] = s.bytes_sent;
        d["bytes_received"] = s.bytes_received;
        d["dispatch_send_seconds"] = s.seconds[0];
        d["dispatch_recv_seconds"] = s.seconds[1];
        d["combine_send_seconds"] = s.seconds[2];
        d["combine_recv_seconds"] = s.seconds[3];
        return d;
      });
}

}  // namespace

void bind_exchange(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const PeerFailure& failure) {
      raise_peer_failure(failure);
    } catch (const Misuse& misuse) {
      PyErr_SetString(error_class("Error").ptr(), misuse.what());
    }
  });
  bind_config(m);
  bind_plan(m);
  bind_memory(m);
  py::class_<Carried, std::shared_ptr<Carried>>(m, "Carried", "An AllToAll as its proxy sees it.");
  py::class_<SharedExchange, Carried, std::shared_ptr<SharedExchange>> cls(m, "Exchange");
  cls.def(py::init(&make_exchange), py::arg("config"), py::arg("own"), py::arg("peers"), py::arg("threads"), py::arg("timeout"));
  bind_phases(cls);
  bind_life(cls);
}

}  // namespace pplx
