// Words of a step that tell something without failing. A device notes it, and the host's next call says so, once
// (src/host/notices.h). On CUDA the words lie in pinned host memory.
#pragma once

#include <cstdint>

namespace pplx {

struct Notices {
  std::uint32_t bad_ids = 0;       // ids that are no expert's, counted as -1
  std::uint32_t bad_scales = 0;    // scales given to FP8_UE8M0 that are no powers of two
  std::uint32_t overflowed = 0;    // 1 + the rank whose output buffer was too small
  std::uint32_t short_output = 0;  // expert_out or tail had fewer rows than the dispatch filled
};

}  // namespace pplx
