# The simulation: the production proxy and phases over a network in memory. Not part of ALL, like the tests.
file(GLOB sim_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/proxy/sim/*.cpp")
add_executable(pplx_sim EXCLUDE_FROM_ALL ${sim_sources})
set_target_properties(pplx_sim PROPERTIES OUTPUT_NAME sim RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}")
target_link_libraries(pplx_sim PRIVATE pplx_core)
