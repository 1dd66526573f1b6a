// The event log of one run, a line per event, for replaying a seed. Off by default.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "clock.h"

namespace pplx::sim {

class Log {
 public:
  Log(const Clock& clock, bool on) : clock_(clock), on_(on) {}

  bool on() const { return on_; }

  __attribute__((format(printf, 2, 3))) void line(const char* format, ...) const {
    if (!on_) return;
    std::printf("%12.3f us  ", static_cast<double>(clock_.now()) * 1e-3);
    va_list arguments;
    va_start(arguments, format);
    std::vprintf(format, arguments);
    va_end(arguments);
    std::putchar('\n');
  }

 private:
  const Clock& clock_;
  const bool on_;
};

}  // namespace pplx::sim
