// Tells a process from the children that are forked off it. A child has copies of all objects, but none of the threads, no lock
// that a thread held, and not the memory that is mapped for the parent only: what needs any of these it leaves alone.
#pragma once

#include <unistd.h>

namespace pplx {

class ForkCheck {
 public:
  bool in_child() const { return getpid() != made_in_; }

 private:
  const pid_t made_in_ = getpid();
};

}  // namespace pplx
