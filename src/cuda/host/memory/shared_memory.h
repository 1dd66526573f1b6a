// Device memory that the ranks of a node map: handed over as a file descriptor, or as a cudaIpc handle where the driver cannot export
// descriptors; a peer's mapping keeps it alive. Or symmetric memory, this rank's or a peer's, that stores reach.
#pragma once

#include <cstddef>
#include <string>

#include "../../../host/fork_check.h"

namespace pplx::cuda {

class SharedMemory {
 public:
  // Zeroed. `what` names it in errors. by_nics: NICs reach it, too.
  SharedMemory(int device, std::size_t bytes, const std::string& what, bool by_nics = false);
  // A peer's, mapped for `device`.
  SharedMemory(int device, int fd, std::size_t bytes);
  SharedMemory(int device, const std::string& ipc_handle, std::size_t bytes);
  // A carrier's, which maps it itself: here it has its place alone.
  SharedMemory(int device, char* mapped, std::size_t bytes);
  // Host memory of another process, of which the kernels of `device` reach the bytes [begin, end), whole pages.
  SharedMemory(int device, int fd, std::size_t bytes, std::size_t begin, std::size_t end);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  char* data() const { return reinterpret_cast<char*>(address_); }
  std::size_t bytes() const { return bytes_; }  // whole granules
  bool has_descriptor() const { return kind_ == Kind::Virtual; }
  int descriptor() const;  // a new one, the caller closes it
  std::string ipc_handle() const;

 private:
  enum class Kind { Virtual, Allocated, Imported, Lent, Host };

  bool allocate_virtual(std::size_t bytes, const std::string& what, bool by_nics);
  void map();

  const ForkCheck fork_;
  const int device_;
  Kind kind_ = Kind::Virtual;
  unsigned long long handle_ = 0;
  unsigned long long address_ = 0;
  std::size_t bytes_ = 0;
  char *mapped_ = nullptr, *pinned_ = nullptr;  // where kind_ is Host
};

// A GPU's memory as a file descriptor that NIC drivers take. The caller closes it; -1: this driver or kernel exports none.
int export_dmabuf(int device, void* base, std::size_t bytes);

}  // namespace pplx::cuda
