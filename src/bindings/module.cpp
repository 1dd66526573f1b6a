#include <pybind11/pybind11.h>

#include "bind_trace.h"
#include "cpu/vector/kernels.h"
#include "protocol/deadlines.h"

namespace pplx {
void bind_config(pybind11::module_& m);
void bind_desk(pybind11::module_& m);
void bind_exchange(pybind11::module_& m);
void bind_fabric(pybind11::module_& m);
void bind_proxy(pybind11::module_& m);
}  // namespace pplx

PYBIND11_MODULE(_core, m) {
  m.doc() = "The host half of pplx_comm: the CPU device, the proxy and the fabric.";
  pplx::bind_config(m);
  pplx::bind_desk(m);
  pplx::bind_exchange(m);
  pplx::bind_fabric(m);
  pplx::bind_proxy(m);
  pplx::bind_trace(m);
  m.def("isa", [] { return pplx::cpu::kernels().isa; }, "The instruction set that the CPU device uses.");
  m.attr("FIRST_STEP_FACTOR") = pplx::deadlines::kFirstStepFactor;
  m.def(
      "deadlines",
      [] {
        pybind11::list all;
        for (const pplx::deadlines::Deadline* one : pplx::deadlines::kAll)
          all.append(pybind11::make_tuple(one->name, one->seconds, one->what));
        return all;
      },
      "Name, seconds and meaning of every deadline of C++ code.");
}
