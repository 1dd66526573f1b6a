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

// What a warp can spend its time with in a launch for many tokens.
enum class Span {
  Sending,
  AwaitingPlan,
  AwaitingTile,
  AwaitingPlaceOut,
  Quantising,
  StoringTiles,
  AwaitingPlacesOfOwn,
  WritingRoutes,
  Telling,
  Receiving,
  AwaitingRow,
  AwaitingLoad,
  Placing,
  AwaitingPlaceIn,
  Planning,
  Beginning,
  AwaitingClaims,
  Counting,
  Summing,
  AwaitingChunks,
  PlacingChunks,
  SendingSums,
  AwaitingInputs,
  AddingUp,
  AwaitingPlaceOfSum,
  StoringSums,
  TellingOfSums,
  ReceivingSums,
  AwaitingSums,
};

inline constexpr const char* kSpans[] = {
    "dispatch sends",  "awaits its plan", "awaits a tile",    "awaits a place for a tile", "quantises a tile", "stores a tile", "awaits own places",
    "writes routes",   "tells",           "dispatch receives", "awaits rows",              "awaits a load",        "places",
    "awaits a place for a row", "plans",  "begins", "awaits the set", "counts chunks", "sums chunks", "awaits chunks", "places a chunk",
    "combine sends",             "awaits inputs",        "adds up",
    "awaits a place for a sum", "stores sums", "tells of sums", "combine receives",         "awaits sums",
};
static_assert(sizeof kSpans / sizeof *kSpans == static_cast<int>(Span::AwaitingSums) + 1, "a name each");

}  // namespace pplx::cuda
