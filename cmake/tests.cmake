# Every tests/cpp/*.cpp is one program with its own main. Not part of ALL: `pplx_cpp_tests` builds them.
enable_testing()
add_custom_target(pplx_cpp_tests)
file(GLOB test_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/cpp/*.cpp")
foreach(source ${test_sources})
  get_filename_component(name "${source}" NAME_WE)
  # In a program with one thread there is nothing for ThreadSanitizer to see.
  file(STRINGS "${source}" threads REGEX "std::thread|ThreadPool|ProxyThread" LIMIT_COUNT 1)
  if(PPLX_SANITIZE STREQUAL "thread" AND NOT threads)
    continue()
  endif()
  add_executable(${name} EXCLUDE_FROM_ALL "${source}")
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests")
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}/tests/cpp")
  # The library keeps its own. A test takes longer to compile than to run: -O1 takes half as long as -O3, and -O0 under
  # AddressSanitizer less than half of -O1. Those that compare megabytes would lose more than that.
  if(PPLX_SANITIZE AND NOT threads AND NOT name MATCHES "test_(libfabric|fuzz_blocks)")
    target_compile_options(${name} PRIVATE -O0)
  else()
    target_compile_options(${name} PRIVATE -O1)
  endif()
  target_link_libraries(${name} PRIVATE pplx_core pplx_instruments)
  add_dependencies(pplx_cpp_tests ${name})
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 300)
endforeach()

# A libfabric for tests of providers that need a NIC.
if(PPLX_LIBFABRIC_HEADERS AND TARGET test_efa)
  add_library(fake_libfabric MODULE EXCLUDE_FROM_ALL "${PROJECT_SOURCE_DIR}/tests/cpp/fake/libfabric.cpp")
  set_target_properties(fake_libfabric PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests" PREFIX ""
                                                   CXX_VISIBILITY_PRESET default)
  target_include_directories(fake_libfabric SYSTEM PRIVATE "${PPLX_LIBFABRIC_HEADERS}")
  target_compile_features(fake_libfabric PRIVATE cxx_std_17)
  add_dependencies(test_efa fake_libfabric)
endif()
if(TARGET test_efa)
  target_compile_definitions(test_efa PRIVATE "PPLX_FAKE_LIBFABRIC=\"${PROJECT_BINARY_DIR}/tests/fake_libfabric.so\"")
endif()

# One thread, too.
if(NOT PPLX_SANITIZE STREQUAL "thread")
  add_dependencies(pplx_cpp_tests pplx_sim)
  add_test(NAME sim COMMAND pplx_sim --seeds 100)
  set_tests_properties(sim PROPERTIES TIMEOUT 300)
endif()

# All that pytest builds when it comes to it; pplx_python_tests: without the programs of tests/cpp.
add_custom_target(pplx_python_tests)
add_custom_target(pplx_tests DEPENDS pplx_cpp_tests pplx_python_tests)
if(TARGET pplx_sim)
  add_dependencies(pplx_python_tests pplx_sim)
endif()
# pplx_comm._cuda for a CPU. Its fibers change stacks in x86-64's assembler.
if(PPLX_PYTHON AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  add_subdirectory(tests/emulation)
  add_dependencies(pplx_python_tests pplx_emulation)
endif()

# The software device's own tests: processes that call the verbs functions on it. One program; tests/efa/test_device.py runs its cases.
if(TARGET efasoft)
  file(GLOB device_cases CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/efa/device/*.cpp")
  add_executable(efasoft_cases EXCLUDE_FROM_ALL ${device_cases})
  set_target_properties(efasoft_cases PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/tests" CXX_STANDARD 20)
  target_link_libraries(efasoft_cases PRIVATE pplx_flags efasoft_ibverbs efasoft_efa Threads::Threads)
  add_dependencies(pplx_cpp_tests efasoft_cases)
  add_dependencies(pplx_python_tests efasoft_cases)
  add_test(NAME efasoft_cases COMMAND efasoft_cases)
  # A child of a fork starts threads again, which ThreadSanitizer ends unless it is told not to.
  set_tests_properties(efasoft_cases PROPERTIES TIMEOUT 300 ENVIRONMENT "TSAN_OPTIONS=die_after_fork=0")
endif()
