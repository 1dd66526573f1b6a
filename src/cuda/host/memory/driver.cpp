#include "driver.h"

#include <string>

#include "../error.h"

namespace pplx::cuda {
namespace {

template <typename F>
void find(F& function, const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  check(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result), name);
  if (result != cudaDriverEntryPointSuccess || found == nullptr) throw CudaError(std::string("the CUDA driver has no ") + name);
  function = reinterpret_cast<F>(found);
}

Driver load() {
  Driver d{};
  find(d.granularity, "cuMemGetAllocationGranularity");
  find(d.create, "cuMemCreate");
  find(d.release, "cuMemRelease");
  find(d.export_handle, "cuMemExportToShareableHandle");
  find(d.import_handle, "cuMemImportFromShareableHandle");
  find(d.reserve, "cuMemAddressReserve");
  find(d.free_address, "cuMemAddressFree");
  find(d.map, "cuMemMap");
  find(d.unmap, "cuMemUnmap");
  find(d.set_access, "cuMemSetAccess");
  find(d.error_string, "cuGetErrorString");
  return d;
}

}  // namespace

const Driver& driver() {
  static const Driver found = load();
  return found;
}

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().error_string(result, &text);
  throw CudaError(std::string(what) + ": " + (text != nullptr ? text : "unknown error") + " (" + std::to_string(result) + ")");
}

}  // namespace pplx::cuda
