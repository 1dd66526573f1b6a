// The calling thread's current device is the caller's business: it comes back when this goes.
#pragma once

#include "error.h"

namespace pplx::cuda {

class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace pplx::cuda
