// The stages of a launch, in the order in which bench/stages.py lists them, and what it calls them.
#pragma once

namespace pplx::cuda {

enum class Stage {
  DispatchBegins,
  Claimed,
  Counted,
  RowsPlanned,
  Stored,
  Routed,
  Published,
  CountsThere,
  ExpertsPlaced,
  RowThere,
  RowPlaced,
  DispatchEnds,
  CombineBegins,
  Found,
  Sent,
  Came,
  Added,
  CombineEnds,
  Told,
  Heard,
  PassedOn,
};

inline constexpr const char* kStages[] = {
    "dispatch begins", "unit and step there",   "earlier tokens counted", "rows planned", "payload stored",
    "routes stored",   "released",              "counts there",           "experts placed", "row there",
    "row placed",      "dispatch ends",         "combine begins",         "row's places there", "sum stored",
    "rows there",      "added",                 "combine ends",           "proxy told",   "proxy heard",
    "passed on",
};
static_assert(sizeof kStages / sizeof *kStages == static_cast<int>(Stage::PassedOn) + 1, "a name each");

}  // namespace pplx::cuda
