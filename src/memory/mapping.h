// Memory that other ranks of the node map too: a file descriptor's pages, mapped for as long as somebody holds this.
#pragma once

#include <cstddef>

namespace pplx {

class Mapping {
 public:
  // Maps `bytes` of `fd`, shared, and touches every page, so that no step pays for the first use. Does not own `fd`.
  Mapping(int fd, std::size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  char* data_;
  std::size_t bytes_;
};

}  // namespace pplx
