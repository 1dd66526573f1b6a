#pragma once
#include <stdarg.h>

/* One line to EFA_SOFT_LOG or stderr, in one write, so that lines of many processes do not mix. */
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
/* The same at a verbosity of at least 1 (objects) or 2 (work requests): EFA_SOFT_VERBOSE, which the settings pass on. */
void note(int level, const char* format, ...) __attribute__((format(printf, 2, 3)));
void log_verbosity(int level);
