#include "mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace pplx {

Mapping::Mapping(int fd, std::size_t bytes) : bytes_(bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (at == MAP_FAILED)
    throw std::runtime_error("mmap of " + std::to_string(bytes) + " bytes that ranks of this node share: " + std::strerror(errno));
  data_ = static_cast<char*>(at);
  madvise(at, bytes, MADV_DONTFORK);   // a forked child has no business here, and must not keep the pages alive
}

Mapping::~Mapping() {
  if (!fork_.in_child()) munmap(data_, bytes_);   // there it was never mapped, and something else may be
}

}  // namespace pplx
