// How long C++ code waits for what may never come. pplx_comm/control/deadlines.py has those of Python beside them and says which of
// both must together stay within what close() promises; docs/failure.md has the whole table.
#pragma once

#include <cstdint>

namespace pplx::deadlines {

struct Deadline {
  const char* name;   // in Python
  double seconds;
  const char* what;
};

// The first step gets that many times `timeout`: peers may still be compiling or loading.
constexpr std::uint32_t kFirstStepFactor = 3;

// A process that is killed loses its memory first, which takes its time on a busy machine, and its connections after that.
constexpr Deadline kDeathGrace{
    "DEATH_GRACE", 0.8, "after a failed write: for the control connection to say that the peer died"};
constexpr Deadline kGoodbyeGrace{
    "GOODBYE_GRACE", 1.0, "after a peer's goodbye: for what it sent and the network still holds"};
constexpr Deadline kAway{
    "AWAY", 1.0, "a thread that comes back to its wait after more than this was stopped itself: that time is no peer's fault"};
// A busy rank may hang as well, and then its peers must say so.
constexpr Deadline kBusy{
    "BUSY", 1800.0, "a rank that says that it is busy (Communicator.busy) is not blamed for so long"};
// The warp that passes a remote peer's words on may wait for another peer. It must give up first, since it knows the rank to blame.
// With dedup='node' the same holds for a relay, and for what its node's ranks return to it.
constexpr Deadline kPassedOn{
    "PASSED_ON", 0.25, "beyond `timeout`: for a word that another warp of this GPU passes on, or rows that a relay waits for"};
constexpr Deadline kAnswered{
    "ANSWERED", 0.5, "beyond `timeout`: for the sums of a node, whose relay waits for its other ranks"};
// Waits of relays for one another are apart by so much more in the emulation, whose ranks have few cores between them.
#ifdef PPLX_EMULATION
constexpr double kApart = 4;
#else
constexpr double kApart = 1;
#endif
constexpr Deadline kCloseKernels{
    "CLOSE_KERNELS", 0.3, "once more, when the last reference goes: for running kernels"};
constexpr Deadline kCloseAborted{
    "CLOSE_ABORTED", 0.3, "for the kernels that did not end, after they were told to"};

constexpr const Deadline* kAll[] = {&kDeathGrace, &kGoodbyeGrace, &kAway,         &kBusy,
                                    &kPassedOn,   &kAnswered,     &kCloseKernels, &kCloseAborted};

}  // namespace pplx::deadlines
