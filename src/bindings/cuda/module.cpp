// Python's view of the CUDA device: addresses and numbers in, never a tensor. Config and the errors are _core's.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bind_counters.h"
#include "bindings/bind_trace.h"
#include "bindings/bound_struct.h"
#include "cuda/common/stages.h"
#include "cuda/host/exchange.h"

namespace py = pybind11;

namespace pybind11::detail {

template <>
struct type_caster<pplx::cuda::Launch> : pplx::BoundCaster<pplx::cuda::Launch> {
  static constexpr auto name = const_name("Launch");
};
template <>
struct type_caster<pplx::cuda::Tokens> : pplx::BoundCaster<pplx::cuda::Tokens> {
  static constexpr auto name = const_name("Tokens");
};
template <>
struct type_caster<pplx::cuda::Outputs> : pplx::BoundCaster<pplx::cuda::Outputs> {
  static constexpr auto name = const_name("Outputs");
};
template <>
struct type_caster<pplx::cuda::ExpertOutputs> : pplx::BoundCaster<pplx::cuda::ExpertOutputs> {
  static constexpr auto name = const_name("ExpertOutputs");
};
template <>
struct type_caster<pplx::cuda::Result> : pplx::BoundCaster<pplx::cuda::Result> {
  static constexpr auto name = const_name("Result");
};

}  // namespace pybind11::detail

