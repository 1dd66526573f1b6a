// The CUDA runtime for one GPU that is this process's CPU and memory: device memory is memory, and streams are those of streams.h.
#pragma once

#include <cstdlib>

#include "emulation/streams.h"

namespace emulation {
// Multiprocessors of the GPU: two, or PPLX_EMULATION_SMS.
inline int multiprocessors() {
  const char* const given = std::getenv("PPLX_EMULATION_SMS");
  return given == nullptr ? 2 : std::atoi(given);
}
}  // namespace emulation

using cudaError_t = int;
struct CUstream_st {};
using cudaStream_t = CUstream_st*;
using cudaEvent_t = emulation::Event*;

enum : int { cudaSuccess = 0, cudaErrorMemoryAllocation = 2, cudaErrorInvalidDevice = 101, cudaErrorNotReady = 600,
    cudaErrorPeerAccessAlreadyEnabled = 704 };
enum cudaDeviceAttr : int {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrGPUDirectRDMASupported = 116,
  cudaDevAttrGPUDirectRDMAWritesOrdering = 118,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDefault = 4 };
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
enum cudaMemoryType { cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2 };
enum : unsigned {
  cudaEventDefault = 0,
  cudaEventDisableTiming = 2,
  cudaStreamNonBlocking = 1,
  cudaHostAllocPortable = 1,
  cudaHostAllocMapped = 2,
  cudaHostRegisterPortable = 1,
  cudaHostRegisterMapped = 2,
};
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaFuncAttributes {};
struct cudaPointerAttributes {
  cudaMemoryType type = cudaMemoryTypeDevice;
  int device = 0;
};

inline const char* cudaGetErrorName(cudaError_t) { return "cudaErrorEmulated"; }
inline const char* cudaGetErrorString(cudaError_t) { return "an error of the emulation"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
inline cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }

// ---- the GPU ----

inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetByPCIBusId(int*, const char*) { return cudaErrorInvalidDevice; }
inline cudaError_t cudaDeviceGetPCIBusId(char* text, int bytes, int) {
  std::snprintf(text, static_cast<std::size_t>(bytes), "0000:00:00.0");
  return cudaSuccess;
}
// Few multiprocessors: a fiber for each of their threads. It knows no NIC.
inline cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount             ? emulation::multiprocessors()
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 227 << 10
                                                                  : 0;
  return cudaSuccess;
}
// The null stream: ranks that are threads of a process each have one.
inline cudaError_t cudaDeviceSynchronize() { return emulation::stream_of(nullptr).synchronize(), cudaSuccess; }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, cudaSuccess; }
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

// ---- memory ----

inline cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  constexpr std::size_t kAlignment = 512;
  *memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (*memory == nullptr) return cudaErrorMemoryAllocation;
  std::memset(*memory, emulation::kPoison, bytes);
  return cudaSuccess;
}
template <typename T>
cudaError_t cudaMalloc(T** memory, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory), bytes);
}
inline cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
inline cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) { return cudaMalloc(memory, bytes); }
inline cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
inline cudaError_t cudaHostRegister(void*, std::size_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
inline cudaError_t cudaHostGetDevicePointer(void** there, void* here, unsigned) { return *there = here, cudaSuccess; }
inline cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void*) {
  return *attributes = {}, cudaSuccess;
}
// Not ordered behind launches: the caller waits for them first.
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
inline cudaError_t cudaMemset(void* to, int value, std::size_t bytes) { return std::memset(to, value, bytes), cudaSuccess; }
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) { return cudaMemset(to, value, bytes); }

// ---- streams and events ----

enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return *stream = reinterpret_cast<cudaStream_t>(emulation::new_stream()), cudaSuccess;
}
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return cudaStreamCreateWithFlags(stream, flags);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return emulation::stream_of(stream).idle() ? cudaSuccess : cudaErrorNotReady;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return emulation::stream_of(stream).synchronize(), cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return emulation::stream_of(stream).wait(*event);
}
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id) {
  const emulation::Capture* const capture = emulation::stream_of(stream).capture();
  *status = capture == nullptr ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  *id = capture == nullptr ? 0 : capture->id;
  return cudaSuccess;
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  unsigned long long id = 0;
  return cudaStreamGetCaptureInfo(stream, status, &id);
}
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = new emulation::Event, cudaSuccess; }
inline cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete event, cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return emulation::stream_of(stream).record(*event); }
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  return event->done && !event->done->is_set() ? cudaErrorNotReady : cudaSuccess;
}
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t until) {
  return *ms = std::chrono::duration<float, std::milli>(until->done->when() - from->done->when()).count(), cudaSuccess;
}

// ---- launches ----

template <typename Function>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Function*) {
  return cudaSuccess;
}
template <typename Function>
cudaError_t cudaFuncSetAttribute(Function*, int, int) {
  return cudaSuccess;
}

namespace emulation {

template <typename... Arguments, std::size_t... i>
std::tuple<Arguments...> copies(void** parameters, std::index_sequence<i...>) {
  return {*static_cast<Arguments*>(parameters[i])...};
}

}  // namespace emulation

template <typename... Arguments>
cudaError_t cudaLaunchKernel(void (*kernel)(Arguments...), dim3 grid, dim3 block, void** parameters, std::size_t shared,
                             cudaStream_t stream) {
  const auto arguments = emulation::copies<Arguments...>(parameters, std::index_sequence_for<Arguments...>());
  emulation::launch(grid, block, shared, emulation::stream_of(stream), [=] { std::apply(kernel, arguments); });
  return cudaSuccess;
}
