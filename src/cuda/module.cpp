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

#include "copy_fabric.h"
#include "error.h"
#include "exchange.h"
#include "handover.h"
#include "stages.h"

namespace py = pybind11;

namespace pplx::cuda {
namespace {

using Address = std::uintptr_t;
using Unlocked = py::call_guard<py::gil_scoped_release>;

// Each of these answers 0 where there is no driver: a failed call leaves its argument alone.
int device_count() {
  int count = 0;
  cudaGetDeviceCount(&count);
  return count;
}

int driver_version() {
  int version = 0;
  cudaDriverGetVersion(&version);
  return version;
}

int runtime_version() {
  int version = 0;
  cudaRuntimeGetVersion(&version);
  return version;
}

// As sysfs spells it, where NICs are looked for near it.
std::string pci_address(int device) {
  char text[32] = {};
  check(cudaDeviceGetPCIBusId(text, sizeof text, device), "cudaDeviceGetPCIBusId");
  std::string address = text;
  std::transform(address.begin(), address.end(), address.begin(), [](unsigned char c) { return std::tolower(c); });
  return address;
}

// Of the GPU at that PCI address, see cudaGPUDirectRDMAWritesOrdering; none: NICs do not reach its memory, or it is not visible.
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
                                        const std::map<std::uint32_t, std::shared_ptr<SharedMemory>>& peers,
                                        const std::vector<std::uint32_t>& remote, bool proxied, bool blocks_on_gpu, bool gdrcopy,
                                        int device, double timeout, std::uint32_t num_sms) {
  Exchange::Memory memory{std::move(own), std::vector<std::shared_ptr<SharedMemory>>(config.world), 0, proxied, blocks_on_gpu, gdrcopy};
  for (const std::uint32_t peer : remote) memory.remote |= 1ull << peer % kMaxPeers;
  for (const auto& [rank, theirs] : peers) memory.peers.at(rank) = theirs;
  return std::make_shared<Exchange>(config, std::move(memory), device, timeout, num_sms);
}

py::dict describe(const BufferLayout& b) {
  py::dict d;
  const std::pair<const char*, std::uint64_t> parts[] = {{"x", b.x},
                                                         {"scale", b.scales},
                                                         {"counts", b.counts},
                                                         {"offsets", b.offsets},
                                                         {"weights", b.weights},
                                                         {"src_rank", b.src_rank},
                                                         {"src_token", b.src_token},
                                                         {"topk_ids", b.topk_ids},
                                                         {"topk_weights", b.topk_weights},
                                                         {"num_rows", b.num_rows}};
  for (const auto& [name, at] : parts)
    if (at != BufferLayout::none) d[name] = at;
  d["bytes"] = b.bytes;
  d["rows"] = b.rows;
  return d;
}

void bind_memory(py::module_& m) {
  py::class_<SharedMemory, std::shared_ptr<SharedMemory>>(m, "SharedMemory", "Device memory that the ranks of a node map.")
      .def(py::init<int, std::size_t, const std::string&>(), py::arg("device"), py::arg("nbytes"), py::arg("what"), Unlocked())
      .def_static(
          "from_descriptor",
          [](int device, int fd, std::size_t bytes) { return std::make_shared<SharedMemory>(device, fd, bytes); },
          py::arg("device"), py::arg("fd"), py::arg("nbytes"), Unlocked())
      .def_static(
          "from_ipc",
          [](int device, const py::bytes& handle, std::size_t bytes) {
            return std::make_shared<SharedMemory>(device, std::string(handle), bytes);
          },
          py::arg("device"), py::arg("handle"), py::arg("nbytes"))
      .def_property_readonly("nbytes", &SharedMemory::bytes)
      .def_property_readonly("has_descriptor", &SharedMemory::has_descriptor)
      .def("descriptor", &SharedMemory::descriptor, "A file descriptor of it; the caller closes it.")
      .def("ipc_handle", [](const SharedMemory& memory) { return py::bytes(memory.ipc_handle()); });
}

void bind_exchange(py::module_& m) {
  py::class_<HostHeap, Carried, std::shared_ptr<HostHeap>>(m, "HostHeap", "What the proxy moves, and the words about it.")
      .def_property_readonly("pinned_bytes", &HostHeap::pinned_bytes, "Of host memory.");
  py::class_<Exchange, std::shared_ptr<Exchange>>(m, "Exchange")
      .def(py::init(&make_exchange), py::arg("config"), py::arg("own"), py::arg("peers"), py::arg("remote"), py::arg("proxied"),
           py::arg("blocks_on_gpu"), py::arg("gdrcopy"), py::arg("device"), py::arg("timeout"), py::arg("num_sms"))
      .def_property_readonly("host", &Exchange::host, "What the proxy carries for; None inside a node.")
      .def_property_readonly(
          "arrivals_on_gpu", [](const Exchange& e) { return e.host() && e.host()->arrivals() != nullptr; },
          "Whether the proxy raises its words in GPU memory.")
      .def("ended", &Exchange::ended, py::arg("seconds"), Unlocked(), "Whether all that was launched has ended by then.")
      .def(
          "dispatch",
          [](Exchange& e, Address stream, unsigned halves, std::uint32_t tokens, Address x, std::uint64_t stride, Address ids,
             bool wide_ids, Address weights, Address scales, std::uint64_t scale_row_stride, std::uint64_t scale_stride,
             Address plan, Address buffer, Address rows_x, Address rows_scales, Address rows_weights) {
            Exchange::Tokens t;
            t.count = tokens;
            t.x = pointer<const char>(x);
            t.stride = stride;
            t.ids = pointer<const void>(ids);
            t.wide_ids = wide_ids;
            t.weights = pointer<const float>(weights);
            t.scales = pointer<const char>(scales);
            t.scale.row = scale_row_stride;
            t.scale.scale = scale_stride;
            return e.dispatch(pointer<CUstream_st>(stream), halves, t, pointer<char>(plan), pointer<char>(buffer),
                              {pointer<char>(rows_x), pointer<char>(rows_scales), pointer<float>(rows_weights)});
          },
          "halves: 1 sends, 2 receives, 3 is both in one launch.")
      .def("combine",
           [](Exchange& e, Address stream, unsigned halves, std::uint32_t tokens, Address expert_out, std::uint64_t stride,
              std::uint64_t rows, bool weighted, bool uses_weights, Address weights, bool has_tail, Address tail,
              std::uint64_t tail_rows, Address y, std::uint64_t y_stride, bool accumulate, Address tail_out, Address plan,
              Address buffer) {
             Exchange::Outputs o;
             o.expert_out = pointer<const char>(expert_out);
             o.stride = stride;
             o.rows = rows;
             o.weighted = weighted;
             o.uses_weights = uses_weights;
             o.weights = pointer<const float>(weights);
             o.tail = pointer<const std::uint32_t>(tail);
             o.tail_rows = tail_rows;
             e.combine(pointer<CUstream_st>(stream), halves, o,
                       {tokens, pointer<char>(y), y_stride, accumulate, has_tail, pointer<std::uint32_t>(tail_out)},
                       pointer<char>(plan), pointer<char>(buffer));
           })
      .def("release",
           [](Exchange& e, Address stream, std::uint32_t tokens, Address plan, Address buffer) {
             Exchange::Outputs o;
             o.release = true;
             e.combine(pointer<CUstream_st>(stream), kSend | kRecv, o, {tokens}, pointer<char>(plan), pointer<char>(buffer));
           })
      .def(
          "push",
          [](Exchange& e, Address stream, const std::vector<std::uint64_t>& bytes) { e.push(pointer<CUstream_st>(stream), bytes); },
          py::arg("stream"), py::arg("bytes"),
          "The floor: bare stores of that many bytes to each rank. Nothing else may follow on this object.")
#ifdef PPLX_CUDA_STAGES
      .def(
          "note_stages",
          [](Exchange& e, Address stages, std::uint32_t warps) { e.note_stages(pointer<std::uint64_t>(stages), warps); },
          py::arg("stages"), py::arg("warps"), "Device memory, int64 [stages, warps]: when each warp last came there, in ns; 0 ends it.")
#endif
      .def(
          "stamp", [](Exchange& e, Address stamps, std::uint32_t steps) { e.stamp(pointer<std::uint64_t>(stamps), steps); },
          py::arg("stamps"), py::arg("steps"),
          "Device memory, int64 [steps, 2]: when the dispatch and the combine of each step began, in ns; 0 ends it.")
      .def(
          "fail",
          [](Exchange& e, const std::string& reason, int origin, int peer, std::uint32_t step, const std::string& message) {
            Abort abort;
            abort.reason = reason_named(reason);
            abort.origin = origin < 0 ? kNoRank : static_cast<std::uint32_t>(origin);
            abort.peer = peer < 0 ? kNoRank : static_cast<std::uint32_t>(peer);
            abort.step = step;
            e.fail(abort, message);
          },
          py::arg("reason"), py::arg("origin"), py::arg("peer"), py::arg("step"), py::arg("message"))
      .def("peer_left", &Exchange::peer_left, py::arg("peer"))
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
      .def_property_readonly("open_steps", &Exchange::open_steps)
      .def_property_readonly("steps", &Exchange::steps);
  m.def(
      "leave_blank", [](const Config& config, const SharedMemory& heap) { leave_blank(config, heap, nullptr); }, py::arg("config"),
      py::arg("heap"), "Makes the places of the rows that come back as peers must find them.");
  m.def(
      "buffer_layout", [](const Config& config) { return describe(buffer_layout(config)); }, py::arg("config"),
      "Where the parts of what a dispatch returns lie in its buffer.");
  m.def(
      "plan_layout",
      [](const Config& config) {
        py::dict d;
        d["rows"] = plan_rows_at(config);
        d["weights"] = plan_weights_at(config);
        d["bytes"] = plan_bytes(config, config.max_tokens);
        return d;
      },
      py::arg("config"), "Where the parts of a plan lie that Python reads, and its bytes, for any number of tokens.");
}

}  // namespace

