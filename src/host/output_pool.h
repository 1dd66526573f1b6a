// Memory for outputs, given back when the caller drops its tensor. Fresh memory costs a page fault per 4 KiB, several times
// the copy itself.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "fork_check.h"

namespace pplx {

class OutputPool : public std::enable_shared_from_this<OutputPool> {
 public:
  class Buffer {
   public:
    Buffer(std::shared_ptr<OutputPool> pool, char* data, std::size_t bytes, std::size_t reserved)
        : pool_(std::move(pool)), data_(data), bytes_(bytes), reserved_(reserved) {}
    ~Buffer() { pool_->give_back(data_, reserved_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    char* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

   private:
    std::shared_ptr<OutputPool> pool_;
    char* data_;
    std::size_t bytes_, reserved_;
  };

  ~OutputPool();
  std::unique_ptr<Buffer> take(std::size_t bytes);
  void close();                    // buffers in use now are freed when they come back

 private:
  struct Block {
    char* data;
    std::size_t reserved;
  };
  static constexpr std::size_t kMostFree = 8;

  void give_back(char* data, std::size_t reserved);

  std::mutex mutex_;
  std::vector<Block> free_;        // oldest first
  bool closed_ = false;
  const ForkCheck fork_;
};

}  // namespace pplx
