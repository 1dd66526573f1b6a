// Notices as errors, on both devices.
#pragma once

#include <string>

#include "../protocol/notices.h"
#include "failure.h"

namespace pplx {

// The first rank whose buffer was too small stays. Safe from any thread.
inline void note_overflow(Notices& notices, std::uint32_t rank) {
  std::uint32_t nobody = 0;
  __atomic_compare_exchange_n(&notices.overflowed, &nobody, 1 + rank, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

// Throws a Misuse that says the first of them, and forgets them all.
inline void raise_notices(Notices& notices, const Config& c) {
  const auto load = [](const std::uint32_t& word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); };
  const std::uint32_t bad_ids = load(notices.bad_ids), bad_scales = load(notices.bad_scales), overflowed = load(notices.overflowed);
  if ((bad_ids | bad_scales | overflowed | load(notices.short_output)) == 0) return;
  for (std::uint32_t* word : {&notices.bad_ids, &notices.bad_scales, &notices.overflowed, &notices.short_output})
    __atomic_store_n(word, 0, __ATOMIC_RELAXED);
  if (bad_ids != 0)
    throw Misuse("topk_ids of an earlier dispatch had ids outside 0 to " + std::to_string(c.num_experts - 1) +
                 " other than -1: they counted as -1");
  if (bad_scales != 0)
    throw Misuse("x_scale of an earlier dispatch had scales that are not powers of two, as wire 'fp8_ue8m0' requires: they were "
                 "sent unchanged");
  if (overflowed != 0)
    throw Misuse("the output buffer of " + rank_text(overflowed - 1) +
                 " was too small in an earlier step: rows that did not fit counted as zero. Give the layout a larger " +
                 (c.layout == LayoutKind::Padded ? "Padded(max_tokens_per_expert=...)" : "max_rows") +
                 " (d.counts holds the true counts).");
  throw Misuse(
      "expert_out or tail of an earlier combine had fewer rows than its dispatch had filled: the missing ones counted as zero");
}

}  // namespace pplx
