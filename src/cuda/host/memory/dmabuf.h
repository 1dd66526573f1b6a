// A GPU's memory as a file descriptor that NIC drivers take.
#pragma once

#include <cstddef>

namespace pplx::cuda {

int export_dmabuf(int device, void* base, std::size_t bytes);   // the caller closes it; -1: this driver or kernel exports none

}  // namespace pplx::cuda
