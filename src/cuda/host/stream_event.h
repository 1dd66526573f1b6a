// A place in a stream of the current device, which work on other streams waits for.
#pragma once

#include <cuda_runtime_api.h>

#include "error.h"

namespace pplx::cuda {

class StreamEvent {
 public:
  StreamEvent() { check(cudaEventCreateWithFlags(&handle_, cudaEventDisableTiming), "cudaEventCreate"); }
  ~StreamEvent() { cudaEventDestroy(handle_); }
  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;

  void record(cudaStream_t stream) { check(cudaEventRecord(handle_, stream), "cudaEventRecord"); }
  void wait(cudaStream_t stream) const { check(cudaStreamWaitEvent(stream, handle_, 0), "cudaStreamWaitEvent"); }

 private:
  cudaEvent_t handle_ = nullptr;
};

}  // namespace pplx::cuda
