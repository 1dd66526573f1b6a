#include "shared_memory.h"

#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "../error.h"
#include "driver.h"

namespace pplx::cuda {
namespace {

std::string out_of_memory(std::size_t bytes, const std::string& what, int device) {
  std::size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  return what + " needs " + std::to_string(bytes) + " bytes of memory on GPU " + std::to_string(device) + ", " +
         std::to_string(free) + " are free: use a smaller max_tokens_per_rank or fewer AllToAlls";
}

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = device;
  return p;
}

}  // namespace

SharedMemory::SharedMemory(int device, std::size_t bytes, const std::string& what) : device_(device) {
  check(cudaSetDevice(device), "cudaSetDevice");
  check(cudaFree(nullptr), "making a CUDA context");
  if (!allocate_virtual(bytes, what)) {
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
bool SharedMemory::allocate_virtual(std::size_t bytes, const std::string& what) {
  const CUmemAllocationProp p = properties(device_);
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
  check(cudaSetDevice(device), "cudaSetDevice");
  check(driver().import_handle(&handle_, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
        "cuMemImportFromShareableHandle");
  map();
}

SharedMemory::SharedMemory(int device, const std::string& ipc_handle, std::size_t bytes)
    : device_(device), kind_(Kind::Imported), bytes_(bytes) {
  check(cudaSetDevice(device), "cudaSetDevice");
  cudaIpcMemHandle_t handle;
  if (ipc_handle.size() != sizeof handle) throw CudaError("a cudaIpc handle of " + std::to_string(ipc_handle.size()) + " bytes");
  std::memcpy(&handle, ipc_handle.data(), sizeof handle);
  void* mapped = nullptr;
  check(cudaIpcOpenMemHandle(&mapped, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  address_ = reinterpret_cast<unsigned long long>(mapped);
}

SharedMemory::SharedMemory(int device, char* mapped, std::size_t bytes)
    : device_(device), kind_(Kind::Lent), address_(reinterpret_cast<unsigned long long>(mapped)), bytes_(bytes) {}

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
  switch (kind_) {
    case Kind::Virtual:
      driver().unmap(address_, bytes_);
      driver().free_address(address_, bytes_);
      driver().release(handle_);
      break;
    case Kind::Allocated:
      cudaFree(data());
      break;
    case Kind::Imported:
      cudaIpcCloseMemHandle(data());
      break;
    case Kind::Lent:
      break;
  }
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

}  // namespace pplx::cuda
