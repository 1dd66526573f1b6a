// Memory that other ranks of the node map too: the pages of a file descriptor, mapped for the lifetime of this object.
#pragma once

#include <cstddef>

#include "fork_check.h"

namespace pplx {

class Mapping {
 public:
  // Maps `bytes` of `fd`, shared, and touches every page, so that no step pays for first use. Does not own `fd`.
  Mapping(int fd, std::size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  char* data_;
  std::size_t bytes_;
  const ForkCheck fork_;
};

}  // namespace pplx
