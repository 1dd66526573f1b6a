# pplx_comm._nvshmem: _cuda's sources once more, with kernels that call NVSHMEM. A module of its own, which is loaded for
# transport="nvshmem" alone.
if(NOT PPLX_NVSHMEM)
  return()
endif()
if(NOT PPLX_NVSHMEM_HOME)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.util as u; s = u.find_spec('nvidia.nvshmem'); print(list(s.submodule_search_locations)[0] if s else '', end='')"
    OUTPUT_VARIABLE home ERROR_QUIET)
  set(PPLX_NVSHMEM_HOME "${home}" CACHE PATH "" FORCE)
endif()
set(version "")
if(PPLX_NVSHMEM_HOME AND EXISTS "${PPLX_NVSHMEM_HOME}/include/non_abi/nvshmem_version.h")
  file(STRINGS "${PPLX_NVSHMEM_HOME}/include/non_abi/nvshmem_version.h" numbers REGEX "define NVSHMEM_VENDOR_(MAJOR|MINOR|PATCH)_VERSION")
  string(REGEX REPLACE "[^0-9;]" "" version "${numbers}")
  string(REPLACE ";" "." version "${version}")
endif()
# Built with 3.8 it does not load beside the 3.4.5 that PyTorch's wheel pins; built with 3.4.5 it loads with either.
if(NOT version VERSION_EQUAL 3.4.5)
  message(FATAL_ERROR "PPLX_NVSHMEM=ON needs NVSHMEM 3.4.5 (pip install nvidia-nvshmem-cu13==3.4.5, or PPLX_NVSHMEM_HOME); "
                      "found: '${version}'")
endif()
message(STATUS "NVSHMEM: ${version} in ${PPLX_NVSHMEM_HOME}")

file(GLOB nvshmem_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/nvshmem/*.cpp")
list(FILTER cuda_sources EXCLUDE REGEX "/protocol_check\\.cu$")
pybind11_add_module(_nvshmem MODULE NO_EXTRAS ${cuda_sources} ${nvshmem_sources})
pplx_as_cuda_module(_nvshmem)
target_include_directories(_nvshmem SYSTEM PRIVATE "${PPLX_NVSHMEM_HOME}/include")
target_compile_definitions(_nvshmem PRIVATE "PPLX_CARRIER=\"nvshmem/carrier.cuh\"")
# Functions that are not inlined know nothing of the kernels that call them: those of dispatch leave each thread 96 registers. A kernel
# that says how many threads it has is not bound by this.
target_compile_options(_nvshmem PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--maxrregcount=96>)
if(PPLX_CUDA_STAGES)
  target_compile_definitions(_nvshmem PRIVATE PPLX_CUDA_STAGES=1)
endif()
if(PPLX_CUDA_FUZZ)
  target_compile_definitions(_nvshmem PRIVATE PPLX_CUDA_FUZZ=1)
endif()
# The wheel has no unversioned name to link by, and libnvshmem_device.a is relocatable device code.
target_link_libraries(_nvshmem PRIVATE "${PPLX_NVSHMEM_HOME}/lib/libnvshmem_device.a" "${PPLX_NVSHMEM_HOME}/lib/libnvshmem_host.so.3")
set_target_properties(_nvshmem PROPERTIES CUDA_SEPARABLE_COMPILATION ON CUDA_RESOLVE_DEVICE_SYMBOLS ON
                                          # In site-packages they are neighbours. pplx_comm.wiring.nvshmem loads it first, wherever it is.
                                          BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/../nvidia/nvshmem/lib")
pplx_place_module(_nvshmem)
