// Python's view of the libfabric back end: what there is on this machine, and fabrics to give to a proxy or to time by themselves.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "blob.h"
#include "proxy/chaos.h"
#include "proxy/fabric.h"
#include "proxy/libfabric/libfabric_fabric.h"
#include "proxy/libfabric/loader.h"
#include "proxy/libfabric/providers.h"
#include "proxy/libfabric/shm_files.h"

namespace py = pybind11;

namespace pplx {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

LibfabricFabric& libfabric_of(Fabric& fabric) {
  auto* found = dynamic_cast<LibfabricFabric*>(&fabric);
  if (found == nullptr) throw FabricError("this fabric (" + fabric.name() + ") is not libfabric's");
  return *found;
}

using LocalityTuples = std::vector<std::pair<std::string, std::vector<int>>>;   // GPU or "", CPUs

std::vector<libfabric::Locality> to_localities(const LocalityTuples& tuples) {
  std::vector<libfabric::Locality> localities;
  for (const auto& [gpu, cpus] : tuples) localities.push_back({gpu, cpus});
  return localities;
}

// Returns for each of `localities` the NICs of these names that it would pick, the reason, and the CPU of its proxy. Serves doctor,
// and tests with the sysfs of another machine.
std::vector<std::tuple<std::vector<std::string>, std::string, int>> pick_nics(
    const std::vector<std::string>& names, const LocalityTuples& tuples, const std::string& sysfs) {
  const libfabric::Topology topology(sysfs);
  const std::vector<libfabric::Locality> localities = to_localities(tuples);
  std::vector<libfabric::NamedLocation> nics;
  for (const std::string& name : names) nics.push_back({name, topology.of_nic(name)});
  std::vector<libfabric::Picked> picked;
  std::vector<std::vector<int>> near(localities.size());
  for (std::size_t locality = 0; locality < localities.size(); ++locality) {
    picked.push_back(libfabric::pick_nics(topology, nics, localities, locality));
    for (const std::size_t nic : picked.back().nics)
      near[locality].insert(near[locality].end(), nics[nic].location.cpus.begin(), nics[nic].location.cpus.end());
    std::sort(near[locality].begin(), near[locality].end());
  }
  const std::vector<int> cpus = libfabric::pick_cpus(localities, near);
  std::vector<std::tuple<std::vector<std::string>, std::string, int>> result;
  for (std::size_t locality = 0; locality < localities.size(); ++locality) {
    std::vector<std::string> chosen;
    for (const std::size_t nic : picked[locality].nics) chosen.push_back(names[nic]);
    result.emplace_back(std::move(chosen), picked[locality].why, cpus[locality]);
  }
  return result;
}

libfabric::Options to_options(const std::string& provider, const py::dict& given) {
  libfabric::Options options;
  options.provider = provider;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (name == "nics") options.nics = value.cast<std::vector<std::string>>();
    else if (name == "endpoints") options.endpoints = value.cast<int>();
    else if (name == "localities") options.localities = to_localities(value.cast<LocalityTuples>());
    else if (name == "locality") options.locality = value.cast<std::size_t>();
    else if (name == "proxies") options.proxies = value.cast<std::size_t>();
    else if (name == "proxy") options.proxy = value.cast<std::size_t>();
    else if (name == "address") options.address = value.cast<std::string>();
    else if (name == "device_memory") options.device_memory = value.cast<bool>();
    else if (name == "peers_on_this_host") options.peers_on_this_host = value.cast<bool>();
    else if (name == "wheels") options.wheels = value.cast<std::vector<std::string>>();
    else
      throw py::type_error("Fabric has no option '" + name + "': there are nics, endpoints, localities, locality, proxies, proxy, "
                              "address, device_memory, peers_on_this_host, wheels");
  }
  return options;
}

std::shared_ptr<Fabric> make_fabric(const std::string& provider, const py::dict& given) {
  const libfabric::Options options = to_options(provider, given);
  const py::gil_scoped_release unlocked;
  return std::make_shared<LibfabricFabric>(options);
}

py::dict libfabric_status(const std::vector<std::string>& wheels) {
  py::dict status;
  status["compiled_in"] = libfabric::compiled_in();
  status["path"] = py::none();
  status["version"] = py::none();
  status["error"] = py::none();
  py::dict providers;
  try {
    const libfabric::Library& library = libfabric::library(wheels);
    status["path"] = library.path;
    status["version"] = libfabric::version_text(library.version);
    for (const libfabric::ProviderStatus& provider : libfabric::provider_status(library)) {
      py::dict one;
      one["available"] = provider.available;
      one["nics"] = provider.nics;
      one["device_memory"] = provider.device_memory;
      one["why_not"] = provider.available ? py::object(py::none()) : py::object(py::str(provider.why_not));
      providers[py::str(provider.name)] = one;
    }
  } catch (const FabricError& error) {
    status["error"] = std::string(error.what());
  }
  status["providers"] = providers;
  return status;
}

// (kind, immediate or context, text): "sent", "arrived" or "failed".
std::vector<std::tuple<std::string, std::uint64_t, std::string>> poll(Fabric& fabric) {
  Completion completions[64];
  std::vector<std::tuple<std::string, std::uint64_t, std::string>> seen;
  const int count = fabric.poll(completions, 64);
  for (int i = 0; i < count; ++i) {
    const Completion& completion = completions[i];
    switch (completion.kind) {
      case Completion::Kind::Sent: seen.emplace_back("sent", completion.context, ""); break;
      case Completion::Kind::Arrived: seen.emplace_back("arrived", completion.immediate, ""); break;
      case Completion::Kind::Failed: seen.emplace_back("failed", completion.context, fabric.describe_error(completion)); break;
    }
  }
  return seen;
}

}  // namespace

