find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
if(NOT pybind11_DIR)
  # A build without a build front end has no CMAKE_PREFIX_PATH to the wheel's files.
  execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
    OUTPUT_VARIABLE wheel OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(wheel)
    set(pybind11_DIR "${wheel}")
  endif()
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 CONFIG REQUIRED)

# Bindings only pass arguments on: -O1 compiles in two thirds of the time, and pybind11, half of what is left, is read once for three files.
function(pplx_as_bindings target)
  target_compile_options(${target} PRIVATE -O1)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 3)
endfunction()

# Puts a Python module where this build wants it. More words are install()'s.
function(pplx_place_module target)
  if(PPLX_IN_PLACE)
    set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/pplx_comm")
  else()
    install(TARGETS ${target} LIBRARY DESTINATION pplx_comm ${ARGN})
  endif()
endfunction()

file(GLOB binding_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/bindings/*.cpp")
# NO_EXTRAS: link-time optimisation doubles the link for nothing, and stripping takes the names away from perf.
pybind11_add_module(_core MODULE NO_EXTRAS ${binding_sources})
pplx_as_bindings(_core)
target_link_libraries(_core PRIVATE pplx_core)
pplx_place_module(_core)

if(PPLX_IN_PLACE)
  set(version_file "${PROJECT_SOURCE_DIR}/pplx_comm/_version.py")
else()
  set(version_file "${PROJECT_BINARY_DIR}/_version.py")
  install(FILES "${version_file}" DESTINATION pplx_comm)
endif()
# At every build, not at configure: the commit changes without CMake noticing.
add_custom_target(pplx_version ALL
  COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/tools/version.py" "${version_file}"
  BYPRODUCTS "${version_file}" COMMENT "" VERBATIM)
# First, so that the package can be imported even while the library does not compile.
add_dependencies(pplx_core pplx_version)
