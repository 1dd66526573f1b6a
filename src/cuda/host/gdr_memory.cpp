#include "gdr_memory.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdint>
#include <type_traits>

#include "../../protocol/config.h"
#include "runtime.h"

namespace pplx::cuda {
namespace {

constexpr std::size_t kPage = 64 << 10;   // GDRCopy pins pages of this size

// As gdrapi.h has them, of version 2.
struct Handle {
  unsigned long h;
};
struct Library {
  void* (*open)() = nullptr;
  int (*close)(void*) = nullptr;
  int (*pin)(void*, unsigned long address, std::size_t bytes, std::uint64_t token, std::uint32_t space, Handle*) = nullptr;
  int (*unpin)(void*, Handle) = nullptr;
  int (*map)(void*, Handle, void** at, std::size_t bytes) = nullptr;
  int (*unmap)(void*, Handle, void* at, std::size_t bytes) = nullptr;
  bool found = false;

  Library() {
    void* const library = dlopen("libgdrapi.so.2", RTLD_NOW | RTLD_LOCAL);
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    found = library != nullptr && find(open, "gdr_open") && find(close, "gdr_close") && find(pin, "gdr_pin_buffer") &&
            find(unpin, "gdr_unpin_buffer") && find(map, "gdr_map") && find(unmap, "gdr_unmap");
  }
};

const Library& library() {
  static const Library loaded;
  return loaded;
}

}  // namespace

std::unique_ptr<GdrMemory> GdrMemory::make(int device, std::size_t bytes, std::string& why_not) {
  if (!library().found) {
    why_not = "there is no libgdrapi.so.2";
    return nullptr;
  }
  std::unique_ptr<GdrMemory> memory(new GdrMemory);
  const OnDevice on(device);
  const bool good = memory->open(bytes, why_not);
  cudaGetLastError();
  return good ? std::move(memory) : nullptr;
}

bool GdrMemory::open(std::size_t bytes, std::string& why_not) {
  bytes_ = align_up(bytes, kPage);
  if (cudaMalloc(&allocated_, bytes_ + kPage) != cudaSuccess || cudaMemset(allocated_, 0, bytes_ + kPage) != cudaSuccess ||
      cudaDeviceSynchronize() != cudaSuccess) {
    why_not = "the GPU has no memory for it";
    return false;
  }
  gpu_ = reinterpret_cast<char*>(align_up(reinterpret_cast<std::uintptr_t>(allocated_), kPage));
  session_ = library().open();
  if (session_ == nullptr) {
    why_not = "GDRCopy's kernel module, gdrdrv, is not loaded";
    return false;
  }
  Handle handle{};
  pinned_ = library().pin(session_, reinterpret_cast<unsigned long>(gpu_), bytes_, 0, 0, &handle) == 0;
  handle_ = handle.h;
  if (!pinned_ || library().map(session_, handle, &host_, bytes_) != 0) {
    host_ = nullptr;
    why_not = "GDRCopy cannot map this GPU's memory";
    return false;
  }
  return true;
}

GdrMemory::~GdrMemory() {
  if (host_ != nullptr) library().unmap(session_, {handle_}, host_, bytes_);
  if (pinned_) library().unpin(session_, {handle_});
  if (session_ != nullptr) library().close(session_);
  cudaFree(allocated_);
  cudaGetLastError();
}

}  // namespace pplx::cuda
