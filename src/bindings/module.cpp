#include <pybind11/pybind11.h>

namespace pplx {
void bind_cost(pybind11::module_& m);
void bind_exchange(pybind11::module_& m);
void bind_fabric(pybind11::module_& m);
void bind_floor(pybind11::module_& m);
void bind_kernels(pybind11::module_& m);
void bind_proxy(pybind11::module_& m);
}  // namespace pplx

PYBIND11_MODULE(_core, m) {
  m.doc() = "The host half of pplx_comm: the CPU device, the proxy and the fabric.";
  pplx::bind_exchange(m);
  pplx::bind_fabric(m);
  pplx::bind_proxy(m);
  pplx::bind_floor(m);
  pplx::bind_kernels(m);
  pplx::bind_cost(m);
}
