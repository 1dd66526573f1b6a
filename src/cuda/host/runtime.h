// CUDA's runtime for the host half: errors, the current device, events.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "../../host/failure.h"

namespace pplx::cuda {

// A refusal of CUDA's; Python sees pplx_comm.Error.
struct CudaError : Misuse {
  using Misuse::Misuse;
};

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw CudaError(std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")");
}

// Copies by a stream, and waits for it.
inline void copy_now(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

// Sets bytes likewise.
inline void set_now(void* memory, int byte, std::size_t bytes, cudaStream_t stream) {
  check(cudaMemsetAsync(memory, byte, bytes, stream), "cudaMemsetAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

// Calls of this thread do not end a graph's capture, its own or another thread's.
class CaptureElsewhere {
 public:
  CaptureElsewhere() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~CaptureElsewhere() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  CaptureElsewhere(const CaptureElsewhere&) = delete;
  CaptureElsewhere& operator=(const CaptureElsewhere&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// True if this process has a context on that GPU.
bool has_context(int device);

// The calling thread's current device is the caller's business: it comes back when this goes. Not where there is no context on it: to make
// it current again would make one, and a thread that never chose a GPU is on GPU 0.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~OnDevice() {
    if (changed_ && has_context(before_)) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// A place in a stream of the current device, which work on other streams waits for.
class StreamEvent {
 public:
  explicit StreamEvent(unsigned flags = cudaEventDisableTiming) { check(cudaEventCreateWithFlags(&handle_, flags), "cudaEventCreate"); }
  ~StreamEvent() { cudaEventDestroy(handle_); }
  StreamEvent(const StreamEvent&) = delete;
  StreamEvent& operator=(const StreamEvent&) = delete;

  void record(cudaStream_t stream) { check(cudaEventRecord(handle_, stream), "cudaEventRecord"); }
  void wait(cudaStream_t stream) const { check(cudaStreamWaitEvent(stream, handle_, 0), "cudaStreamWaitEvent"); }
  // The GPU's time from another one on. Both are of cudaEventDefault, and behind them.
  double seconds_since(const StreamEvent& earlier) const {
    float ms = 0;
    check(cudaEventElapsedTime(&ms, earlier.handle_, handle_), "cudaEventElapsedTime");
    return ms / 1e3;
  }

 private:
  cudaEvent_t handle_ = nullptr;
};

}  // namespace pplx::cuda
