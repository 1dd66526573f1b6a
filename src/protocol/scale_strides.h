// How the scales of received rows lie in the caller's tensor: row by row, or in columns for tensor memory access.
#pragma once

#include "wire.h"

namespace pplx {

// Rows of one column: of an expert where each has its own place, else of the whole output.
constexpr std::uint64_t rows_of_scale_column(const Config& c) {
  return c.layout == LayoutKind::Padded ? c.max_per_expert : c.max_rows;
}
// Columns start at multiples of 16 bytes, as tensor memory access wants them.
constexpr std::uint64_t scale_column_bytes(const Config& c) {
  return align_up(scale_bytes_each(c.wire) * rows_of_scale_column(c), 16);
}

constexpr ScaleStrides scale_strides(const Config& c) {
  const std::uint64_t each = scale_bytes_each(c.wire), scales = scales_per_row(c), rows = rows_of_scale_column(c);
  if (scales == 0) return {};
  if (c.scale_tma) return {each, scale_column_bytes(c), scale_column_bytes(c) * scales};
  return {each * scales, each, each * scales * rows};
}

// Bytes of the whole tensor, the unused ends of columns included.
constexpr std::uint64_t scale_tensor_bytes(const Config& c) {
  const std::uint64_t groups = c.layout == LayoutKind::Padded ? local_experts(c, c.rank) : 1;
  const std::uint64_t column = c.scale_tma ? scale_column_bytes(c) : scale_bytes_each(c.wire) * rows_of_scale_column(c);
  return groups * scales_per_row(c) * column;
}

}  // namespace pplx
