#include "shared_memory.h"

#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "../runtime.h"

namespace pplx::cuda {
namespace {

// The driver's memory calls, found at run time: the module neither links against libcuda nor needs it to be imported.
struct Call {
  void* at = nullptr;

  explicit Call(const char* name) {
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    check(cudaGetDriverEntryPointByVersion(name, &at, 12000, cudaEnableDefault, &result), name);
    if (result != cudaDriverEntryPointSuccess || at == nullptr) throw CudaError(std::string("the CUDA driver has no ") + name);
  }
  template <typename F>
  operator F*() const {
    return reinterpret_cast<F*>(at);
  }
};
struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity = Call("cuMemGetAllocationGranularity");
  decltype(&cuMemCreate) create = Call("cuMemCreate");
  decltype(&cuMemRelease) release = Call("cuMemRelease");
  decltype(&cuMemExportToShareableHandle) export_handle = Call("cuMemExportToShareableHandle");
  decltype(&cuMemImportFromShareableHandle) import_handle = Call("cuMemImportFromShareableHandle");
  decltype(&cuMemAddressReserve) reserve = Call("cuMemAddressReserve");
  decltype(&cuMemAddressFree) free_address = Call("cuMemAddressFree");
  decltype(&cuMemMap) map = Call("cuMemMap");
  decltype(&cuMemUnmap) unmap = Call("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access = Call("cuMemSetAccess");
  decltype(&cuMemGetHandleForAddressRange) export_range = Call("cuMemGetHandleForAddressRange");
  decltype(&cuDevicePrimaryCtxGetState) context_state = Call("cuDevicePrimaryCtxGetState");
  decltype(&cuGetErrorString) error_string = Call("cuGetErrorString");
};

// Throws where there is no driver.
const Driver& driver() {
  static const Driver found;
  return found;
}

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().error_string(result, &text);
  throw CudaError(std::string(what) + ": " + (text != nullptr ? text : "unknown error") + " (" + std::to_string(result) + ")");
}

std::string out_of_memory(std::size_t bytes, const std::string& what, int device) {
  std::size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  return what + " needs " + std::to_string(bytes) + " bytes of memory on GPU " + std::to_string(device) + ", " +
         std::to_string(free) + " are free: use a smaller max_tokens_per_rank or fewer AllToAlls";
}

}  // namespace

bool has_context(int device) {
  unsigned flags = 0;
  int active = 0;
  return driver().context_state(device, &flags, &active) == CUDA_SUCCESS && active != 0;
}

SharedMemory::SharedMemory(int device, std::size_t bytes, const std::string& what, bool by_nics) : device_(device) {
  const OnDevice on(device);
  check(cudaFree(nullptr), "making a CUDA context");
  if (!allocate_virtual(bytes, what, by_nics)) {
    void* allocated = nullptr;
    const cudaError_t error = cudaMalloc(&allocated, bytes);
    if (error == cudaErrorMemoryAllocation) throw CudaError(out_of_memory(bytes, what, device));
    check(error, what.c_str());
    kind_ = Kind::Allocated;
    address_ = reinterpret_cast<unsigned long long>(allocated);
    bytes_ = bytes;
  }
  check(cudaMemset(data(), 0, bytes_), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");   // before anybody learns of it
}

// False: this driver exports no descriptors (a container without the device, a GPU without virtual memory management).
bool SharedMemory::allocate_virtual(std::size_t bytes, const std::string& what, bool by_nics) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = device_;
  p.allocFlags.gpuDirectRDMACapable = by_nics ? 1 : 0;
  std::size_t granule = 0;
  if (driver().granularity(&granule, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) != CUDA_SUCCESS) return false;
  bytes_ = (bytes + granule - 1) / granule * granule;
  const CUresult created = driver().create(&handle_, bytes_, &p, 0);
  if (created == CUDA_ERROR_OUT_OF_MEMORY) throw CudaError(out_of_memory(bytes_, what, device_));
  if (created != CUDA_SUCCESS) return false;
  int fd = -1;
  if (driver().export_handle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS) {
    driver().release(handle_);
    return false;
  }
  ::close(fd);
  map();
  return true;
}

