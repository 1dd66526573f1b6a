// A fabric's descriptions for its peers, which Python carries as bytes.
#pragma once

#include <pybind11/pybind11.h>

#include <string_view>

#include "proxy/fabric.h"

namespace pplx {

inline pybind11::bytes to_bytes(const Blob& blob) { return {reinterpret_cast<const char*>(blob.data()), blob.size()}; }

inline Blob to_blob(const pybind11::bytes& bytes) {
  const auto text = static_cast<std::string_view>(bytes);
  return {text.begin(), text.end()};
}

}  // namespace pplx
