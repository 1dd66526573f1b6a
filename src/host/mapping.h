// Memory that other ranks of the node map too: the pages of a file descriptor, mapped for the lifetime of this object.
#pragma once

#include <cstddef>

#include "fork_check.h"

namespace pplx {

class Mapping {
 public:
  // Maps `bytes` of `fd`, shared. Does not own `fd`. touched: all pages are, so that no step pays for first use.
  Mapping(int fd, std::size_t bytes, bool touched = true);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // Touches the pages of a part.
  void touch(std::size_t at, std::size_t bytes) const;

  char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  char* data_;
  std::size_t bytes_;
  const ForkCheck fork_;
};

}  // namespace pplx
