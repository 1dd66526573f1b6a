// The kinds of fault that the simulation knows, and how often each one happened.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>

namespace pplx::sim {

// Thrown when a run finds the library wrong.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Fault : std::uint8_t {
  LateRead,            // a source was read at the last permitted moment, with the local completion
  SplitRead,           // a source was read in pieces, at different times
  SplitLanding,        // a write landed in pieces, in any order, before its immediate
  Reordered,           // a write arrived before one that was posted earlier to the same peer
  Delayed,             // a write took tens of times as long as the others
  ShardsReordered,     // the shards of a block arrived in another order than they were posted
  Duplicated,          // an arrival was reported twice
  Replayed,            // an immediate of long ago was reported again
  Busy,                // a burst of EAGAIN
  QueueFull,           // EAGAIN: the endpoint holds no more writes in flight
  CompletionsHeld,     // more completions than the queue holds; the provider kept them back
  CompletionsLost,     // more completions than the queue holds; it overran
  FailedWrite,         // a write that completed with an error
  FailedSomewhere,     // an error that names no write
  FailedPost,          // a write that could not even be posted
  UnknownRefused,      // EAGAIN: the target has not inserted this initiator yet
  UnknownDropped,      // the target has not inserted this initiator yet, and dropped it; the provider tried again
  UnknownSource,       // an immediate that names no peer
  Unasked,             // an immediate that answers a dispatch that was never sent
  Poisoned,            // the memory of a finished block was overwritten
  Slow,                // a rank did nothing for milliseconds
  Killed,              // a rank died, and its control connections said so
  Vanished,            // a rank stopped, and nothing said so
  Left,                // a rank closed its Communicator in the middle of others' step
  LeftInOrder,         // a rank closed its Communicator after its last step
  CorruptStep,         // a header with another step ...
  CorruptGeneration,   // ... another generation
  CorruptSource,       // ... another source
  CorruptRows,         // ... an impossible number of rows
  CorruptCounts,       // ... impossible counts
  CorruptFlags,        // ... a release flag on a block that is no release
  CorruptPiece,        // ... another number of a piece, or of pieces
  CorruptMask,         // ... a mask that lacks its row, or with a rank that the node has not
  StaleWrite,          // a write of an earlier generation reached memory that is no longer registered
  StaleWord,           // an arrival word of an earlier generation, of a step far ahead, lay where a new one was expected
  WokeTooLate,         // a vanished rank went on after the others had reset without it
  Finished,            // a rank finished rows of the output for its replicas
  ReplicaLost,         // replicas went on without one of them
  Relayed,             // a relay had all rows that its node returned to a source; the source's block was overwritten
  RelayMoved,          // after a reset another rank was the relay of a living one
  RelayGrew,           // after a reset a rank was the relay of more sources
  Piece,               // a piece that is not the first of its block arrived
  Credit,              // a credit arrived
  CreditReordered,     // a credit arrived after a later one
  Count
};
inline constexpr std::size_t kFaults = static_cast<std::size_t>(Fault::Count);

const char* name_of(Fault fault);

struct Totals {
  std::array<std::uint64_t, kFaults> faults{};
  std::uint64_t seeds = 0, steps = 0, resets = 0, failures = 0, writes = 0, events = 0, outputs = 0;

  void count(Fault fault, std::uint64_t n = 1) { faults[static_cast<std::size_t>(fault)] += n; }
  std::uint64_t operator[](Fault fault) const { return faults[static_cast<std::size_t>(fault)]; }
  void add(const Totals& other) {
    for (std::size_t i = 0; i < kFaults; ++i) faults[i] += other.faults[i];
    seeds += other.seeds;
    steps += other.steps;
    resets += other.resets;
    failures += other.failures;
    writes += other.writes;
    events += other.events;
    outputs += other.outputs;
  }
};

}  // namespace pplx::sim
