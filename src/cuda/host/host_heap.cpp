#include "host_heap.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "../../host/failure.h"
#include "../../protocol/deadlines.h"
#include "../../protocol/heap_layout.h"
#include "runtime.h"

namespace pplx::cuda {

BlockMemory::BlockMemory(int device, std::size_t bytes, bool shared) {
  memory_.device = device;
  memory_.bytes = align_up(bytes, 64 << 10);   // pages of a GPU: a dmabuf has whole ones
  if (shared) {
    shared_ = std::make_unique<SharedMemory>(device, memory_.bytes, "the blocks of ranks of other nodes", true);
    memory_.base = shared_->data();
    memory_.bytes = shared_->bytes();
    memory_.dmabuf = export_dmabuf(device, memory_.base, memory_.bytes);
    return;
  }
  const cudaError_t error = cudaMalloc(&memory_.base, memory_.bytes);
  if (error != cudaSuccess) {
    cudaGetLastError();
    throw CudaError("the blocks of ranks of other nodes need " + std::to_string(memory_.bytes) + " bytes of memory on GPU " +
                    std::to_string(device) + ": " + cudaGetErrorString(error) +
                    ". Use a smaller max_tokens_per_rank or fewer AllToAlls, or placement='host'.");
  }
  check(cudaMemset(memory_.base, 0, memory_.bytes), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");   // before any peer may write there
  memory_.dmabuf = export_dmabuf(device, memory_.base, memory_.bytes);
}

BlockMemory::~BlockMemory() {
  if (memory_.dmabuf >= 0) close(memory_.dmabuf);
  if (!shared_) cudaFree(memory_.base);
  cudaGetLastError();
}

// Pages of this process, which CUDA pins: a provider that copies between processes cannot reach what CUDA itself allocates. With
// node_ranks mates map them.
HostHeap::HostHeap(const Config& config, std::uint64_t remote, std::vector<std::uint32_t> slot_at, std::unique_ptr<BlockMemory> blocks,
                   std::unique_ptr<GdrMemory> arrivals)
    : config_(config), heap_(heap_of(config)), slot_at_(std::move(slot_at)), blocks_(std::move(blocks)), arrivals_(std::move(arrivals)) {
  if (config.node_ranks != 0) {
    fd_ = memfd_create("pplx_comm", MFD_CLOEXEC);
    if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(heap_.bytes)) != 0) refuse(std::strerror(errno));
  }
  void* const memory = mmap(nullptr, heap_.bytes, PROT_NONE, fd_ < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd_, 0);
  if (memory == MAP_FAILED) refuse(std::strerror(errno));
  memory_ = static_cast<char*>(memory);
  madvise(memory_, heap_.bytes, MADV_DONTFORK);   // a child's first write would move the parent's page away from the GPU
  try {
    for (const Range& range : ranges_in_use()) pin(range);
  } catch (...) {
    release();
    throw;
  }
  for (std::uint32_t set = 0; set < config.in_flight; ++set)
    for (std::uint32_t op = 0; op < kOps; ++op)
      for (std::uint32_t peer = 0, nth = 0; peer < config.world; ++peer)
        if ((remote >> peer & 1) != 0)
          set_outgoing(mailbox_entry(heap_, memory_, heap_.word_index(config, set, Op(op), peer)), heap_.spaced_send_at(config, set, Op(op), nth++));
}

HostHeap::~HostHeap() {
  listen(nullptr);
  if (!fork_.in_child()) release();
}

// A heap whose blocks lie elsewhere has only the words: the rest has addresses, and no pages.
std::vector<HostHeap::Range> HostHeap::ranges_in_use() const {
  if (!blocks_) return {{0, heap_.bytes}};
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::uint64_t arrived = align_up(heap_.remote_blocks[0], page), end = align_up(heap_.send[0], page);
  const std::uint64_t told = heap_.mailbox / page * page;
  if (arrived >= told) return {{0, end}};
  return {{0, arrived}, {told, end - told}};
}

void HostHeap::pin(const Range& range) {
  char* const at = memory_ + range.at;
  if (mprotect(at, range.bytes, PROT_READ | PROT_WRITE) != 0) refuse(std::strerror(errno));
  madvise(at, range.bytes, MADV_HUGEPAGE);
  cudaError_t error = cudaHostRegister(at, range.bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (error == cudaSuccess) pinned_.push_back(range);
  void* there = nullptr;
  if (error == cudaSuccess) error = cudaHostGetDevicePointer(&there, at, 0);
  if (error != cudaSuccess) {
    cudaGetLastError();
    refuse(cudaGetErrorString(error));
  }
  char* const mapped = static_cast<char*>(there) - range.at;
  if (mapped_ != nullptr && mapped != mapped_) refuse("the GPU knows two parts of it by addresses that do not go together");
  mapped_ = mapped;
}

void HostHeap::release() {
  for (const Range& range : pinned_) cudaHostUnregister(memory_ + range.at);
  cudaGetLastError();
  munmap(memory_, heap_.bytes);
  if (fd_ >= 0) close(fd_);
}

void HostHeap::refuse(const std::string& why) const {
  throw CudaError((blocks_ ? "the words about blocks of " : "the blocks of ") + std::to_string(config_.remote_peers) +
                  " ranks of other nodes need " + std::to_string(bytes_of(ranges_in_use())) + " bytes of pinned host memory: " + why +
                  ". Use a smaller max_tokens_per_rank or fewer AllToAlls, or allow this process to lock more memory.");
}

std::uint64_t HostHeap::bytes_of(const std::vector<Range>& ranges) {
  std::uint64_t bytes = 0;
  for (const Range& range : ranges) bytes += range.bytes;
  return bytes;
}

void HostHeap::reset(std::uint32_t generation) {
  generation_ = generation;
  empty_mailbox(heap_, config_, memory_);
}

}  // namespace pplx::cuda
