// Names of what a build with PPLX_CUDA_STAGES notes, in the order in which bench/stages.py lists it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pplx::cuda {

// The stages of a launch: all of a dispatch from its first to its last, then those of a combine. Where it begins its step is not known
// yet, and counts as 0.
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
  stage(Told, "proxy told") \
  stage(Heard, "proxy heard") \
  stage(PassedOn, "passed on") \
  stage(DispatchEnds, "dispatch ends") \
  stage(CombineBegins, "combine begins") \
  stage(Found, "row's places there") \
  stage(Sent, "sum stored") \
  stage(Came, "rows there") \
  stage(Added, "added") \
  stage(ToldOfSums, "proxy told of sums") \
  stage(CombineEnds, "combine ends")

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
inline constexpr std::uint32_t kStagesOfStep = sizeof kStages / sizeof *kStages, kSpanNames = sizeof kSpans / sizeof *kSpans;

// The place of a warp's time in [steps][kStagesOfStep][warps].
constexpr std::size_t stage_word(std::uint32_t slot, Stage stage, std::uint32_t warps, std::uint32_t warp) {
  return (std::size_t{slot} * kStagesOfStep + static_cast<std::uint32_t>(stage)) * warps + warp;
}

}  // namespace pplx::cuda
