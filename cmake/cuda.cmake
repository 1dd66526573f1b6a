# pplx_comm._cuda: a module of its own, so that _core never depends on CUDA.
if(PPLX_CUDA STREQUAL "OFF")
  return()
endif()
# The GPUs of this machine, as numbers of their architectures: 90 for compute capability 9.0.
set(gpus "")
find_program(PPLX_NVIDIA_SMI nvidia-smi)
if(PPLX_NVIDIA_SMI)
  execute_process(COMMAND "${PPLX_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE capabilities RESULT_VARIABLE failed ERROR_QUIET)
  if(failed EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" gpus "${capabilities}")
    string(REPLACE "." "" gpus "${gpus}")
    list(REMOVE_DUPLICATES gpus)
  endif()
endif()
if(PPLX_CUDA STREQUAL "AUTO" AND gpus STREQUAL "")
  message(STATUS "CUDA: no GPU here, so no kernels are built (CMAKE_ARGS=-DPPLX_CUDA=ON builds them all the same)")
  return()
endif()

# Leaves the modules out, or fails where they were asked for.
macro(pplx_without_cuda reason)
  if(PPLX_CUDA STREQUAL "ON")
    message(FATAL_ERROR "PPLX_CUDA=ON, but ${reason}")
  endif()
  message(STATUS "CUDA: ${reason}, so no kernels are built")
  return()
endmacro()

set(needed 12.3)   # src/cuda/common/arrival.cuh moves sixteen bytes as one, .b128, which is of PTX 8.3
find_program(PPLX_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
if(NOT PPLX_NVCC)
  pplx_without_cuda("there is no nvcc in PATH, CUDA_HOME or /usr/local/cuda: CUDA ${needed} or newer is needed")
endif()
execute_process(COMMAND "${PPLX_NVCC}" --version OUTPUT_VARIABLE said ERROR_QUIET)
string(REGEX MATCH "release ([0-9.]+)" said "${said}")
if(CMAKE_MATCH_1 VERSION_LESS needed)
  pplx_without_cuda("${PPLX_NVCC} is CUDA ${CMAKE_MATCH_1}: ${needed} or newer is needed")
endif()
# enable_language looks in PATH and CUDACXX only.
set(CMAKE_CUDA_COMPILER "${PPLX_NVCC}" CACHE FILEPATH "")

# Must be known before enable_language, which otherwise picks one of its own. PPLX_CUDA=ON is for any GPU.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  execute_process(COMMAND "${PPLX_NVCC}" --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
  if(PPLX_CUDA STREQUAL "ON")
    set(gpus 80 90 100 120)
  endif()
  set(architectures "")
  foreach(gpu ${gpus})
    # An older nvcc does not know the newer parts.
    if(known MATCHES "compute_${gpu}[\r\n]")
      # Kernels use what only 9.0 and 10.x themselves have.
      string(REGEX REPLACE "^(90|10[0-9])$" "\\1a" gpu ${gpu})
      list(APPEND architectures ${gpu}-real)
    elseif(NOT PPLX_CUDA STREQUAL "ON")
      pplx_without_cuda("${PPLX_NVCC} does not know this machine's GPU, sm_${gpu}: a newer CUDA is needed")
    endif()
  endforeach()
  set(CMAKE_CUDA_ARCHITECTURES "${architectures}" CACHE STRING "GPU architectures of pplx_comm._cuda")
endif()
enable_language(CUDA)
message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${CMAKE_CUDA_ARCHITECTURES}")
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)

# One file includes every protocol header in device code; a new header joins it by existing.
file(GLOB headers CONFIGURE_DEPENDS RELATIVE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}/src/protocol/*.h")
set(PPLX_PROTOCOL_INCLUDES "")
foreach(header ${headers})
  string(APPEND PPLX_PROTOCOL_INCLUDES "#include \"${header}\"\n")
endforeach()
configure_file("${PROJECT_SOURCE_DIR}/cmake/protocol_headers.h.in" "${PROJECT_BINARY_DIR}/generated/protocol_headers.h")

file(GLOB cuda_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/cuda/*/*.cu" "${PROJECT_SOURCE_DIR}/src/cuda/host/*.cpp"
  "${PROJECT_SOURCE_DIR}/src/cuda/host/memory/*.cpp" "${PROJECT_SOURCE_DIR}/src/bindings/cuda/*.cpp")
pybind11_add_module(_cuda MODULE NO_EXTRAS ${cuda_sources})
# Properties of every module with CUDA in it.
function(pplx_as_cuda_module target)
  # The C++ files call the runtime too.
  target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_link_libraries(${target} PRIVATE pplx_flags)
  target_compile_options(${target} PRIVATE
    # The arithmetic of the CPU path: no contraction, on both sides.
    $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false>
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffp-contract=off>
    # constexpr functions of the protocol are called on both sides.
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
  # Static: the module must import, and say that there is no device, where no CUDA is installed.
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY Static CUDA_RESOLVE_DEVICE_SYMBOLS OFF)
endfunction()

pplx_as_cuda_module(_cuda)
target_include_directories(_cuda PRIVATE "${PROJECT_BINARY_DIR}/generated")
if(PPLX_CUDA_FUZZ)
  target_compile_definitions(_cuda PRIVATE PPLX_CUDA_FUZZ=1)
endif()
pplx_place_module(_cuda)

# A module of its own: each stage costs a launch some cycles. pplx_comm.trace loads it in _cuda's place.
if(PPLX_CUDA_STAGES)
  set(stages_sources "${cuda_sources}")
  list(FILTER stages_sources EXCLUDE REGEX "/protocol_check\\.cu$")
  pybind11_add_module(_cuda_stages MODULE NO_EXTRAS ${stages_sources})
  pplx_as_cuda_module(_cuda_stages)
  target_compile_definitions(_cuda_stages PRIVATE PPLX_CUDA_STAGES=1)
  pplx_place_module(_cuda_stages COMPONENT stages)
endif()

include("${CMAKE_CURRENT_LIST_DIR}/nvshmem.cmake")
