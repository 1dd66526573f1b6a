#include "mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace pplx {

Mapping::Mapping(int fd, std::size_t bytes, bool touched) : bytes_(bytes) {
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (touched ? MAP_POPULATE : 0), fd, 0);
  if (at == MAP_FAILED)
    throw std::runtime_error("mmap of " + std::to_string(bytes) + " bytes that ranks of this node share: " + std::strerror(errno));
  data_ = static_cast<char*>(at);
  madvise(at, bytes, MADV_DONTFORK);   // a forked child has no business here, and must not keep the pages alive
}

void Mapping::touch(std::size_t at, std::size_t bytes) const {
  constexpr std::size_t page = 4096;
  for (std::size_t i = at / page * page; i < at + bytes; i += page) static_cast<void>(*const_cast<const volatile char*>(data_ + i));
}

Mapping::~Mapping() {
  if (!fork_.in_child()) munmap(data_, bytes_);   // there it was never mapped, and something else may be
}

}  // namespace pplx
