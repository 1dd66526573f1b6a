#include "output_pool.h"

#include <sys/mman.h>

#include <new>

namespace pplx {

std::unique_ptr<OutputPool::Buffer> OutputPool::take(std::size_t bytes) {
  constexpr std::size_t page = 4096;
  const std::size_t reserved = (bytes + page - 1) / page * page;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (std::size_t i = free_.size(); i-- > 0;) {
      if (free_[i].reserved != reserved) continue;
      char* data = free_[i].data;
      free_.erase(free_.begin() + static_cast<std::ptrdiff_t>(i));
      return std::make_unique<Buffer>(shared_from_this(), data, bytes, reserved);
    }
  }
  void* at = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  return std::make_unique<Buffer>(shared_from_this(), static_cast<char*>(at), bytes, reserved);
}

void OutputPool::give_back(char* data, std::size_t reserved) {
  if (fork_.in_child()) return;   // the lock may be that of a thread that is gone; a copy of the memory goes with the child
  Block drop{data, reserved};
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) {
      free_.push_back(drop);
      if (free_.size() <= kMostFree) return;
      drop = free_.front();
      free_.erase(free_.begin());
    }
  }
  munmap(drop.data, drop.reserved);
}

void OutputPool::close() {
  if (fork_.in_child()) return;
  std::vector<Block> drop;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    drop.swap(free_);
  }
  for (const Block& block : drop) munmap(block.data, block.reserved);
}

OutputPool::~OutputPool() { close(); }

}  // namespace pplx