void bind(py::module_& m) {
  m.def(
      "hold",
      [](Address words, std::uint32_t multiprocessors, double seconds, Address stream) {
        const auto limit = static_cast<std::uint64_t>(seconds * 1e9);
        check(launch_hold(pointer<std::uint64_t>(words), multiprocessors, limit, pointer<CUstream_st>(stream)), "launching hold");
      },
      py::arg("words"), py::arg("multiprocessors"), py::arg("seconds"), py::arg("stream"),
      "For tests: holds multiprocessors until words[0] is not zero, and no longer than that; each sets one of the words after it. "
      "int64 in pinned memory.");
  m.def("ping", &ping, py::arg("device"), py::arg("rounds"), Unlocked(), "Nanoseconds from the host to the GPU and back, of each round.");
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
      "Nanoseconds from a kernel's first mailbox store to the first post, to the last, and to all arrivals seen, over a network that "
      "costs nothing; `ping`: the fastest way there and back, whose half the first two may be off by.");
  m.def("device_count", &device_count, "CUDA devices that this process sees; 0 without a driver.");
  m.def("driver_version", &driver_version, "The CUDA version of the driver (13000 is 13.0); 0 without one.");
  m.def(
      "gdrcopy_refusal",
      [](int device) -> std::optional<std::string> {
        std::string why_not;
        if (GdrMemory::make(device, 1, why_not)) return {};
        return why_not;
      },
      py::arg("device"), "Why arrival words cannot lie in that GPU's memory; None: they can.");
  m.def("pci_address", &pci_address, py::arg("device"), "Of that GPU.");
  py::class_<CopyFabric, Fabric, std::shared_ptr<CopyFabric>>(
      m, "CopyFabric", "For tests: a fabric between the AllToAlls of one process, whose NIC is the GPU's copy engine.")
      .def(py::init<int>(), py::arg("device"))
      .def_property_readonly("provider", [](const CopyFabric&) { return "copy"; })
      .def_property_readonly("why", [](const CopyFabric&) { return "a test asks for it"; })
      .def_property_readonly("proxy_cpu", [](const CopyFabric&) { return -1; })
      .def("close", &CopyFabric::close, Unlocked());
  m.def("write_ordering", &write_ordering, py::arg("pci"),
        "Of a NIC's writes, as the GPU at that PCI address sees them; None: NICs do not reach it.");
  m.def("runtime_version", &runtime_version, "The CUDA version that this module was built with.");
#ifdef PPLX_CUDA_STAGES
  m.attr("stages") = std::vector<std::string>(std::begin(kStages), std::end(kStages));
  m.attr("warps_of_block") = kWarps;
#endif
  bind_memory(m);
  bind_exchange(m);
}

}  // namespace pplx::cuda

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "The CUDA half of pplx_comm. Import pplx_comm._core first.";
  pplx::cuda::bind(m);
}
