// Bindings of bench/proxy.py: the proxy over a fabric that costs nothing.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "proxy/proxy_thread.h"
#include "proxy_cost.h"

namespace py = pybind11;

namespace pplx {
namespace {

using Clock = NullFabric::Clock;

double nanoseconds(Clock::duration d) { return std::chrono::duration<double, std::nano>(d).count(); }

struct Samples {
  std::vector<double> first, last;   // from before the first mailbox word to the first and last post
  double idle = 0;                   // the proxy's step that finds nothing
  std::uint64_t doorbells = 0;
};

// The earliest first post of any proxy, and the latest last one. `begins`: when each began, all the same if they run side by side.
void note(Samples& samples, const CostRun& run, const std::vector<Clock::time_point>& begins) {
  Clock::duration first = Clock::duration::max(), last{};
  for (std::uint32_t i = 0; i < begins.size(); ++i) {
    first = std::min(first, run.fabric(i)->first() - begins[i]);
    last = std::max(last, run.fabric(i)->last() - begins[i]);
  }
  samples.first.push_back(nanoseconds(first));
  samples.last.push_back(nanoseconds(last));
}

// Device and proxies take turns on one thread: no cache line moves between cores, and no thread waits for a turn. A proxy's time
// does not count while another has its turn.
void measure_alone(CostRun& run, int operations, Samples& samples) {
  std::vector<std::unique_ptr<Proxy>> proxies;
  for (std::uint32_t i = 0; i < run.options().proxies; ++i) {
    proxies.push_back(std::make_unique<Proxy>(*run.fabric(i), run.options().shard_bytes));
    run.attach(*proxies.back(), i);
  }
  std::vector<Clock::time_point> begins(proxies.size());
  for (int i = 0; i < operations; ++i) {
    const Clock::time_point begin = run.announce(), announced = proxies.size() > 1 ? Clock::now() : begin;
    for (std::uint32_t p = 0; p < proxies.size(); ++p) {
      begins[p] = p == 0 ? begin : Clock::now() - (announced - begin);
      while (!run.posted(p)) proxies[p]->step();
    }
    note(samples, run, begins);
    while (!run.settled())
      for (const std::unique_ptr<Proxy>& proxy : proxies) proxy->step();
  }
  constexpr int kIdle = 2000;
  const Clock::time_point begin = Clock::now();
  for (int i = 0; i < kIdle; ++i) proxies[0]->step();
  samples.idle = nanoseconds(Clock::now() - begin) / kIdle;
}

// As in production: each proxy has a thread of its own; the device is the calling thread.
void measure_threads(const std::shared_ptr<CostRun>& run, int operations, int cpu, Samples& samples) {
  std::vector<std::unique_ptr<ProxyThread>> threads;
  for (std::uint32_t i = 0; i < run->options().proxies; ++i) {
    const int own = cpu < 0 ? cpu : cpu - static_cast<int>(i);
    threads.push_back(std::make_unique<ProxyThread>(run->fabric(i), run->options().shard_bytes, own));
    threads.back()->keep(run);
    threads.back()->call([run, i](Proxy& proxy, Fabric&) { run->attach(proxy, i); });
  }
  const auto wait = [](const auto& done) {
    for (unsigned tries = 0; !done(); ++tries)
      if (tries % 1024 == 1023) sched_yield();
  };
  for (int i = 0; i < operations; ++i) {
    // An expert's computation takes longer than the proxy stays eager, so measure the proxy as idle as it would be.
    const Clock::time_point resume = Clock::now() + std::chrono::microseconds(i % 7 + 20);
    wait([&] { return Clock::now() >= resume; });
    const Clock::time_point begin = run->announce();
    wait([&] { return run->posted(); });
    note(samples, *run, std::vector<Clock::time_point>(threads.size(), begin));
    wait([&] { return run->settled(); });
  }
  for (const std::unique_ptr<ProxyThread>& thread : threads) thread->close();
}

py::dict proxy_cost(const CostOptions& options, int operations, bool threads, int cpu) {
  Samples samples;
  const auto run = std::make_shared<CostRun>(options);
  {
    const py::gil_scoped_release unlocked;
    samples.first.reserve(static_cast<std::size_t>(operations));
    samples.last.reserve(static_cast<std::size_t>(operations));
    if (threads) measure_threads(run, operations, cpu, samples);
    else measure_alone(*run, operations, samples);
  }
  py::dict result;
  result["first"] = samples.first;
  result["last"] = samples.last;
  result["idle"] = threads ? py::object(py::none()) : py::float_(samples.idle);
  result["writes"] = run->writes();
  double doorbells = 0;
  for (std::uint32_t i = 0; i < options.proxies; ++i) doorbells += static_cast<double>(run->fabric(i)->doorbells());
  result["doorbells"] = doorbells / operations;
  return result;
}

}  // namespace

void bind_proxy_cost(py::module_& m) {
  m.def(
      "proxy_cost",
      [](std::uint32_t peers, int endpoints, std::uint32_t rows, std::uint64_t shard_bytes, std::uint32_t in_flight,
         std::uint32_t objects, std::uint32_t proxies, int operations, bool threads, int cpu) {
        return proxy_cost({peers, endpoints, rows, shard_bytes, in_flight, objects, proxies}, operations, threads, cpu);
      },
      py::kw_only(), py::arg("peers"), py::arg("endpoints"), py::arg("rows"), py::arg("shard_bytes"), py::arg("in_flight") = 1,
      py::arg("objects") = 1, py::arg("proxies") = 1, py::arg("operations"), py::arg("threads"), py::arg("cpu") = -1,
      "Nanoseconds from the first mailbox word to the first and the last post of each operation; `idle`: of a step that finds "
      "nothing.");
}

}  // namespace pplx