namespace pplx::cuda {
namespace {

using Address = std::uintptr_t;
using Unlocked = py::call_guard<py::gil_scoped_release>;

// The module of a carrier that kernels drive has the same classes, and a process may load both.
#ifdef PPLX_CARRIER
const py::module_local kLocal(true);
#else
const py::module_local kLocal(false);
#endif

// Returns 0 where there is no driver: a failed call leaves its argument alone.
int number_of(cudaError_t (*query)(int*)) {
  int number = 0;
  query(&number);
  return number;
}

// As sysfs spells it, where NICs are looked for near it.
std::string pci_address(int device) {
  char text[32] = {};
  check(cudaDeviceGetPCIBusId(text, sizeof text, device), "cudaDeviceGetPCIBusId");
  std::string address = text;
  std::transform(address.begin(), address.end(), address.begin(), [](unsigned char c) { return std::tolower(c); });
  return address;
}

// Write ordering of the GPU at that PCI address, see cudaGPUDirectRDMAWritesOrdering; none: NICs do not reach its memory, or it is
// not visible.
std::optional<int> write_ordering(const std::string& pci) {
  int device = 0, supported = 0, ordering = 0;
  if (cudaDeviceGetByPCIBusId(&device, pci.c_str()) != cudaSuccess) return {};
  if (cudaDeviceGetAttribute(&supported, cudaDevAttrGPUDirectRDMASupported, device) != cudaSuccess || supported == 0) return {};
  if (cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, device) != cudaSuccess) return {};
  return ordering;
}

template <typename T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

std::shared_ptr<Exchange> make_exchange(const Config& config, std::shared_ptr<SharedMemory> own,
                                        const std::map<std::uint32_t, std::shared_ptr<SharedMemory>>& peers, Nodes nodes,
                                        const std::map<std::uint32_t, std::uint32_t>& remote, bool proxied,
                                        bool blocks_on_gpu, bool gdrcopy, int device, double timeout, std::uint32_t num_sms, std::uint32_t large_tokens,
                                        std::uint32_t sending_share, bool counts
#ifdef PPLX_CARRIER
                                        ,
                                        Address symmetric, std::uint64_t symmetric_bytes, const std::vector<std::uint32_t>& pes
#endif
) {
  Exchange::Memory memory;
  memory.own = std::move(own);
  memory.peers.resize(config.world);
  memory.nodes = std::move(nodes);
  memory.proxied = proxied;
  memory.blocks_on_gpu = blocks_on_gpu;
  memory.gdrcopy = gdrcopy;
  memory.slot_at.resize(config.world);
  for (const auto& [peer, number] : remote) {
    memory.remote |= 1ull << peer % kMaxPeers;
    memory.slot_at.at(peer) = number;
  }
  for (const auto& [rank, theirs] : peers) memory.peers.at(rank) = theirs;
#ifdef PPLX_CARRIER
  memory.symmetric = {pointer<char>(symmetric), symmetric_bytes, pes};
#endif
  return std::make_shared<Exchange>(config, std::move(memory), device, timeout, num_sms, large_tokens, sending_share,
                                    counts);
}

struct PlanLayout {
  std::uint64_t rows, weights, bytes;
};

void bind_structs(py::module_& m) {
  using Launch = BoundStruct<cuda::Launch>;
  Launch::bind(m, "Launch", "The halves to launch and their stream; addresses of the plan and of the dispatch's results.",
               {Launch::required<&cuda::Launch::stream>("stream"), Launch::required<&cuda::Launch::halves>("halves"),
                Launch::required<&cuda::Launch::plan>("plan"), Launch::required<&cuda::Launch::buffer>("buffer"),
                Launch::field<&cuda::Launch::hooks>("hooks")});
  using Tokens = BoundStruct<cuda::Tokens>;
  Tokens::bind(m, "Tokens",
               "Inputs of a dispatch: addresses, 0 for none, and strides in bytes. A receive half takes count and totals, in pieces all.",
               {Tokens::required<&cuda::Tokens::tokens>("count"), Tokens::field<&cuda::Tokens::x>("x"),
                Tokens::field<&cuda::Tokens::x_stride>("stride"), Tokens::field<&cuda::Tokens::ids>("ids"),
                Tokens::field<&cuda::Tokens::wide_ids>("wide_ids"), Tokens::field<&cuda::Tokens::weights>("weights"),
                Tokens::field<&cuda::Tokens::scales>("scales"), Tokens::field<&cuda::Tokens::scale, &ScaleStrides::row>("scale_row_stride"),
                Tokens::field<&cuda::Tokens::scale, &ScaleStrides::scale>("scale_stride"), Tokens::field<&cuda::Tokens::unread>("unread"),
                Tokens::field<&cuda::Tokens::totals>("totals")});
  using Outputs = BoundStruct<cuda::Outputs>;
  Outputs::bind(m, "Outputs", "Addresses of received rows that lie in memory of their own.",
                {Outputs::required<&cuda::Outputs::x>("x"), Outputs::field<&cuda::Outputs::scales>("scales"),
                 Outputs::required<&cuda::Outputs::weights>("weights")});
  using ExpertOutputs = BoundStruct<cuda::ExpertOutputs>;
  ExpertOutputs::bind(
      m, "ExpertOutputs",
      "Inputs of a combine: addresses, 0 for none, and a stride in bytes. A receive half takes uses_weights alone, in pieces all.",
      {ExpertOutputs::field<&cuda::ExpertOutputs::expert_out>("expert_out"),
       ExpertOutputs::field<&cuda::ExpertOutputs::expert_stride>("stride"),
       ExpertOutputs::field<&cuda::ExpertOutputs::expert_rows>("rows"), ExpertOutputs::required<&cuda::ExpertOutputs::weighted>("weighted"),
       ExpertOutputs::required<&cuda::ExpertOutputs::uses_weights>("uses_weights"),
       ExpertOutputs::field<&cuda::ExpertOutputs::weights>("weights"), ExpertOutputs::field<&cuda::ExpertOutputs::tail>("tail"),
       ExpertOutputs::field<&cuda::ExpertOutputs::tail_rows>("tail_rows")});
  using Result = BoundStruct<cuda::Result>;
  Result::bind(m, "Result", "Outputs of a combine: addresses, 0 for none, and a stride in bytes.",
               {Result::required<&cuda::Result::tokens>("tokens"), Result::required<&cuda::Result::y>("y"),
                Result::required<&cuda::Result::y_stride>("stride"), Result::required<&cuda::Result::accumulate>("accumulate"),
                Result::field<&cuda::Result::has_tail>("has_tail"), Result::field<&cuda::Result::tail_out>("tail")});
}

void bind_memory(py::module_& m) {
  py::class_<HostHeap, Carried, std::shared_ptr<HostHeap>>(m, "HostHeap", kLocal, "Blocks that the proxy moves, and their words.")
      .def_property_readonly("pinned_bytes", &HostHeap::pinned_bytes, "Bytes of host memory.")
      .def("descriptor", &HostHeap::descriptor, "With node_ranks: a file descriptor of the blocks; the caller closes it.")
      .def_property_readonly("blocks_nbytes", [](const HostHeap& host) { return host.blocks() ? host.blocks()->bytes : 0; },
                             "Bytes of the blocks in GPU memory; 0: they are in host memory.");
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(m, "SharedMemory", kLocal, "Device memory that the ranks of a node map.")
      .def(py::init<int, std::size_t, const std::string&>(), py::arg("device"), py::arg("nbytes"), py::arg("what"), Unlocked())
      .def_static(
          "from_descriptor",
          [](int device, int fd, std::size_t bytes) { return std::make_shared<SharedMemory>(device, fd, bytes); },
          py::arg("device"), py::arg("fd"), py::arg("nbytes"), Unlocked())
      .def_static(
          "from_host",
          [](int device, int fd, const HostHeap& own) {
            const Heap heap = heap_of(own.config());
            return std::make_shared<SharedMemory>(device, fd, heap.shared_bytes, heap.remote_blocks[0], heap.shared_bytes);
          },
          py::arg("device"), py::arg("fd"), py::arg("own"), Unlocked(),
          "Blocks of a mate's proxy in host memory, as this rank's lie there.")
      .def_static(
          "from_ipc",
          [](int device, const py::bytes& handle, std::size_t bytes) {
            return std::make_shared<SharedMemory>(device, std::string(handle), bytes);
          },
          py::arg("device"), py::arg("handle"), py::arg("nbytes"))
      .def_static(
          "lent", [](int device, Address at, std::size_t bytes) { return std::make_shared<SharedMemory>(device, pointer<char>(at), bytes); },
          py::arg("device"), py::arg("address"), py::arg("nbytes"), "Memory that a carrier has mapped, and keeps.")
      .def_property_readonly("nbytes", &SharedMemory::bytes)
      .def_property_readonly("address", [](const SharedMemory& memory) { return reinterpret_cast<Address>(memory.data()); })
      .def_property_readonly("has_descriptor", &SharedMemory::has_descriptor)
      .def("descriptor", &SharedMemory::descriptor, "A file descriptor of it; the caller closes it.")
      .def("ipc_handle", [](const SharedMemory& memory) { return py::bytes(memory.ipc_handle()); });
}

void bind_exchange(py::module_& m) {
  py::class_<StreamEvent>(m, "StreamEvent", kLocal, "A place in a stream, which others wait for.")
      .def(py::init([](int device) {
             const OnDevice on(device);
             return std::make_unique<StreamEvent>();
           }),
           py::arg("device"))
      .def(
          "record",
          [](StreamEvent& event, int device, Address stream) {
            const OnDevice on(device);
            event.record(pointer<CUstream_st>(stream));
          },
          py::arg("device"), py::arg("stream"))
      .def(
          "wait",
          [](StreamEvent& event, int device, Address stream) {
            const OnDevice on(device);
            event.wait(pointer<CUstream_st>(stream));
          },
          py::arg("device"), py::arg("stream"));
  py::class_<Exchange, std::shared_ptr<Exchange>>(m, "Exchange", kLocal)
      .def(py::init(&make_exchange), py::arg("config"), py::arg("own"), py::arg("peers"), py::arg("nodes"), py::arg("remote"),
           py::arg("proxied"),
           py::arg("blocks_on_gpu"), py::arg("gdrcopy"), py::arg("device"), py::arg("timeout"), py::arg("num_sms"), py::arg("large_tokens"),
           py::arg("sending_share"), py::arg("counts")
#ifdef PPLX_CARRIER
               ,
           py::arg("symmetric"), py::arg("symmetric_bytes"), py::arg("pes")
#endif
               )
#ifdef PPLX_CARRIER
      .def("posted", &Exchange::posted, Unlocked(), "Puts of this generation, by peer.")
      .def("landed", &Exchange::landed, Unlocked(), "Puts that have landed here in this generation, by source.")
      .def("rebase", &Exchange::rebase, Unlocked(), "Begins a generation where the signals are.")
#endif
      .def_property_readonly(
          "host", [](const Exchange& e) { return e.host() ? std::optional(e.host()) : std::nullopt; },
          "Memory that the proxy carries for; None inside a node.")
      .def_property_readonly(
          "arrivals_on_gpu", [](const Exchange& e) { return e.host() && e.host()->arrivals() != nullptr; },
          "True if the proxy raises its words in GPU memory.")
      .def(
          "follow", [](Exchange& e, Address stream) { e.follow(pointer<CUstream_st>(stream)); }, py::arg("stream"), Unlocked(),
          "As one of its streams: graphs may have been replayed on it.")
      .def("ended", &Exchange::ended, py::arg("seconds"), Unlocked(), "True if everything launched has ended by then.")
      .def("dispatch", [](Exchange& e, const Launch& launch, const Tokens& tokens) { return e.dispatch(launch, tokens); },
           py::arg("launch"), py::arg("tokens"), Unlocked(), "Returns the number of the step; -1 in a capture.")
      .def("dispatch", &Exchange::dispatch, py::arg("launch"), py::arg("tokens"), py::arg("outputs"), Unlocked())
      .def("combine", &Exchange::combine, py::arg("launch"), py::arg("outputs"), py::arg("result"), Unlocked())
      .def(
          "release",
          [](Exchange& e, const Launch& launch, std::uint32_t tokens) {
            ExpertOutputs outputs;
            outputs.release = true;
            Result result;
            result.tokens = tokens;
            e.combine(launch, outputs, result);
          },
          py::arg("launch"), py::arg("tokens"), Unlocked())
      .def(
          "explain",
          [](const Exchange& e, std::uint32_t tokens) {
            py::list launches;
            for (const ExplainedLaunch& l : e.explain(tokens))
              launches.append(py::dict(py::arg("call") = l.call, py::arg("kernel") = l.kernel, py::arg("grid") = l.grid,
                                       py::arg("block") = l.block, py::arg("shared_bytes") = l.smem, py::arg("why") = l.why));
            return launches;
          },
          py::arg("tokens"), "The launches of a step of this many tokens, and why.")
      .def("use_hooks", &Exchange::use_hooks, "Once, before the first step that has hooks.")
      .def(
          "clear_hooks",
          [](Exchange& e, Address words, Address stream) { e.clear_hooks(pointer<std::uint32_t>(words), pointer<CUstream_st>(stream)); },
          py::arg("words"), py::arg("stream"), "Before the dispatch that they are of.")
      .def("await_experts", &Exchange::await_experts, py::arg("launch"), py::arg("first"), py::arg("count"),
           "Whatever is launched behind it on that stream has the rows of these experts.")
#ifdef PPLX_CUDA_STAGES
      .def(
          "note_stages",
          [](Exchange& e, Address stages, std::uint32_t warps) { e.note_stages(pointer<std::uint64_t>(stages), 1, warps); },
          py::arg("stages"), py::arg("warps"),
          "Device memory, int64 [stages + spans, warps]: when each warp last came to a stage, in ns, and the cycles that it spent; "
          "0 ends it.")
#endif
      .def(
          "begins", &Exchange::begins, py::arg("steps"), Unlocked(),
          "When the dispatch and the combine of each of the latest steps began, in ns by the GPU's clock.")
      .def("note_kernels", &Exchange::note_kernels, Unlocked(), "A timeline has the kernels that end from now on.")
      .def("tell_kernels", &Exchange::tell_kernels, Unlocked(), "Adds those that have ended to what read_trace() returns.")
      .def(
          "fail",
          [](Exchange& e, const std::string& reason, int origin, int peer, std::uint32_t step, const std::string& message) {
            e.fail(abort_named(reason, origin, peer, step), message);
          },
          py::arg("reason"), py::arg("origin"), py::arg("peer"), py::arg("step"), py::arg("message"))
      .def_property_readonly("network_peers", &Exchange::network_peers, "With which this rank exchanges blocks by its proxy.")
      .def("relay_bytes", &Exchange::relay_bytes, py::arg("mate"))
      .def("lay_relays", &Exchange::lay_relays, py::arg("areas"), py::arg("blocks"), Unlocked())
      .def("peer_left", &Exchange::peer_left, py::arg("peer"))
      .def("peer_busy", &Exchange::peer_busy, py::arg("peer"), py::arg("busy"))
      .def("name_networks", &Exchange::name_networks, py::arg("by_peer"))
      .def(
          "drain", [](Exchange& e, Address stream, double seconds) { e.drain(pointer<CUstream_st>(stream), seconds); },
          py::arg("stream"), py::arg("seconds"), Unlocked())
      .def("reset", &Exchange::reset, py::arg("generation"), py::arg("alive"), Unlocked())
      .def("raise_trouble", [](Exchange& e) {
        e.raise_failure();
        e.raise_notice();
      })
      .def_property_readonly("generation", &Exchange::generation)
      .def_property_readonly(
          "teller", [](const std::shared_ptr<Exchange>& e) { return std::shared_ptr<Teller>(new TellerOf<Exchange>(e)); })
      .def_property_readonly("open_steps", py::cpp_function(&Exchange::open_steps, Unlocked()))
      .def("set_num_sms", &Exchange::set_num_sms, py::arg("num_sms"))
      .def(
          "stats",
          [](const Exchange& e) {
            const auto read = [&] {
              const py::gil_scoped_release unlocked;
              return e.counters();
            };
            return to_dict(read());
          },
          "Without a wait for kernels that run.")
      .def(
          "waits",
          [](const Exchange& e, bool combine) {
            const DeviceCounters* c = e.device_counters();
            if (c == nullptr) throw Misuse("waits: nothing is counted with PPLX_COMM_STATS=0");
            return py::make_tuple(reinterpret_cast<Address>(c->waited[combine]), e.config().world);
          },
          py::arg("combine"), "Device memory of int64 numbers, and how many.")
      .def_property_readonly("memory", &Exchange::memory, "Memory that peers write into.")
      .def_property_readonly("large_tokens", &Exchange::large_tokens, "Combines of this many tokens or more are large, where any are.");
  m.def("large_tokens", &tuned_large_tokens, py::arg("config"), py::arg("device"), py::arg("num_sms"),
        "The number of tokens from which combines should be large on this GPU. num_sms: 0: all.");
  m.def(
      "clear", [](const SharedMemory& heap) { clear(heap, nullptr); }, py::arg("heap"), "Makes it as it is when it is new.");
  m.def(
      "count_routing",
      [](Address ids, bool wide, std::uint32_t tokens, std::uint32_t top_k, std::uint32_t ranks, std::uint32_t nodes, std::uint32_t experts,
         Address goes, Address counts, int device, Address stream) {
        if (ranks > kMaxPeers || experts > kMostExperts || experts % ranks != 0) throw Misuse("count_routing: too many ranks or experts");
        const OnDevice on(device);
        const RoutingCounts a{pointer<void>(ids), tokens, top_k, ranks, nodes, experts, Divider(experts / ranks), pointer<bool>(goes),
                              pointer<std::uint32_t>(counts)};
        check(launch_count_routing(a, wide, pointer<CUstream_st>(stream)), "launching the counts of a routing");
      },
      py::arg("ids"), py::arg("wide_ids"), py::arg("tokens"), py::arg("top_k"), py::arg("ranks"), py::arg("nodes"), py::arg("experts"),
      py::arg("goes"), py::arg("counts"), py::arg("device"), py::arg("stream"),
      "Device memory: goes: bool [tokens, ranks]; counts: int32 of tokens by rank, tokens by node, choices by expert.");
  m.def(
      "leave_blank", [](const Config& config, const SharedMemory& heap) { leave_blank(config, heap, nullptr); }, py::arg("config"),
      py::arg("heap"), "Makes the places of the rows that come back as peers must find them.");
  m.def(
      "output_layout", [](const Config& config) { return OutputLayout(buffer_layout(config)); }, py::arg("config"),
      "Offsets of the tensors that a dispatch fills in its buffer. Everything that its combine reads comes before x, scale and weights.");
  py::class_<PlanLayout>(m, "PlanLayout", kLocal, "Offsets of the parts of a plan that Python reads: bytes from its start.")
      .def_readonly("rows", &PlanLayout::rows)
      .def_readonly("weights", &PlanLayout::weights)
      .def_readonly("nbytes", &PlanLayout::bytes, "Size of a plan for any number of tokens.");
  m.def(
      "plan_layout",
      [](const Config& c) { return PlanLayout{plan_rows_at(c), plan_weights_at(c), plan_bytes(c, c.max_tokens)}; }, py::arg("config"));
}

}  // namespace