SharedMemory::SharedMemory(int device, int fd, std::size_t bytes) : device_(device), bytes_(bytes) {
  const OnDevice on(device);
  check(driver().import_handle(&handle_, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle");
  map();
}

SharedMemory::SharedMemory(int device, const std::string& ipc_handle, std::size_t bytes)
    : device_(device), kind_(Kind::Imported), bytes_(bytes) {
  const OnDevice on(device);
  cudaIpcMemHandle_t handle;
  if (ipc_handle.size() != sizeof handle) throw CudaError("a cudaIpc handle of " + std::to_string(ipc_handle.size()) + " bytes");
  std::memcpy(&handle, ipc_handle.data(), sizeof handle);
  void* mapped = nullptr;
  check(cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  address_ = reinterpret_cast<unsigned long long>(mapped);
}

SharedMemory::SharedMemory(int device, char* mapped, std::size_t bytes)
    : device_(device), kind_(Kind::Lent), address_(reinterpret_cast<unsigned long long>(mapped)), bytes_(bytes) {}

SharedMemory::SharedMemory(int device, int fd, std::size_t bytes, std::size_t begin, std::size_t end)
    : device_(device), kind_(Kind::Host), bytes_(bytes) {
  const OnDevice on(device);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED)
    throw CudaError("mapping " + std::to_string(bytes) + " bytes of a relay's host memory: " + std::strerror(errno));
  mapped_ = static_cast<char*>(memory);
  madvise(mapped_, bytes, MADV_DONTFORK);
  pinned_ = mapped_ + begin;
  void* there = nullptr;
  cudaError_t error = cudaHostRegister(pinned_, end - begin, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (error == cudaSuccess && (error = cudaHostGetDevicePointer(&there, pinned_, 0)) != cudaSuccess) cudaHostUnregister(pinned_);
  if (error != cudaSuccess) munmap(mapped_, bytes);
  check(error, "pinning a relay's host memory");
  address_ = reinterpret_cast<unsigned long long>(there) - begin;
}

void SharedMemory::map() {
  try {
    check(driver().reserve(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve");
    check(driver().map(address_, bytes_, 0, handle_, 0), "cuMemMap");
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device_;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const CUresult granted = driver().set_access(address_, bytes_, &access, 1);
    if (granted != CUDA_SUCCESS) driver().unmap(address_, bytes_);
    check(granted, "cuMemSetAccess (has this GPU peer access to that one?)");
  } catch (...) {
    if (address_ != 0) driver().free_address(address_, bytes_);
    driver().release(handle_);
    throw;
  }
}

SharedMemory::~SharedMemory() {
  if (fork_.in_child()) return;
  if (kind_ == Kind::Virtual) {
    driver().unmap(address_, bytes_);
    driver().free_address(address_, bytes_);
    driver().release(handle_);
  }
  if (kind_ == Kind::Allocated) cudaFree(data());
  if (kind_ == Kind::Imported) cudaIpcCloseMemHandle(data());
  if (kind_ != Kind::Host) return;
  cudaHostUnregister(pinned_);
  cudaGetLastError();
  munmap(mapped_, bytes_);
}

int SharedMemory::descriptor() const {
  int fd = -1;
  check(driver().export_handle(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), "cuMemExportToShareableHandle");
  return fd;
}

std::string SharedMemory::ipc_handle() const {
  cudaIpcMemHandle_t handle;
  check(cudaIpcGetMemHandle(&handle, data()), "cudaIpcGetMemHandle");
  return std::string(reinterpret_cast<const char*>(&handle), sizeof handle);
}

int export_dmabuf(int device, void* base, std::size_t bytes) {
  int supported = 0, fd = -1;
  const auto attribute = static_cast<cudaDeviceAttr>(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);   // the runtime numbers them alike
  if (cudaDeviceGetAttribute(&supported, attribute, device) != cudaSuccess || supported == 0) {
    cudaGetLastError();
    return -1;
  }
  const auto address = reinterpret_cast<CUdeviceptr>(base);
  const CUresult result = driver().export_range(&fd, address, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  return result == CUDA_SUCCESS ? fd : -1;
}

}  // namespace pplx::cuda
