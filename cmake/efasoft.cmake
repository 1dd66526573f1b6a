# The software EFA device: libibverbs.so.1 and libefa.so.1, on which libfabric's own efa provider runs without a NIC.
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64|aarch64|arm64)$")
  return()
endif()
enable_language(C)
set(CMAKE_C_FLAGS_RELEASE "-O2 -g1")

set(efasoft "${PROJECT_SOURCE_DIR}/proxy/efasoft")
file(GLOB efasoft_sources CONFIGURE_DEPENDS "${efasoft}/*.c")
list(REMOVE_ITEM efasoft_sources "${efasoft}/libefa.c")

# lib<name>.so.1 as one file, for a folder that goes to the front of a search path.
function(add_efasoft name)
  set(target efasoft_${name})
  add_library(${target} SHARED ${ARGN})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${name} SUFFIX .so.1 LINK_DEPENDS "${efasoft}/lib${name}.map"
                                             C_STANDARD 11 C_EXTENSIONS ON BUILD_RPATH_USE_ORIGIN ON
                                             BUILD_RPATH "$ORIGIN" INSTALL_RPATH "$ORIGIN")
  target_compile_definitions(${target} PRIVATE _GNU_SOURCE)
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  # The library has a thread and handlers at exit, so it is never unloaded.
  target_link_options(${target} PRIVATE "LINKER:--version-script=${efasoft}/lib${name}.map" "LINKER:-z,nodelete")
  if(PPLX_SANITIZE)
    target_compile_options(${target} PRIVATE ${sanitize} -O1)
    target_link_options(${target} PRIVATE ${sanitize})
  endif()
  if(PPLX_PYTHON AND PPLX_IN_PLACE)
    set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/pplx_comm/efasoft/lib")
  elseif(PPLX_PYTHON)
    install(TARGETS ${target} LIBRARY DESTINATION pplx_comm/efasoft/lib)
  else()
    set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/efasoft" EXCLUDE_FROM_ALL ON)
  endif()
endfunction()

add_efasoft(ibverbs ${efasoft_sources})
target_link_libraries(efasoft_ibverbs PRIVATE Threads::Threads)
add_efasoft(efa "${efasoft}/libefa.c")
target_link_libraries(efasoft_efa PRIVATE efasoft_ibverbs)
add_custom_target(efasoft DEPENDS efasoft_ibverbs efasoft_efa)
