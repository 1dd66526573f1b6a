# bench/model/_model: the model of fabrics that cannot be run here. For a checkout only; no wheel has it.
file(GLOB model_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/bench/model/*.cpp")
pybind11_add_module(_model MODULE NO_EXTRAS ${model_sources})
target_link_libraries(_model PRIVATE pplx_core)
set_target_properties(_model PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/bench/model")
