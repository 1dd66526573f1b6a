#pragma once
#include <stdarg.h>

/* One line to EFA_SOFT_LOG or stderr, in one write, so that lines of many processes do not mix. */
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
/* The same when EFA_SOFT_VERBOSE is at least 1 (objects) or 2 (work requests). */
void note(int level, const char* format, ...) __attribute__((format(printf, 2, 3)));
