// Arguments of the calls of a GPU's Exchange. Addresses are device memory; strides are bytes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../host/halves.h"
#include "../../protocol/scale_strides.h"

namespace pplx::cuda {

struct Launch {
  cudaStream_t stream = nullptr;
  unsigned halves = kSend | kRecv;      // both: in one launch
  char* plan = nullptr;
  char* buffer = nullptr;               // the dispatch returns it
  std::uint32_t* hooks = nullptr;       // its words, hook_words_in_all() of them; none: without
};

struct Tokens {
  std::uint32_t count = 0;
  const char* x = nullptr;
  std::uint64_t stride = 0;
  const char* scales = nullptr;         // scales of x, when the caller quantised
  ScaleStrides scale;
  const float* weights = nullptr;
  const void* ids = nullptr;            // null: the plan is given
  bool wide_ids = false;
};

// Received rows that lie in memory of their own. Their buffer may then end where they would begin in it.
struct Outputs {
  char* x = nullptr;                    // null: all lie in the buffer
  char* scales = nullptr;
  float* weights = nullptr;             // Compact: of all choices
};

struct ExpertOutputs {
  const char* expert_out = nullptr;
  std::uint64_t stride = 0, rows = 0;
  bool weighted = true, uses_weights = false, release = false;
  const float* weights = nullptr;
  const std::uint32_t* tail = nullptr;  // with has_tail
  std::uint64_t tail_rows = 0;
};

struct Result {
  std::uint32_t tokens = 0;
  char* y = nullptr;
  std::uint64_t stride = 0;
  bool accumulate = false;
  bool has_tail = false;
  std::uint32_t* tail = nullptr;
};

}  // namespace pplx::cuda
