// A half of an operation of a step in pieces, made of parts that several threads poll.
#pragma once

#include "phase.h"

namespace pplx::cpu {

class PieceRun : public PhaseRun {
 public:
  bool poll() final {
    const FloatEnvironment plain;
    errors_.rethrow();
    bool done = false;
    errors_.guarded([&] { done = work(); });
    errors_.rethrow();
    return done;
  }

 protected:
  virtual bool work() = 0;   // all that can be done now; true: nothing is left

 private:
  FirstError errors_;
};

}  // namespace pplx::cpu
