// Names of what bench/stages.py measures, in the order in which it lists it.
#pragma once

namespace pplx::cuda {

// The stages of a launch.
#define PPLX_STAGES(stage) \
  stage(DispatchBegins, "dispatch begins") \
  stage(Claimed, "unit and step there") \
  stage(Counted, "earlier tokens counted") \
  stage(RowsPlanned, "rows planned") \
  stage(Stored, "payload stored") \
  stage(Routed, "routes stored") \
  stage(Published, "released") \
  stage(CountsThere, "counts there") \
  stage(ExpertsPlaced, "experts placed") \
  stage(RowThere, "row there") \
  stage(RowPlaced, "row placed") \
  stage(DispatchEnds, "dispatch ends") \
  stage(CombineBegins, "combine begins") \
  stage(Found, "row's places there") \
  stage(Sent, "sum stored") \
  stage(Came, "rows there") \
  stage(Added, "added") \
  stage(CombineEnds, "combine ends") \
  stage(Told, "proxy told") \
  stage(Heard, "proxy heard") \
  stage(PassedOn, "passed on")

// The work and the waits of a warp in a large launch.
#define PPLX_SPANS(span) \
  span(Sending, "dispatch sends") \
  span(AwaitingPlan, "awaits its plan") \
  span(AwaitingTile, "awaits a tile") \
  span(AwaitingPlaceOut, "awaits a place for a tile") \
  span(Quantising, "quantises a tile") \
  span(StoringTiles, "stores a tile") \
  span(AwaitingPlacesOfOwn, "awaits own places") \
  span(WritingRoutes, "writes routes") \
  span(Telling, "tells") \
  span(Receiving, "dispatch receives") \
  span(AwaitingRow, "awaits rows") \
  span(Placing, "places") \
  span(AwaitingPlaceIn, "awaits a place for a row") \
  span(Planning, "plans") \
  span(Beginning, "begins") \
  span(AwaitingClaims, "awaits the set") \
  span(Counting, "counts chunks") \
  span(Summing, "sums chunks") \
  span(AwaitingChunks, "awaits chunks") \
  span(PlacingChunks, "places a chunk") \
  span(SendingSums, "combine sends") \
  span(AwaitingInputs, "awaits inputs") \
  span(AddingUp, "adds up") \
  span(AwaitingPlaceOfSum, "awaits a place for a sum") \
  span(StoringSums, "stores sums") \
  span(TellingOfSums, "tells of sums") \
  span(ReceivingSums, "combine receives") \
  span(AwaitingSums, "awaits sums")

#define PPLX_ENTRY(name, text) name,
#define PPLX_TEXT(name, text) text,
enum class Stage { PPLX_STAGES(PPLX_ENTRY) };
enum class Span { PPLX_SPANS(PPLX_ENTRY) };
inline constexpr const char* kStages[] = {PPLX_STAGES(PPLX_TEXT)};
inline constexpr const char* kSpans[] = {PPLX_SPANS(PPLX_TEXT)};

}  // namespace pplx::cuda
