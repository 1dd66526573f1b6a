#pragma once
#include <stdarg.h>

/* One line to the file of log_to() or stderr, in one write, so that lines of many processes do not mix. */
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
/* The same at a verbosity of at least 1 (objects) or 2 (work requests). */
void note(int level, const char* format, ...) __attribute__((format(printf, 2, 3)));
/* EFA_SOFT_LOG or NULL, and EFA_SOFT_VERBOSE: the settings pass them on. */
void log_to(const char* path);
void log_verbosity(int level);
