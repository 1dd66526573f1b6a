#pragma once

namespace pplx::cuda {

// The work and the waits of a warp in a large launch.
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
