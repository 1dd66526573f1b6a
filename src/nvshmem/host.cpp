// The host side of NVSHMEM: its start, its heap, and where this GPU's stores reach other PEs' memory. Python says when each may be
// called: where NVSHMEM itself would end the process, or wait for a rank that has died (pplx_comm/wiring/nvshmem.py).
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <device_host/nvshmem_types.h>
#include <nvshmem_host.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "../cuda/host/runtime.h"

namespace py = pybind11;

// Finds the device state of this module's kernels on the current GPU. libnvshmem_device.a has it, no header declares it.
extern "C" void nvshmemi_get_mem_handle(void** device_state, void** ibgda_device_state);

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
  if (id.size() != sizeof unique)
    throw CudaError("a unique id of NVSHMEM has " + std::to_string(sizeof unique) + " bytes, not " + std::to_string(id.size()));
  std::memcpy(&unique, id.data(), sizeof unique);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  nvshmemx_set_attr_uniqueid_args(rank, world, &unique, &attributes);
  begin(device, NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
}

// Attaches to an NVSHMEM that another library of this process has begun: this module's kernels have a device state of their own.
void attach(int device) { begin(device, 0, nullptr); }

// One that the default stream does not order: that may have a step of another AllToAll in front, which waits for a rank that is
// here.
class OwnStream {
 public:
  OwnStream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate"); }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void finish(const char* what) const { check(cudaStreamSynchronize(stream_), what); }

 private:
  cudaStream_t stream_ = nullptr;
};

using State = nvshmemi_device_host_state_t;

// The state that kernels of this module read. NVSHMEM has no call on the host that returns it.
State state_of(int device) {
  constexpr const char* what = "reading NVSHMEM's device state";
  check(cudaSetDevice(device), "cudaSetDevice");
  void* common = nullptr;
  void* of_ibgda = nullptr;
  nvshmemi_get_mem_handle(&common, &of_ibgda);
  if (common == nullptr) throw CudaError("NVSHMEM has no device state for this module");
  State found;
  const OwnStream stream;
  check(cudaMemcpyAsync(&found, common, sizeof found, cudaMemcpyDeviceToHost, stream), what);
  stream.finish(what);
  return found;
}

// True if the heap takes more of the GPU's memory as it fills: CUDA's virtual memory, unless NVSHMEM_DISABLE_CUDA_VMM is set.
bool is_virtual(void* heap) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion("cuMemRetainAllocationHandle", &found, 12000, cudaEnableDefault, &result),
        "cuMemRetainAllocationHandle");
  if (result != cudaDriverEntryPointSuccess) return false;
  CUmemGenericAllocationHandle handle;
  if (reinterpret_cast<decltype(&cuMemRetainAllocationHandle)>(found)(&handle, heap) != CUDA_SUCCESS) return false;
  check(cudaGetDriverEntryPointByVersion("cuMemRelease", &found, 12000, cudaEnableDefault, &result), "cuMemRelease");
  reinterpret_cast<decltype(&cuMemRelease)>(found)(handle);
  return true;
}

py::dict room(int device) {
  std::size_t free = 0, total = 0;
  cudaDeviceProp properties;
  bool grows = false;
  State state;
  {
    const py::gil_scoped_release unlocked;
    state = state_of(device);
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    grows = is_virtual(state.heap_base);
  }
  const py::bytes uuid(properties.uuid.bytes, sizeof properties.uuid.bytes);
  return py::dict(py::arg("gpu") = uuid.attr("hex")(), py::arg("free") = free, py::arg("grows") = grows,
                  py::arg("at_most") = state.heap_size);
}

// nvshmem_calloc() ends the process where a heap that does not grow has no room; nvshmem_malloc() returns nothing.
std::uintptr_t allocate(int device, std::size_t bytes) {
  constexpr const char* what = "clearing symmetric memory";
  check(cudaSetDevice(device), "cudaSetDevice");
  void* const memory = nvshmem_malloc(bytes);
  if (memory == nullptr) return 0;
  const OwnStream stream;
  check(cudaMemsetAsync(memory, 0, bytes, stream), what);
  stream.finish(what);
  return reinterpret_cast<std::uintptr_t>(memory);
}

}  // namespace

void bind_carrier(py::module_& m) {
  m.attr("version") = std::to_string(kVersion.major) + "." + std::to_string(kVersion.minor) + "." + std::to_string(kVersion.patch);
  m.def("is_initialized", &is_initialized, "True if this process has an NVSHMEM, begun by any library.");
  m.def("unique_id", [] { return py::bytes(unique_id()); }, "Makes the id for init(), on one rank.");
  m.def("init", &init, py::arg("device"), py::arg("unique_id"), py::arg("rank"), py::arg("world"), Unlocked(),
        "Collective; may wait for ever for a rank that does not come.");
  m.def("attach", &attach, py::arg("device"), Unlocked(), "Requires is_initialized(). Gives this module's kernels its state.");
  m.def("my_pe", [] { return nvshmem_my_pe(); });
  m.def("n_pes", [] { return nvshmem_n_pes(); });
  m.def("runs_ibgda", [](int device) { return state_of(device).ibgda_is_initialized; }, py::arg("device"), Unlocked(),
        "True if kernels post to a NIC themselves. Otherwise a host thread posts their puts to a far peer, and they wait for it.");
  m.def("room", &room, py::arg("device"),
        "gpu: its UUID; free: bytes of its memory; grows: whether the heap takes of them; at_most: what the heap may come to.");
  m.def("allocate", &allocate, py::arg("device"), py::arg("nbytes"), Unlocked(),
        "The address of zeroed symmetric memory, or 0. Collective over all PEs; may wait for ever for one that does not come.");
  m.def(
      "reached_at",
      [](std::uintptr_t at, int pe) { return reinterpret_cast<std::uintptr_t>(nvshmem_ptr(reinterpret_cast<void*>(at), pe)); },
      py::arg("address"), py::arg("pe"), "Address at which this GPU's stores reach that place of a PE; 0: none.");
}

}  // namespace pplx::cuda
