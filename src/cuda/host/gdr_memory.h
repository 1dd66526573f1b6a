// A little GPU memory that this process writes as its own, by GDRCopy: a library found at run time, and a loaded kernel module.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace pplx::cuda {

class GdrMemory {
 public:
  // Zeroed. Null where it cannot be had; then why_not says why.
  static std::unique_ptr<GdrMemory> make(int device, std::size_t bytes, std::string& why_not);
  ~GdrMemory();
  GdrMemory(const GdrMemory&) = delete;
  GdrMemory& operator=(const GdrMemory&) = delete;

  char* gpu() const { return gpu_; }
  char* host() const { return static_cast<char*>(host_); }

 private:
  GdrMemory() = default;
  bool open(std::size_t bytes, std::string& why_not);

  void* allocated_ = nullptr;
  char* gpu_ = nullptr;        // the first whole page of it
  void* host_ = nullptr;
  std::size_t bytes_ = 0;
  void* session_ = nullptr;    // gdr_t
  unsigned long handle_ = 0;   // gdr_mh_t
  bool pinned_ = false;
};

}  // namespace pplx::cuda
