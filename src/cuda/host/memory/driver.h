// The driver's memory calls, found at run time: the module neither links against libcuda nor needs it to be imported.
#pragma once

#include <cuda.h>

namespace pplx::cuda {

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuMemAddressReserve) reserve;
  decltype(&cuMemAddressFree) free_address;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
  decltype(&cuGetErrorString) error_string;
};

const Driver& driver();                           // throws where there is none
void check(CUresult result, const char* what);

}  // namespace pplx::cuda