void bind_fabric(py::module_& m) {
  py::register_exception<FabricError>(m, "FabricError", PyExc_RuntimeError);

  m.def("libfabric_status", &libfabric_status, py::arg("wheels") = std::vector<std::string>{},
        "Returns what libfabric offers on this machine: path, version, error, and for each provider available, nics, "
        "device_memory, why_not.");
  m.def(
      "cleanup_dead_peer", [](const py::bytes& address) { return libfabric::cleanup_dead_peer(to_blob(address)); },
      py::arg("address"), Unlocked(), "Removes what a killed process left in /dev/shm; how many files. Of a living process, none.");

  m.def("pick_nics", &pick_nics, py::arg("names"), py::arg("localities"), py::arg("sysfs") = "/sys",
        "Processes of a host are (PCI address of its GPU or \"\", its CPUs). Returns for each the NICs of these names that it "
        "takes, why, and the CPU of its proxy.");

  m.def(
      "pick_cpus",
      [](const LocalityTuples& localities, const std::vector<std::vector<int>>& near, std::size_t proxies) {
        return libfabric::pick_cpus(to_localities(localities), near, proxies);
      },
      py::arg("localities"), py::arg("near"), py::arg("proxies"),
      "The CPUs of all processes' first proxies, then of their second ones; -1: any.");

  py::class_<LocalRegion>(m, "LocalRegion")
      .def_readonly("id", &LocalRegion::id)
      .def_readonly("nbytes", &LocalRegion::bytes)
      .def_property_readonly("base", [](const LocalRegion& region) { return reinterpret_cast<std::uintptr_t>(region.base); })
      .def_property_readonly("description", [](const LocalRegion& region) { return to_bytes(region.description); });
  py::class_<RemoteRegion>(m, "RemoteRegion").def_readonly("nbytes", &RemoteRegion::bytes);

  py::class_<Fabric, std::shared_ptr<Fabric>>(m, "Fabric", "One-sided writes with immediates over libfabric. One thread at a time.")
      .def(py::init(&make_fabric), py::arg("provider") = "auto", py::arg("options") = py::dict())
      .def_property_readonly("name", &Fabric::name)
      .def_property_readonly("provider", [](Fabric& fabric) { return libfabric_of(fabric).provider(); })
      .def_property_readonly("endpoints", &Fabric::endpoints)
      .def_property_readonly("why", [](Fabric& fabric) { return libfabric_of(fabric).why_these(); }, "These NICs and no others.")
      .def_property_readonly("proxy_cpu", [](Fabric& fabric) { return libfabric_of(fabric).proxy_cpu(); })
      .def_property_readonly("max_write_bytes", [](Fabric& fabric) { return libfabric_of(fabric).max_write_bytes(); })
      .def_property_readonly("shm_names", [](Fabric& fabric) { return libfabric_of(fabric).shm_names(); })
      .def("endpoint_name", &Fabric::endpoint_name, py::arg("endpoint"))
      .def("address", [](const Fabric& fabric) { return to_bytes(fabric.address()); })
      .def(
          "insert_peer", [](Fabric& fabric, int peer, const py::bytes& address) { fabric.insert_peer(peer, to_blob(address)); },
          py::arg("peer"), py::arg("address"), Unlocked())
      .def("remove_peer", &Fabric::remove_peer, py::arg("peer"), Unlocked())
      .def(
          "register_memory",
          [](Fabric& fabric, std::uintptr_t base, std::size_t bytes, std::size_t shared_bytes) {
            return fabric.register_memory(reinterpret_cast<void*>(base), bytes, shared_bytes);
          },
          py::arg("base"), py::arg("nbytes"), py::kw_only(), py::arg("shared_bytes"), Unlocked(),
          "Peers may write into the first `shared_bytes`. The memory must stay until unregister_memory or close.")
      .def("unregister_memory", &Fabric::unregister_memory, py::arg("region"), Unlocked())
      .def(
          "import_region",
          [](const Fabric& fabric, int peer, const py::bytes& text) { return fabric.import_region(peer, to_blob(text)); },
          py::arg("peer"), py::arg("description"))
      .def("poll", &poll,
           "Up to 64 completions, for tests: (kind, immediate or context, text of a failure). A proxy does this by itself.")
      .def(
          "close", [](Fabric& fabric) { libfabric_of(fabric).close(); }, Unlocked(),
          "Never waits for a peer. Nothing but close() may follow.")
      .def(
          "abandon", [](Fabric& fabric) { libfabric_of(fabric).abandon(); }, Unlocked(),
          "In place of close(), when the thread that drives it hangs: only its files in /dev/shm go.");

  m.def(
      "chaos",
      [](std::shared_ptr<Fabric> fabric, const std::string& options, int rank) -> std::shared_ptr<Fabric> {
        return std::make_shared<ChaosFabric>(std::move(fabric), parse_chaos(options), rank);
      },
      py::arg("fabric"), py::arg("options"), py::arg("rank"),
      "The same fabric, misbehaving; see proxy/chaos.h. ValueError for options that are wrong.");
}

}  // namespace pplx
