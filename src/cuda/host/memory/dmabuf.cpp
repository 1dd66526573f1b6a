#include "dmabuf.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace pplx::cuda {
namespace {

// Null where the driver is older than CUDA 11.7.
decltype(&cuMemGetHandleForAddressRange) exporter() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  if (cudaGetDriverEntryPointByVersion("cuMemGetHandleForAddressRange", &found, 12000, cudaEnableDefault, &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess)
    return nullptr;
  return reinterpret_cast<decltype(&cuMemGetHandleForAddressRange)>(found);
}

}  // namespace

int export_dmabuf(int device, void* base, std::size_t bytes) {
  int supported = 0, fd = -1;
  const auto export_range = exporter();
  const auto attribute = static_cast<cudaDeviceAttr>(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED);   // the runtime numbers them alike
  if (export_range == nullptr || cudaDeviceGetAttribute(&supported, attribute, device) != cudaSuccess || supported == 0) {
    cudaGetLastError();
    return -1;
  }
  const CUresult result = export_range(&fd, reinterpret_cast<CUdeviceptr>(base), bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
  return result == CUDA_SUCCESS ? fd : -1;
}

}  // namespace pplx::cuda
