#include "log.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int verbosity;

void log_verbosity(int level) { verbosity = level; }

static void write_line(const char* format, va_list arguments) {
  int before = errno;
  char line[1024];
  int length = snprintf(line, sizeof line, "efa-soft[%d] ", getpid());
  length += vsnprintf(line + length, sizeof line - length - 1, format, arguments);
  if (length > (int)sizeof line - 2) length = sizeof line - 2;
  line[length++] = '\n';
  /* Not from the settings, which say lines while they are read. */
  const char* path = getenv("EFA_SOFT_LOG");
  int fd = path && *path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
  ssize_t written = write(fd < 0 ? STDERR_FILENO : fd, line, length);
  (void)written; /* nobody to tell */
  if (fd >= 0) close(fd);
  errno = before;
}

void say(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  write_line(format, arguments);
  va_end(arguments);
}

void note(int level, const char* format, ...) {
  if (verbosity < level) return;
  va_list arguments;
  va_start(arguments, format);
  write_line(format, arguments);
  va_end(arguments);
}
