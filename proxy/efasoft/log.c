#include "log.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

static const char* file;
static int verbosity;

void log_to(const char* path) { file = path; }
void log_verbosity(int level) { verbosity = level; }

static void write_line(const char* format, va_list arguments) {
  int before = errno;
  char line[1024];
  int length = snprintf(line, sizeof line, "efa-soft[%d] ", getpid());
  length += vsnprintf(line + length, sizeof line - length - 1, format, arguments);
  if (length > (int)sizeof line - 2) length = sizeof line - 2;
  line[length++] = '\n';
  int fd = file ? open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644) : -1;
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
