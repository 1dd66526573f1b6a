// The names by which Python knows the structs that calls of the CPU device take.
#pragma once

#include "../cpu/arguments.h"
#include "bound_struct.h"

namespace pybind11::detail {

template <>
struct type_caster<pplx::cpu::Tokens> : pplx::BoundCaster<pplx::cpu::Tokens> {
  static constexpr auto name = const_name("Tokens");
};
template <>
struct type_caster<pplx::cpu::Outputs> : pplx::BoundCaster<pplx::cpu::Outputs> {
  static constexpr auto name = const_name("Outputs");
};
template <>
struct type_caster<pplx::cpu::ExpertOutputs> : pplx::BoundCaster<pplx::cpu::ExpertOutputs> {
  static constexpr auto name = const_name("ExpertOutputs");
};
template <>
struct type_caster<pplx::cpu::Result> : pplx::BoundCaster<pplx::cpu::Result> {
  static constexpr auto name = const_name("Result");
};

}  // namespace pybind11::detail
