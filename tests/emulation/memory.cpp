// src/cuda/memory for a GPU whose memory is the host's: what ranks share is a memfd.
#include <sys/mman.h>
#include <unistd.h>

#include "src/cuda/host/runtime.h"
#include "src/cuda/host/memory/shared_memory.h"

namespace pplx::cuda {

bool has_context(int) { return true; }

SharedMemory::SharedMemory(int device, std::size_t bytes, const std::string& what, bool) : device_(device), bytes_(bytes) {
  const int fd = memfd_create("pplx-emulation", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw CudaError("no memory for " + what);
  handle_ = static_cast<unsigned long long>(fd);
  map();
}

SharedMemory::SharedMemory(int device, int fd, std::size_t bytes)
    : device_(device), handle_(static_cast<unsigned long long>(dup(fd))), bytes_(bytes) {
  map();
}

SharedMemory::SharedMemory(int device, int fd, std::size_t bytes, std::size_t, std::size_t) : SharedMemory(device, fd, bytes) {}

SharedMemory::SharedMemory(int device, const std::string&, std::size_t) : device_(device) {
  throw CudaError("the emulation has no IPC handles");
}

SharedMemory::SharedMemory(int device, char* mapped, std::size_t bytes)
    : device_(device), kind_(Kind::Lent), address_(reinterpret_cast<unsigned long long>(mapped)), bytes_(bytes) {}

void SharedMemory::map() {
  void* const memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, static_cast<int>(handle_), 0);
  if (memory == MAP_FAILED) throw CudaError("the emulation cannot map " + std::to_string(bytes_) + " bytes");
  address_ = reinterpret_cast<unsigned long long>(memory);
}

SharedMemory::~SharedMemory() {
  if (kind_ == Kind::Lent || fork_.in_child()) return;
  munmap(data(), bytes_);
  close(static_cast<int>(handle_));
}

int SharedMemory::descriptor() const { return dup(static_cast<int>(handle_)); }
std::string SharedMemory::ipc_handle() const { return {}; }

int export_dmabuf(int, void*, std::size_t) { return -1; }

}  // namespace pplx::cuda
