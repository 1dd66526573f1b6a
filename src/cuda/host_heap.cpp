#include "host_heap.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "../cpu/failure.h"
#include "error.h"

namespace pplx::cuda {
namespace {

// As on the CPU device: a process that is killed loses its memory first, and its connections after that.
constexpr std::chrono::milliseconds kDeathGrace{800};

}  // namespace

// Pages of this process, which CUDA pins: a provider that copies between processes cannot reach what CUDA itself allocates.
HostHeap::HostHeap(const Config& config, std::uint64_t remote, std::unique_ptr<BlockMemory> blocks,
                   std::unique_ptr<GdrMemory> arrivals)
    : config_(config), heap_(heap_of(config)), blocks_(std::move(blocks)), arrivals_(std::move(arrivals)) {
  const auto refuse = [&](const std::string& why) {
    throw CudaError("the blocks of " + std::to_string(config.remote_peers) + " ranks of other nodes need " + std::to_string(heap_.bytes) +
                    " bytes of pinned host memory: " + why +
                    ". Use a smaller max_tokens_per_rank or fewer AllToAlls, or allow this process to lock more memory.");
  };
  void* const memory = mmap(nullptr, heap_.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) refuse(std::strerror(errno));
  memory_ = static_cast<char*>(memory);
  madvise(memory_, heap_.bytes, MADV_HUGEPAGE);
  madvise(memory_, heap_.bytes, MADV_DONTFORK);   // a child's first write would move the parent's page away from the GPU
  cudaError_t error = cudaHostRegister(memory_, heap_.bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(reinterpret_cast<void**>(&mapped_), memory_, 0);
  if (error != cudaSuccess) {
    cudaGetLastError();
    munmap(memory_, heap_.bytes);
    refuse(cudaGetErrorString(error));
  }
  auto* outgoing = reinterpret_cast<std::uint64_t*>(memory_ + heap_.outgoing);
  for (std::uint32_t set = 0; set < config.in_flight; ++set)
    for (std::uint32_t op = 0; op < kOps; ++op)
      for (std::uint32_t peer = 0, nth = 0; peer < config.world; ++peer)
        if ((remote >> peer & 1) != 0) outgoing[heap_.word_index(config, set, Op(op), peer)] = heap_.spaced_send_at(config, set, Op(op), nth++);
}

HostHeap::~HostHeap() {
  listen(nullptr);
  cudaHostUnregister(memory_);
  cudaGetLastError();
  munmap(memory_, heap_.bytes);
}

std::optional<DeviceMemory> HostHeap::blocks() const {
  if (!blocks_) return {};
  return blocks_->description();
}

void HostHeap::lost_network(const Abort& abort, const std::string& message) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (lost_ || !on_failure_) return;
  lost_ = true;
  over_ = false;
  abort_ = abort;
  message_ = message;
  waiter_ = std::thread([this] { wait_then_tell(std::unique_lock<std::mutex>(mutex_)); });
}

void HostHeap::wait_then_tell(std::unique_lock<std::mutex> lock) {
  changed_.wait_for(lock, kDeathGrace, [this] { return over_; });
  if (!over_) on_failure_(abort_, message_);
}

void HostHeap::listen(OnFailure on_failure) {
  std::thread waiter;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    over_ = true;
    lost_ = false;
    waiter.swap(waiter_);
  }
  changed_.notify_all();
  if (waiter.joinable()) waiter.join();
  const std::lock_guard<std::mutex> lock(mutex_);
  on_failure_ = std::move(on_failure);
}

void HostHeap::reset(std::uint32_t generation) {
  generation_ = generation;
  for (const std::uint64_t at : {heap_.mailbox, heap_.sent})
    std::memset(memory_ + at, 0, std::size_t{kWordBytes} * config_.in_flight * kOps * config_.world);
}

}  // namespace pplx::cuda
