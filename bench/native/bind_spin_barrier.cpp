// A barrier between processes that costs next to nothing.
#include <pybind11/pybind11.h>

#include <chrono>
#include <cstdint>
#include <thread>

#include "host/atomic.h"
#include "cpu/thread_pool.h"

namespace py = pybind11;

namespace pplx {
namespace {

// One cache line per process in memory that all of them map, zero at first.
class SpinBarrier {
 public:
  SpinBarrier(std::uintptr_t memory, std::uint32_t rank, std::uint32_t world) : memory_(memory), rank_(rank), world_(world) {}

  void arrive() { store_release(line(rank_), ++turn_); }

  // False: some process did not come within that time; call again. With `patient` it soon sleeps between looks, so that processes
  // still at work get the core. Without, it returns at once when the last one comes.
  bool wait(double seconds, bool patient) {
    const py::gil_scoped_release unlocked;
    const auto begun = std::chrono::steady_clock::now();
    const auto until = begun + std::chrono::duration<double>(seconds);
    cpu::Backoff backoff;
    for (std::uint32_t peer = 0; peer < world_; ++peer) {
      while (load_acquire(line(peer)) < turn_) {
        const auto now = std::chrono::steady_clock::now();
        if (now > until) return false;
        if (patient && now - begun > std::chrono::microseconds(50))
          std::this_thread::sleep_for(std::chrono::microseconds(50));
        else
          backoff.pause();
      }
    }
    return true;
  }

 private:
  std::uint64_t* line(std::uint32_t rank) const { return reinterpret_cast<std::uint64_t*>(memory_ + 64ull * rank); }

  const std::uintptr_t memory_;
  const std::uint32_t rank_, world_;
  std::uint64_t turn_ = 0;
};

}  // namespace

void bind_spin_barrier(py::module_& m) {
  py::class_<SpinBarrier>(m, "SpinBarrier", "A barrier of processes over 64 bytes each of memory that all of them map.")
      .def(py::init<std::uintptr_t, std::uint32_t, std::uint32_t>(), py::arg("memory"), py::arg("rank"), py::arg("world_size"))
      .def("arrive", &SpinBarrier::arrive)
      .def("wait", &SpinBarrier::wait, py::arg("seconds"), py::arg("patient"),
           "False: some process did not arrive in that time; call wait again.");
}

}  // namespace pplx
