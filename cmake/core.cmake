# pplx_core: everything but the bindings. A static library, so that the C++ tests link what Python runs.
find_package(Threads REQUIRED)

file(GLOB core_sources CONFIGURE_DEPENDS
  "${PROJECT_SOURCE_DIR}/src/cpu/*.cpp"
  "${PROJECT_SOURCE_DIR}/src/host/*.cpp"
  "${PROJECT_SOURCE_DIR}/proxy/*.cpp"
  "${PROJECT_SOURCE_DIR}/proxy/libfabric/*.cpp")
# The vector kernels are compiled once per instruction set; the fastest that the machine has is chosen at run time.
# A kernel file must keep its functions in its own namespace or static: the linker would keep one copy of a shared inline
# function, perhaps the AVX-512 one, for everybody.
file(GLOB vector_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/cpu/vector/*.cpp")

add_library(pplx_core STATIC ${core_sources})
target_link_libraries(pplx_core PUBLIC pplx_flags Threads::Threads ${CMAKE_DL_LIBS})

function(add_vector_kernels isa)
  add_library(pplx_vector_${isa} OBJECT ${vector_sources})
  target_link_libraries(pplx_vector_${isa} PRIVATE pplx_flags)
  target_compile_definitions(pplx_vector_${isa} PRIVATE PPLX_ISA=${isa})
  target_compile_options(pplx_vector_${isa} PRIVATE ${ARGN})
  target_sources(pplx_core PRIVATE $<TARGET_OBJECTS:pplx_vector_${isa}>)
endfunction()

if(vector_sources)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
    add_vector_kernels(baseline -march=x86-64 -mtune=generic)
    add_vector_kernels(avx2 -march=x86-64 -mtune=generic -mavx2 -mf16c -mfma)
    # gcc prefers 256 bits for old parts that slow down on 512.
    add_vector_kernels(avx512 -march=x86-64 -mtune=generic -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c
      -mprefer-vector-width=512)
  else()
    add_vector_kernels(baseline)
  endif()
endif()
