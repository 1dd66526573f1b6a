# pplx_flags: what every C++ file of the project is compiled with.
add_library(pplx_flags INTERFACE)
target_compile_options(
  pplx_flags
  INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall>
            $<$<COMPILE_LANGUAGE:CXX>:-Wextra>
            # The same bits on every device and ISA: multiply then add, each rounded. Hence no -ffast-math either.
            $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>
            # Changes no result, and lets sqrt and friends become instructions.
            $<$<COMPILE_LANGUAGE:CXX>:-fno-math-errno>)
target_include_directories(pplx_flags INTERFACE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/src")

if(PPLX_SANITIZE)
  set(sanitize -fsanitize=${PPLX_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  # assert() lives in these builds. Traces need lines and no more of -g, which would take half as long again to compile.
  string(APPEND CMAKE_CXX_FLAGS_RELEASE " -g1 -Og -UNDEBUG")
  target_compile_options(pplx_flags INTERFACE ${sanitize})
  target_link_options(pplx_flags INTERFACE ${sanitize})
endif()
