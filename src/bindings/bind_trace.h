// The spans of a module's threads, as Python has them: pplx_comm/trace.py knows how a TraceSpan lies.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "../host/trace.h"

namespace pplx {

inline void bind_trace(pybind11::module_& m) {
  m.def("start_trace", [](std::size_t spans) { Trace::of_module().start(spans); }, pybind11::arg("spans"),
        "This module keeps its latest spans from now on. The first call says how many.");
  m.def("stop_trace", [] { Trace::of_module().stop(); });
  m.def("read_trace", [] {
    const std::vector<TraceSpan> spans = Trace::of_module().read();
    return pybind11::bytes(reinterpret_cast<const char*>(spans.data()), spans.size() * sizeof(TraceSpan));
  });
}

}  // namespace pplx
