// The CPU device's quantising, by name of the instruction set.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "cpu/float_environment.h"
#include "cpu/vector/kernels.h"

namespace py = pybind11;

namespace pplx {
namespace {

void quantise(const std::string& isa, Wire wire, Dtype dtype, std::uintptr_t x, std::uint64_t rows, std::uint32_t hidden,
              std::uintptr_t codes, std::uintptr_t scales) {
  const cpu::Kernels* kernels = cpu::kernels_named(isa.c_str());
  if (kernels == nullptr) throw py::value_error("this processor does not run '" + isa + "'");
  if (!quantised(wire)) throw py::value_error("the native wire has no scales");
  const std::uint64_t scale_row = std::uint64_t{ceil_div(hidden, scale_block(wire))} * scale_bytes_each(wire);
  const py::gil_scoped_release unlocked;
  const cpu::FloatEnvironment plain;
  for (std::uint64_t row = 0; row < rows; ++row)
    kernels->quantise(wire, dtype, reinterpret_cast<const char*>(x) + row * hidden * dtype_bytes(dtype), hidden,
                      reinterpret_cast<std::uint8_t*>(codes) + row * hidden, reinterpret_cast<char*>(scales) + row * scale_row);
}

}  // namespace

void bind_quantise(py::module_& m) {
  m.def("runs", [](const std::string& isa) { return cpu::kernels_named(isa.c_str()) != nullptr; }, py::arg("isa"),
        "True if this processor runs the kernels of that name: baseline, avx2, avx512.");
  m.def("quantise", &quantise, py::arg("isa"), py::arg("wire"), py::arg("dtype"), py::arg("x"), py::arg("rows"), py::arg("hidden"),
        py::arg("codes"), py::arg("scales"), "Rows of x, contiguous, to e4m3 codes and the scales of that wire. Addresses.");
}

}  // namespace pplx
