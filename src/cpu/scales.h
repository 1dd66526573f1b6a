// Scales of a row between a block, where they are packed, and a caller's tensor, where they may lie in columns.
#pragma once

#include <cstdint>
#include <cstring>

namespace pplx::cpu {

template <typename T>
inline void copy_scales_of(char* to, std::uint64_t to_stride, const char* from, std::uint64_t from_stride, std::uint32_t n) {
  for (std::uint32_t i = 0; i < n; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, sizeof(T));
}

// `each`: bytes of a scale, 1 or 4. Strides in bytes.
inline void copy_scales(char* to, std::uint64_t to_stride, const char* from, std::uint64_t from_stride, std::uint32_t n,
                        std::uint32_t each) {
  if (to_stride == each && from_stride == each)
    std::memcpy(to, from, std::size_t{n} * each);
  else if (each == 1)
    copy_scales_of<std::uint8_t>(to, to_stride, from, from_stride, n);
  else
    copy_scales_of<std::uint32_t>(to, to_stride, from, from_stride, n);
}

}  // namespace pplx::cpu
