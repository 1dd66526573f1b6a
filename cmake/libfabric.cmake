# libfabric is opened at run time (dlopen), so that one build serves a laptop without it and a host with the vendor's own.
# Only its headers are needed here.
set(PPLX_LIBFABRIC_INCLUDE "" CACHE PATH "Folder that has rdma/fabric.h (default: looked for)")
find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(PC_LIBFABRIC QUIET libfabric)
endif()
find_path(
  PPLX_LIBFABRIC_HEADERS rdma/fabric.h
  HINTS "${PPLX_LIBFABRIC_INCLUDE}" ${PC_LIBFABRIC_INCLUDEDIR}
  # Where the EFA installer puts it.
  PATHS /opt/amazon/efa/include)
if(PPLX_LIBFABRIC_HEADERS)
  message(STATUS "libfabric headers: ${PPLX_LIBFABRIC_HEADERS}")
  target_include_directories(pplx_flags SYSTEM INTERFACE "${PPLX_LIBFABRIC_HEADERS}")
  target_compile_definitions(pplx_flags INTERFACE PPLX_HAVE_LIBFABRIC_HEADERS=1)
else()
  message(STATUS "libfabric headers: none, so no libfabric transport (install libfabric-dev or set PPLX_LIBFABRIC_INCLUDE)")
endif()
