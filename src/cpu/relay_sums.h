// A relay's part of combine_recv: it adds up the rows that the ranks of its node return to a source, in the ranks' order, and
// answers the source with one row for each that it sent this node.
#pragma once

#include <memory>

#include "blocks.h"
#include "open_steps.h"

namespace pplx::cpu {

std::unique_ptr<PhaseRun> relay_sums(Blocks& blocks, const OpenStep& open);

}  // namespace pplx::cpu
