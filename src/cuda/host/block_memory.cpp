#include "block_memory.h"

#include <unistd.h>

#include "../../protocol/config.h"
#include "error.h"
#include "memory/dmabuf.h"

namespace pplx::cuda {
namespace {

constexpr std::uint64_t kPage = 64 << 10;   // bytes of a GPU's page; a dmabuf has whole ones

}  // namespace

BlockMemory::BlockMemory(int device, std::size_t bytes) {
  memory_.device = device;
  memory_.bytes = align_up(bytes, kPage);
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
  cudaFree(memory_.base);
  cudaGetLastError();
}

}  // namespace pplx::cuda
