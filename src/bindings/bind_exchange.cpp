// Python's view of one AllToAll of the CPU device: addresses and numbers in, never a tensor.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "cpu/exchange.h"
#include "host/mapping.h"
#include "host/output_pool.h"
#include "host/standing.h"
#include "bind_counters.h"
#include "bind_structs.h"
#include "carried_exchange.h"

namespace py = pybind11;

namespace pplx {
namespace {

using cpu::Exchange;
using Address = std::uintptr_t;

// Ctrl-C while a call waits: only Python can say whether a signal asks for an exception.
void check_signals() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
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

void bind_memory(py::module_& m) {
  py::class_<Mapping, std::shared_ptr<Mapping>>(m, "Mapping")
      .def(py::init<int, std::size_t, bool>(), py::arg("fd"), py::arg("nbytes"), py::arg("touched") = true,
           py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("address", [](const Mapping& mapping) { return reinterpret_cast<Address>(mapping.data()); })
      .def_property_readonly("nbytes", &Mapping::bytes);
  py::class_<OutputPool::Buffer>(m, "OutputBuffer", py::buffer_protocol()).def_buffer([](OutputPool::Buffer& buffer) {
    return py::buffer_info(reinterpret_cast<std::uint8_t*>(buffer.data()), static_cast<py::ssize_t>(buffer.bytes()), false);
  });
  py::class_<OutputPool, std::shared_ptr<OutputPool>>(m, "OutputPool")
      .def(py::init<>())
      .def("take", &OutputPool::take, py::arg("nbytes"))
      .def("close", &OutputPool::close);
}

// The pages of a peer's heap that this rank writes. With the others, page tables and start-up would grow with the cube of the
// ranks.
void touch_written(const Mapping& theirs, const cpu::Blocks& blocks, std::uint32_t peer) {
  const Config& c = blocks.config();
  const Heap& heap = blocks.heap();
  const auto touch = [&](const char* at, std::uint64_t bytes) {
    theirs.touch(static_cast<std::size_t>(at - theirs.data()), bytes);
  };
  theirs.touch(0, heap.slots[0]);
  for (std::uint32_t set = 0; set < c.in_flight; ++set) {
    for (std::uint32_t op = 0; op < kOps; ++op) touch(blocks.slot_at_peer(set, Op(op), peer), heap.slot_bytes[op]);
    if (c.replicas > 1 && first_replica(c, peer) == first_replica(c, c.rank))
      touch(blocks.slice_at_peer(set, peer), heap.slice_bytes);
  }
}

std::shared_ptr<CarriedExchange> make_exchange(const Config& config, std::shared_ptr<Mapping> own,
                                              const std::map<std::uint32_t, std::shared_ptr<Mapping>>& peers, Nodes nodes,
                                              unsigned threads, double timeout, bool counts) {
  const std::uint64_t bytes = heap_of(config).bytes;
  cpu::Memory memory;
  memory.own = own->data();
  memory.nodes = std::move(nodes);
  memory.peers.assign(config.world, nullptr);
  std::vector<std::shared_ptr<Mapping>> mappings{std::move(own)};
  memory.peers[config.rank] = memory.own;
  for (const auto& [rank, mapping] : peers) {
    memory.peers.at(rank) = mapping->data();
    mappings.push_back(mapping);
  }
  if (mappings.front()->bytes() < bytes) throw Misuse("the mapped memory is smaller than the heap");
  auto exchange = std::make_shared<CarriedExchange>(config, std::move(memory), std::move(mappings), threads, timeout, counts);
  for (const auto& [rank, mapping] : peers) touch_written(*mapping, exchange->exchange.blocks(), rank);
  return exchange;
}

template <typename Id>
std::shared_ptr<Plan> plan_of(const cpu::Blocks& blocks, const Id* ids, std::uint32_t tokens) {
  const Config& c = blocks.config();
  for (std::size_t i = 0; i < std::size_t{tokens} * c.top_k; ++i)
    if (ids[i] < -1 || ids[i] >= static_cast<std::int64_t>(c.num_experts))
      throw Misuse("topk_ids[" + std::to_string(i / c.top_k) + ", " + std::to_string(i % c.top_k) + "] is " +
                   std::to_string(ids[i]) +
                   ": expert ids are 0 to " + std::to_string(c.num_experts - 1) + ", or -1 to drop the choice");
  return std::make_shared<Plan>(make_plan(c, ids, tokens, &blocks.alive(), &blocks.rails().rep));
}

void bind_structs(py::module_& m) {
  using Tokens = BoundStruct<cpu::Tokens>;
  Tokens::bind(m, "Tokens", "Inputs of a dispatch: addresses, 0 for none, and strides in bytes.",
               {Tokens::required<&cpu::Tokens::x, &cpu::Rows::data>("x"),
                Tokens::required<&cpu::Tokens::x, &cpu::Rows::stride>("stride"),
                Tokens::field<&cpu::Tokens::scales>("scales"),
                Tokens::field<&cpu::Tokens::scale, &ScaleStrides::row>("scale_row_stride"),
                Tokens::field<&cpu::Tokens::scale, &ScaleStrides::scale>("scale_stride"),
                Tokens::field<&cpu::Tokens::weights>("weights"), Tokens::field<&cpu::Tokens::keep_own_rows>("keep_own_rows")});
  using Outputs = BoundStruct<cpu::Outputs>;
  Outputs::bind(m, "Outputs", "Outputs of a dispatch: addresses of x, of scale, and of the buffer of output_layout().",
                {Outputs::required<&cpu::Outputs::x>("x"), Outputs::field<&cpu::Outputs::scales>("scales"),
                 Outputs::required<&cpu::Outputs::small>("small"),
                 Outputs::field<&cpu::Outputs::hooks>("hooks")});
  using ExpertOutputs = BoundStruct<cpu::ExpertOutputs>;
  ExpertOutputs::bind(m, "ExpertOutputs", "Inputs of a combine: addresses, 0 for none, and strides in bytes.",
                      {ExpertOutputs::required<&cpu::ExpertOutputs::expert_out, &cpu::Rows::data>("expert_out"),
                       ExpertOutputs::required<&cpu::ExpertOutputs::expert_out, &cpu::Rows::stride>("stride"),
                       ExpertOutputs::required<&cpu::ExpertOutputs::weighted>("weighted"),
                       ExpertOutputs::field<&cpu::ExpertOutputs::uses_weights>("uses_weights"),
                       ExpertOutputs::field<&cpu::ExpertOutputs::weights>("weights"),
                       ExpertOutputs::field<&cpu::ExpertOutputs::has_tail>("has_tail"),
                       ExpertOutputs::field<&cpu::ExpertOutputs::tail>("tail")});
  using Result = BoundStruct<cpu::Result>;
  Result::bind(m, "Result", "Outputs of a combine: addresses, 0 for none, and a stride in bytes.",
               {Result::required<&cpu::Result::y>("y"), Result::required<&cpu::Result::stride>("stride"),
                Result::required<&cpu::Result::accumulate>("accumulate"), Result::field<&cpu::Result::tail>("tail")});
}

void bind_phases(py::class_<CarriedExchange, Carried, std::shared_ptr<CarriedExchange>>& cls) {
  cls.def(
      "make_plan",
      [](const CarriedExchange& e, Address ids, bool wide, std::uint32_t tokens) {
        const py::gil_scoped_release unlocked;
        const cpu::Blocks& blocks = e.exchange.blocks();
        return wide ? plan_of(blocks, reinterpret_cast<const std::int64_t*>(ids), tokens)
                    : plan_of(blocks, reinterpret_cast<const std::int32_t*>(ids), tokens);
      },
      py::arg("ids"), py::arg("wide"), py::arg("tokens"));
  cls.def(
      "dispatch_send",
      [](CarriedExchange& e, std::shared_ptr<Plan> plan, const cpu::Tokens& tokens) {
        cpu::Tokens in = tokens;
        in.plan = std::move(plan);
        const py::gil_scoped_release unlocked;
        return e.exchange.dispatch_send(in, check_signals);
      },
      py::arg("plan"), py::arg("tokens"), "Returns the number of the step.");
  cls.def(
      "check_order", [](CarriedExchange& e, std::uint32_t step) { e.exchange.check_order(step, Phase::DispatchRecv); },
      py::arg("step"), "Raises if dispatch_recv may not receive this step yet.");
  cls.def(
      "dispatch_recv",
      [](CarriedExchange& e, std::uint32_t step, const cpu::Outputs& outputs) {
        const cpu::DispatchOutput out = cpu::dispatch_output(e.outputs, scale_strides(e.config()), outputs);
        const py::gil_scoped_release unlocked;
        return std::const_pointer_cast<cpu::Received>(e.exchange.dispatch_recv(step, out, check_signals));
      },
      py::arg("step"), py::arg("outputs"));
  cls.def(
      "combine_send",
      [](CarriedExchange& e, std::uint32_t step, std::shared_ptr<cpu::Received> received, std::shared_ptr<Plan> plan,
         const cpu::ExpertOutputs& outputs) {
        cpu::ExpertOutputs in = outputs;
        in.received = std::move(received);
        in.plan = std::move(plan);
        const py::gil_scoped_release unlocked;
        e.exchange.combine_send(step, in, check_signals);
      },
      py::arg("step"), py::arg("received"), py::arg("plan"), py::arg("outputs"));
  cls.def(
      "combine_recv",
      [](CarriedExchange& e, std::uint32_t step, const cpu::Result& result) {
        const cpu::Result out = result;
        const py::gil_scoped_release unlocked;
        e.exchange.combine_recv(step, out, check_signals);
      },
      py::arg("step"), py::arg("result"));
  cls.def(
      "release",
      [](CarriedExchange& e, std::uint32_t step) {
        cpu::ExpertOutputs in;
        in.release = true;
        const py::gil_scoped_release unlocked;
        e.exchange.check_order(step, Phase::CombineRecv);   // both halves, or none
        e.exchange.combine_send(step, in, check_signals);
        e.exchange.combine_recv(step, {}, check_signals);
      },
      py::arg("step"));
}

void bind_life(py::class_<CarriedExchange, Carried, std::shared_ptr<CarriedExchange>>& cls) {
  cls.def(
         "fail",
         [](CarriedExchange& e, const std::string& reason, int origin, int peer, std::uint32_t step, const std::string& message) {
           e.exchange.failures().fail(abort_named(reason, origin, peer, step), message);
         },
         py::arg("reason"), py::arg("origin"), py::arg("peer"), py::arg("step"), py::arg("message"))
      .def("close", [](CarriedExchange& e) { e.exchange.close(); }, "Ends the calls that other threads wait in.")
      .def("peer_left", [](CarriedExchange& e, std::uint32_t peer) { e.exchange.failures().peer_left(peer); }, py::arg("peer"))
      .def("peer_busy", [](CarriedExchange& e, std::uint32_t peer, bool busy) { e.exchange.failures().peer_busy(peer, busy); },
           py::arg("peer"), py::arg("busy"))
      .def(
          "name_networks",
          [](CarriedExchange& e, std::vector<std::string> by_peer) { e.exchange.failures().name_networks(std::move(by_peer)); },
          py::arg("by_peer"))
      .def("raise_trouble", [](CarriedExchange& e) {
        e.exchange.failures().raise();
        e.exchange.raise_notice();
      })
      .def(
          "reset",
          [](CarriedExchange& e, std::uint32_t generation, const std::vector<bool>& alive) { e.exchange.reset(generation, alive); },
          py::arg("generation"), py::arg("alive"))
      .def("relay_bytes", [](const CarriedExchange& e, std::uint32_t rank) { return e.exchange.blocks().relay_bytes(rank); },
           py::arg("rank"), "Bytes of the rails of a rank of this node that this rank maps.")
      .def("lay_relays", &CarriedExchange::lay_relays, py::arg("rails"), "Memory by rank, anew in each generation.")
      .def_property_readonly("network_peers", [](const CarriedExchange& e) { return e.exchange.blocks().network_peers(); },
                             "Living ranks with which this one exchanges blocks over the network.")
      .def_property_readonly("generation", [](const CarriedExchange& e) { return e.exchange.generation(); })
      .def_property_readonly("open_steps", [](const CarriedExchange& e) { return e.exchange.open_steps(); })
      .def_property_readonly("next_step", [](const CarriedExchange& e) { return e.exchange.next_step(); })
      .def_property_readonly(
          "teller", [](const std::shared_ptr<CarriedExchange>& e) { return std::shared_ptr<Teller>(new TellerOf<CarriedExchange>(e)); })
      .def("stats", [](const CarriedExchange& e) { return to_dict(e.exchange.counters()); });
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
  bind_structs(m);
  bind_memory(m);
  py::class_<cpu::Received, std::shared_ptr<cpu::Received>>(m, "Received")
      .def_readonly("overflowed", &cpu::Received::overflowed)
      .def_readonly("needed_rows", &cpu::Received::needed_rows)
      .def_readonly("generation", &cpu::Received::generation)
      .def("rows", &cpu::Received::rows, py::arg("source"));
  py::class_<Carried, std::shared_ptr<Carried>>(m, "Carried", "An AllToAll as its proxy sees it.");
  py::class_<CarriedExchange, Carried, std::shared_ptr<CarriedExchange>> cls(m, "Exchange");
  cls.def(py::init(&make_exchange), py::arg("config"), py::arg("own"), py::arg("peers"), py::arg("nodes"), py::arg("threads"),
          py::arg("timeout"), py::arg("counts"), py::call_guard<py::gil_scoped_release>());
  bind_phases(cls);
  bind_life(cls);
}

}  // namespace pplx
