// Python's view of the proxy thread.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "blob.h"
#include "host/carried.h"
#include "host/standing.h"
#include "proxy/chaos.h"
#include "proxy/proxy_thread.h"
#include "protocol/heap_layout.h"

namespace py = pybind11;

namespace pplx {
namespace {

constexpr double kCallTimeout = 30.0;

// Throws if the thread does not answer: it hangs inside the provider. `f` may still run later, so it captures no references.
void call(ProxyThread& thread, const char* what, std::function<void(Proxy&, Fabric&)> f) {
  if (!thread.call(std::move(f), kCallTimeout))
    throw FabricError(std::string("the proxy thread did not answer within 30 s to: ") + what + ". It hangs inside the provider.");
}

LocalRegion register_memory(ProxyThread& thread, const std::shared_ptr<Carried>& carried) {
  const auto region = std::make_shared<LocalRegion>();
  call(thread, "register memory", [region, carried](Proxy&, Fabric& fabric) {
    const Carried::Region all = carried->region();
    if (std::optional<DeviceMemory> blocks = carried->blocks()) {
      blocks->shared_bytes = all.shared_bytes;
      *region = fabric.register_device_memory(*blocks);
    } else {
      *region = fabric.register_memory(all.memory, all.bytes, all.shared_bytes);
    }
  });
  return *region;
}

void attach(ProxyThread& thread, const std::shared_ptr<Carried>& carried, const LocalRegion& region,
            const std::map<std::uint32_t, py::bytes>& given) {
  std::map<std::uint32_t, Blob> descriptions;
  for (const auto& [peer, bytes] : given) descriptions.emplace(peer, to_blob(bytes));
  const py::gil_scoped_release unlocked;
  const auto object = std::make_shared<ProxyObject>();
  object->config = carried->config();
  object->generation = carried->generation();
  object->memory = carried->memory();
  object->arrivals = carried->arrivals();
  object->region = region;
  object->peers.resize(object->config.world);
  object->targets = carried->targets();
  object->owner = carried;
  const std::weak_ptr<Carried> weak = carried;
  const std::uint32_t rank = object->config.rank;
  call(thread, "attach an AllToAll", [object, descriptions, weak, rank](Proxy& proxy, Fabric& fabric) {
    for (const auto& [peer, description] : descriptions)
      object->peers.at(peer) = std::make_unique<RemoteRegion>(fabric.import_region(static_cast<int>(peer), description));
    object->on_failure = [weak, rank](const ProxyFailure& f) {
      if (const std::shared_ptr<Carried> c = weak.lock()) c->lost_network(f.abort(rank), f.text(rank));
    };
    proxy.attach(std::move(*object));
  });
}

// Waits for the writes that still read this object's memory, but no longer than `timeout`. What was registered and never attached
// is unregistered.
void detach(ProxyThread& thread, const std::shared_ptr<Carried>& carried, const LocalRegion& region, double timeout) {
  const std::uint32_t number = carried->config().object;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout);
  const auto quiet = std::make_shared<std::atomic<bool>>(false);
  do {
    if (!thread.call([=](Proxy& proxy, Fabric&) { *quiet = proxy.outstanding(number) == 0; }, timeout)) break;
    if (*quiet) break;
    sched_yield();
  } while (std::chrono::steady_clock::now() < end);
  const bool safe = *quiet;
  if (!safe) {   // the provider may still read it
    thread.keep(carried);
    thread.keep(carried->region().owner);
  }
  thread.call(
      [=](Proxy& proxy, Fabric& fabric) {
        proxy.detach(number);
        if (safe) fabric.unregister_memory(region);
      },
      timeout);
}

py::dict stats(const ChaosCounts& c) {
  py::dict d;
  d["delayed"] = c.delayed;
  d["shuffled"] = c.shuffled;
  d["split"] = c.split;
  d["duplicated"] = c.duplicated;
  d["replayed"] = c.replayed;
  d["refused"] = c.refused;
  d["stalled"] = c.stalled;
  d["failed"] = c.failed;
  d["swallowed"] = c.swallowed;
  d["lost"] = c.lost;
  return d;
}

py::dict stats(ProxyThread& thread, bool fresh) {
  const auto chaos = std::make_shared<std::optional<ChaosCounts>>();
  bool answered = false;
  if (fresh) {
    const py::gil_scoped_release unlocked;
    // Publishes what the thread has counted so far.
    const auto count = [chaos](Proxy&, Fabric& fabric) {
      if (const auto* f = dynamic_cast<const ChaosFabric*>(&fabric)) *chaos = f->counts();
    };
    answered = thread.call(count, 10.0);   // a busy host takes its time
  }
  const ProxyThreadStats s = thread.stats();
  py::dict d;
  d["writes"] = s.proxy.writes;
  d["bytes"] = s.proxy.bytes;
  d["again"] = s.proxy.again;
  d["dropped"] = s.proxy.dropped;
  d["duplicates"] = s.proxy.duplicates;
  d["errors"] = s.proxy.errors;
  d["deepest"] = s.proxy.deepest;
  d["endpoint_writes"] = std::vector<std::uint64_t>(std::begin(s.proxy.endpoint_writes), std::end(s.proxy.endpoint_writes));
  d["endpoint_bytes"] = std::vector<std::uint64_t>(std::begin(s.proxy.endpoint_bytes), std::end(s.proxy.endpoint_bytes));
  d["cpu"] = s.cpu;
  if (answered && chaos->has_value()) d["chaos"] = stats(**chaos);
  return d;
}

}  // namespace

void bind_proxy(py::module_& m) {
  m.def("proxy_of", &proxy_of, py::arg("rank"), py::arg("peer"), py::arg("proxies"),
        "Index of the proxy that carries to and from that peer.");
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<ProxyThread, std::shared_ptr<ProxyThread>>(m, "Proxy",
                                                        "The thread that drives the fabric, one per Communicator and provider.")
      .def(py::init<std::shared_ptr<Fabric>, std::uint64_t, int>(), py::arg("fabric"), py::arg("shard_bytes"), py::arg("cpu"),
           Unlocked())
      .def(
          "insert_peer",
          [](ProxyThread& thread, int peer, const py::bytes& address) {
            const auto insert = [peer, blob = to_blob(address)](Proxy&, Fabric& fabric) { fabric.insert_peer(peer, blob); };
            call(thread, "insert a peer", insert);
          },
          py::arg("peer"), py::arg("address"), Unlocked())
      .def("register_memory", &register_memory, py::arg("carried"), Unlocked())
      .def("attach", &attach, py::arg("carried"), py::arg("region"), py::arg("descriptions"))
      .def("detach", &detach, py::arg("carried"), py::arg("region"), py::arg("timeout"), Unlocked())
      .def("stats", [](ProxyThread& thread, bool fresh) { return stats(thread, fresh); }, py::arg("fresh"))
      .def_property_readonly(
          "teller", [](const std::shared_ptr<ProxyThread>& thread) { return std::shared_ptr<Teller>(new TellerOf<ProxyThread>(thread)); })
      .def("takes_turns", &ProxyThread::takes_turns, py::arg("within"), Unlocked(),
           "False if it hangs in the provider, or gets no core, for that many seconds.")
      .def("close", &ProxyThread::close, py::arg("timeout") = 1.0, Unlocked(),
           "False if the thread hangs in the provider and was left behind.");
}

}  // namespace pplx
