// bench/_instruments: measuring instruments of benchmarks and tests, and stand-ins for parts of the library.
#include <pybind11/pybind11.h>

namespace pplx {
void bind_bare_writes(pybind11::module_& m);
void bind_copier(pybind11::module_& m);
void bind_proxy_cost(pybind11::module_& m);
void bind_quantise(pybind11::module_& m);
void bind_spin_barrier(pybind11::module_& m);
}  // namespace pplx

PYBIND11_MODULE(_instruments, m) {
  m.doc() = "Instruments of the benchmarks and tests; no part of pplx_comm.";
  pybind11::module_::import("pplx_comm._core");   // has the fabrics, their errors, and the wires
  pplx::bind_bare_writes(m);
  pplx::bind_copier(m);
  pplx::bind_proxy_cost(m);
  pplx::bind_quantise(m);
  pplx::bind_spin_barrier(m);
}
