// The host side of NVSHMEM: its start, its heap, and where this GPU's stores reach other PEs' memory. Python says when each may be
// called: where NVSHMEM itself would end the process, or wait for a rank that has died (pplx_comm/wiring/nvshmem.py).
#include <cuda_runtime_api.h>
#include <nvshmem_host.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "../cuda/error.h"

namespace py = pybind11;

namespace pplx::cuda {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

constexpr nvshmemi_version_t kVersion{NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};

bool is_initialized() { return nvshmemx_init_status() > NVSHMEM_STATUS_IS_BOOTSTRAPPED; }

std::string unique_id() {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (nvshmemx_get_uniqueid(&id) != 0) throw CudaError("nvshmemx_get_uniqueid failed");
  return {reinterpret_cast<const char*>(&id), sizeof id};
}

// nvshmemx_init_attr() ends the process where it fails; this is the function that it calls.
void begin(int device, unsigned flags, nvshmemx_init_attr_t* attributes) {
  check(cudaSetDevice(device), "cudaSetDevice");
  check(cudaFree(nullptr), "making a CUDA context");
  int provided = 0;
  if (nvshmemi_init_thread(NVSHMEM_THREAD_SERIALIZED, &provided, flags, attributes, kVersion) != 0 || !is_initialized())
    throw CudaError("NVSHMEM could not be initialised; NVSHMEM_DEBUG=INFO makes it say why");
}

void init(int device, const std::string& id, int rank, int world) {
  nvshmemx_uniqueid_t unique = NVSHMEMX_UNIQUEID_INITIALIZER;
  if (id.size() != sizeof unique) throw CudaError("a unique id of NVSHMEM has " + std::to_string(sizeof unique) + " bytes, not " + std::to_string(id.size()));
  std::memcpy(&unique, id.data(), sizeof unique);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  nvshmemx_set_attr_uniqueid_args(rank, world, &unique, &attributes);
  begin(device, NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
}

// Of an NVSHMEM that another library of this process has begun: this module's kernels have a device state of their own.
void attach(int device) { begin(device, 0, nullptr); }

}  // namespace

void bind_carrier(py::module_& m) {
  m.attr("version") = std::to_string(kVersion.major) + "." + std::to_string(kVersion.minor) + "." + std::to_string(kVersion.patch);
  m.def("is_initialized", &is_initialized, "Whether this process has an NVSHMEM, whoever began it.");
  m.def("unique_id", [] { return py::bytes(unique_id()); }, "For init(), on one rank.");
  m.def(
      "init",
      [](int device, const py::bytes& id, int rank, int world) {
        const std::string bytes = id;
        const py::gil_scoped_release unlocked;
        init(device, bytes, rank, world);
      },
      py::arg("device"), py::arg("unique_id"), py::arg("rank"), py::arg("world"),
      "Collective; may wait for ever for a rank that does not come.");
  m.def("attach", &attach, py::arg("device"), Unlocked(), "Where is_initialized(): gives this module's kernels its state.");
  m.def("my_pe", [] { return nvshmem_my_pe(); });
  m.def("n_pes", [] { return nvshmem_n_pes(); });
  m.def(
      "allocate",
      [](int device, std::size_t bytes) {
        check(cudaSetDevice(device), "cudaSetDevice");
        return reinterpret_cast<std::uintptr_t>(nvshmem_calloc(1, bytes));
      },
      py::arg("device"), py::arg("nbytes"), Unlocked(),
      "The address of zeroed symmetric memory, or 0. Collective over all PEs; may wait for ever for one that does not come.");
  m.def(
      "reached_at",
      [](std::uintptr_t address, int pe) { return reinterpret_cast<std::uintptr_t>(nvshmem_ptr(reinterpret_cast<void*>(address), pe)); },
      py::arg("address"), py::arg("pe"), "Where this GPU's stores reach that place of a PE; 0: nowhere.");
}

}  // namespace pplx::cuda
