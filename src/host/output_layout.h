// The results of a dispatch: the tensors of every layout and wire, their shapes and strides, and their places in the buffer. The
// only place where any of this is computed, for both devices.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../protocol/scale_strides.h"

namespace pplx {

struct OutputPart {
  std::string dtype;                     // as torch calls it; empty: this layout or wire has no such part
  std::uint64_t at = 0;                  // bytes from the start of its buffer
  std::vector<std::uint64_t> shape, strides;   // elements
  std::uint64_t bytes = 0;

  bool exists() const { return !dtype.empty(); }
};

struct OutputLayout {
  OutputPart x, scale, counts, offsets, weights, src_rank, src_token, topk_ids, topk_weights, num_rows;
  std::uint64_t bytes = 0;               // size of the buffer
};

inline constexpr std::pair<const char*, OutputPart OutputLayout::*> kOutputParts[] = {
    {"x", &OutputLayout::x},                       {"scale", &OutputLayout::scale},       {"counts", &OutputLayout::counts},
    {"offsets", &OutputLayout::offsets},           {"weights", &OutputLayout::weights},   {"src_rank", &OutputLayout::src_rank},
    {"src_token", &OutputLayout::src_token},       {"topk_ids", &OutputLayout::topk_ids}, {"num_rows", &OutputLayout::num_rows},
    {"topk_weights", &OutputLayout::topk_weights},
};

inline OutputPart contiguous_part(const char* dtype, std::uint32_t element_bytes, std::vector<std::uint64_t> shape) {
  OutputPart part{dtype, 0, std::move(shape), {}, element_bytes};
  part.strides.resize(part.shape.size());
  std::uint64_t stride = 1;
  for (std::size_t i = part.shape.size(); i-- > 0;) {
    part.strides[i] = stride;
    stride *= part.shape[i] > 0 ? part.shape[i] : 1;   // as torch counts
    part.bytes *= part.shape[i];
  }
  return part;
}

inline const char* payload_dtype(const Config& c) {
  if (quantised(c.wire)) return "float8_e4m3fn";
  return c.dtype == Dtype::BFloat16 ? "bfloat16" : c.dtype == Dtype::Float16 ? "float16" : "float32";
}

// Without places.
inline OutputLayout output_parts(const Config& c) {
  const bool padded = c.layout == LayoutKind::Padded, compact = c.layout == LayoutKind::Compact;
  const std::uint64_t experts = local_experts(c, c.rank), each = scale_bytes_each(c.wire);
  const std::vector<std::uint64_t> rows =
      padded ? std::vector<std::uint64_t>{experts, c.max_per_expert} : std::vector<std::uint64_t>{c.max_rows};
  const auto of_rows = [&](std::uint64_t columns) {
    std::vector<std::uint64_t> shape = rows;
    shape.push_back(columns);
    return shape;
  };
  OutputLayout o;
  o.x = contiguous_part(payload_dtype(c), payload_element_bytes(c), of_rows(c.hidden));
  if (quantised(c.wire)) {
    const ScaleStrides strides = scale_strides(c);
    o.scale = {each == 1 ? "uint8" : "float32", 0, of_rows(scales_per_row(c)), {}, scale_tensor_bytes(c)};
    if (padded) o.scale.strides.push_back(strides.group / each);
    o.scale.strides.push_back(strides.row / each);
    o.scale.strides.push_back(strides.scale / each);
  }
  o.counts = contiguous_part("int32", 4, {experts});
  if (c.layout == LayoutKind::Ragged) o.offsets = contiguous_part("int32", 4, {experts + 1});
  o.src_rank = contiguous_part("int32", 4, rows);
  o.src_token = contiguous_part("int32", 4, rows);
  if (compact) {
    o.topk_ids = contiguous_part("int32", 4, of_rows(c.top_k));
    o.topk_weights = contiguous_part("float32", 4, of_rows(c.top_k));
    o.num_rows = contiguous_part("int32", 4, {1});
  } else {
    o.weights = contiguous_part("float32", 4, rows);
  }
  return o;
}

// Lays parts one behind the other.
class OutputPlacer {
 public:
  OutputPlacer(std::uint64_t begin, std::uint64_t align) : end_(begin), align_(align) {}
  std::uint64_t take(std::uint64_t bytes) {
    const std::uint64_t at = end_;
    end_ = align_up(at + bytes, align_);
    return at;
  }
  void place(OutputPart& part) {
    if (part.exists()) part.at = take(part.bytes);
  }
  std::uint64_t end() const { return end_; }

 private:
  std::uint64_t end_;
  const std::uint64_t align_;
};

// On the CPU x and scale have memory of their own; all that is small lies in one buffer, behind a line that is the caller's own.
inline OutputLayout cpu_output_layout(const Config& c) {
  constexpr std::uint64_t line = 64;
  OutputLayout o = output_parts(c);
  OutputPlacer placer(line, line);
  for (const auto& [name, part] : kOutputParts)
    if (part != &OutputLayout::x && part != &OutputLayout::scale) placer.place(o.*part);
  o.bytes = placer.end();
  return o;
}

}  // namespace pplx
