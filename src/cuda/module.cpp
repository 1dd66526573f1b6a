#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

namespace {

// Each of these answers 0 where there is no driver: a failed call leaves its argument alone.
int device_count() {
    int count = 0;
    cudaGetDeviceCount(&count);
    return count;
}

int driver_version() {
    int version = 0;
    cudaDriverGetVersion(&version);
    return version;
}

int runtime_version() {
    int version = 0;
    cudaRuntimeGetVersion(&version);
    return version;
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
    m.doc() = "The CUDA half of pplx_comm.";
    m.def("device_count", &device_count, "CUDA devices that this process sees; 0 without a driver.");
    m.def("driver_version", &driver_version, "The CUDA version of the driver (13000 is 13.0); 0 without one.");
    m.def("runtime_version", &runtime_version, "The CUDA version that this module was built with.");
}
