# bench/_instruments, bench/_instruments_cuda and bench/model/_model. For a checkout only: no wheel has them.
set(native "${PROJECT_SOURCE_DIR}/bench/native")
# C++ tests use some of them too.
add_library(pplx_instruments STATIC EXCLUDE_FROM_ALL "${native}/bare_writes.cpp" "${native}/null_fabric.cpp" "${native}/proxy_cost.cpp")
target_link_libraries(pplx_instruments PUBLIC pplx_core)
if(NOT (PPLX_PYTHON AND PPLX_IN_PLACE))
  return()
endif()

file(GLOB instruments CONFIGURE_DEPENDS "${native}/module.cpp" "${native}/bind_*.cpp")
set_source_files_properties("${native}/bind_copier.cpp" PROPERTIES COMPILE_OPTIONS -O3)   # its loop is a floor
pybind11_add_module(_instruments MODULE NO_EXTRAS ${instruments})
pplx_as_bindings(_instruments)
target_link_libraries(_instruments PRIVATE pplx_instruments)
set_target_properties(_instruments PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/bench")

if(TARGET _cuda)
  file(GLOB instruments_cuda CONFIGURE_DEPENDS "${native}/cuda/*.cpp" "${native}/cuda/*.cu" "${PROJECT_SOURCE_DIR}/src/cuda/host/memory/*.cpp")
  # A handover goes through an AllToAll's own memory.
  foreach(part gdr_memory host_heap)
    list(APPEND instruments_cuda "${PROJECT_SOURCE_DIR}/src/cuda/host/${part}.cpp")
  endforeach()
  pybind11_add_module(_instruments_cuda MODULE NO_EXTRAS ${instruments_cuda})
  target_link_libraries(_instruments_cuda PRIVATE pplx_instruments)
  pplx_as_cuda_module(_instruments_cuda)
  set_target_properties(_instruments_cuda PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/bench")
endif()

file(GLOB model_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bench/model/*.cpp")
set_source_files_properties("${PROJECT_SOURCE_DIR}/bench/model/bind.cpp" PROPERTIES COMPILE_OPTIONS -O1)
pybind11_add_module(_model MODULE NO_EXTRAS ${model_sources})
target_link_libraries(_model PRIVATE pplx_core)
set_target_properties(_model PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/bench/model")
