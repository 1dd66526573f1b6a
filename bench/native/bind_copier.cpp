// Bare copies by the CPU device's own threads: the floor of device="cpu".
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>

#include "cpu/thread_pool.h"
#include "cpu/vector/kernels.h"

namespace py = pybind11;

namespace pplx {
namespace {

using CopyKernel = void (*)(void* to, const void* from, std::size_t bytes);

void plain_memcpy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }

CopyKernel copy_kernel(const std::string& name) {
  if (name == "memcpy") return plain_memcpy;
  if (name == "copy") return cpu::kernels().copy;
  if (name == "stream") return cpu::kernels().stream;
  throw py::value_error("no copy kernel '" + name + "': there are memcpy, copy, stream");
}

// One row of the list that Python makes. Without `to` the bytes are only read.
struct CopyOp {
  std::int64_t to, from, bytes;
};
static_assert(sizeof(CopyOp) == 24, "rows of an int64 array");

// Reads one word of each cache line: the cost of bringing the bytes in, whatever is done with them.
std::uint64_t read_all(const char* from, std::int64_t bytes) {
  std::uint64_t sum = 0;
  for (std::int64_t at = 0; at < bytes; at += 64) {
    std::uint64_t word;
    std::memcpy(&word, from + at, sizeof word);
    sum ^= word;
  }
  return sum;
}

class CopyRun final : public cpu::StagedRun {
 public:
  CopyRun(const CopyOp* ops, std::uint32_t n, CopyKernel copy) : ops_(ops), n_(n), copy_(copy) {}

 private:
  static constexpr std::uint32_t kOpsPerUnit = 8;   // about the number that a phase claims at once

  bool begin(int stage, std::vector<std::uint32_t>& units) override {
    if (stage > 0) return false;
    units.assign(1, (n_ + kOpsPerUnit - 1) / kOpsPerUnit);
    return true;
  }

  void run(int, std::uint32_t, std::uint32_t unit) override {
    std::uint64_t seen = 0;
    for (std::uint32_t i = unit * kOpsPerUnit; i < std::min(n_, (unit + 1) * kOpsPerUnit); ++i) {
      const CopyOp& op = ops_[i];
      const char* from = reinterpret_cast<const char*>(op.from);
      if (op.to != 0)
        copy_(reinterpret_cast<void*>(op.to), from, static_cast<std::size_t>(op.bytes));
      else
        seen ^= read_all(from, op.bytes);
    }
    seen_.fetch_xor(seen, std::memory_order_relaxed);   // so that the reads are not optimised away
  }

  const CopyOp* const ops_;
  const std::uint32_t n_;
  const CopyKernel copy_;
  std::atomic<std::uint64_t> seen_{0};
};

class Copier {
 public:
  explicit Copier(unsigned threads) : pool_(threads > 0 ? threads - 1 : 0) {}

  void run(const py::array_t<std::int64_t, py::array::c_style>& ops, const std::string& kernel) {
    if (ops.ndim() != 2 || ops.shape(1) != 3) throw py::value_error("ops must be [n, 3]: to, from, bytes");
    const auto* first = reinterpret_cast<const CopyOp*>(ops.data());
    const auto n = static_cast<std::uint32_t>(ops.shape(0));
    const CopyKernel copy = copy_kernel(kernel);
    const py::gil_scoped_release unlocked;
    CopyRun run(first, n, copy);
    const cpu::ThreadPool::Help help(pool_, run);
    cpu::Backoff backoff;
    while (!run.poll()) backoff.pause();
  }

 private:
  cpu::ThreadPool pool_;
};

}  // namespace

void bind_copier(py::module_& m) {
  py::class_<Copier>(m, "Copier", "Bare copies by threads of its own.")
      .def(py::init<unsigned>(), py::arg("threads"))
      .def("run", &Copier::run, py::arg("ops"), py::arg("kernel"),
           "`ops`: int64 [n, 3], to, from, bytes, as addresses; to == 0 only reads. `kernel`: memcpy, copy or stream.");
}

}  // namespace pplx