#ifdef PPLX_CARRIER
void bind_carrier(py::module_& m);  // its host side
#endif

void bind(py::module_& m) {
  bind_trace(m);
  m.def("device_count", [] { return number_of(cudaGetDeviceCount); }, "CUDA devices that this process sees; 0 without a driver.");
  m.def("driver_version", [] { return number_of(cudaDriverGetVersion); }, "The CUDA version of the driver (13000 is 13.0); 0 without one.");
  m.def(
      "gdrcopy_refusal",
      [](int device) -> std::optional<std::string> {
        std::string why_not;
        if (GdrMemory::make(device, 1, why_not)) return {};
        return why_not;
      },
      py::arg("device"), "Why arrival words cannot lie in that GPU's memory; None: they can.");
  m.def("pci_address", &pci_address, py::arg("device"), "PCI address of that GPU.");
  m.def("write_ordering", &write_ordering, py::arg("pci"),
        "Ordering of a NIC's writes, as the GPU at that PCI address sees them; None: NICs do not reach it.");
  m.def("runtime_version", [] { return number_of(cudaRuntimeGetVersion); }, "The CUDA version that this module was built with.");
#ifdef PPLX_CUDA_STAGES
  m.attr("stages") = std::vector<std::string>(std::begin(kStages), std::end(kStages));
  m.attr("spans") = std::vector<std::string>(std::begin(kSpans), std::end(kSpans));
  m.attr("warps_of_block") = kMostWarps;
#endif
  bind_structs(m);
  bind_memory(m);
  bind_exchange(m);
#ifdef PPLX_CARRIER
  bind_carrier(m);
#endif
}

}  // namespace pplx::cuda

#if defined(PPLX_CARRIER)
PYBIND11_MODULE(_nvshmem, m) {
  m.doc() = "The CUDA half of pplx_comm, with kernels that call NVSHMEM. Import pplx_comm._core first.";
#elif defined(PPLX_CUDA_STAGES)
PYBIND11_MODULE(_cuda_stages, m) {
  m.doc() = "The CUDA half of pplx_comm, with kernels that note their stages. Import pplx_comm._core first.";
#else
PYBIND11_MODULE(_cuda, m) {
  m.doc() = "The CUDA half of pplx_comm. Import pplx_comm._core first.";
#endif
  pplx::cuda::bind(m);
}
