#include "files.h"
#include "settings.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const char* path_of(const char* name, char* path) {
  snprintf(path, PATH_MAX, "%s/%s", settings()->folder, name);
  return path;
}

int file_open(const char* name) {
  char path[PATH_MAX];
  return open(path_of(name, path), O_RDWR | O_CLOEXEC);
}

void file_unlink(const char* name) {
  char path[PATH_MAX];
  unlink(path_of(name, path));
}

static void* map(int fd, size_t size) {
  void* memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? NULL : memory;
}

void* file_create(const char* name, size_t size) {
  char path[PATH_MAX];
  int fd = open(path_of(name, path), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return NULL;
  void* memory = ftruncate(fd, (off_t)size) == 0 ? map(fd, size) : NULL;
  int error = errno;
  close(fd);
  if (!memory) unlink(path);
  errno = error;
  return memory;
}

void* file_map(const char* name, size_t* size) {
  int fd = file_open(name);
  if (fd < 0) return NULL;
  struct stat status;
  void* memory = fstat(fd, &status) == 0 && status.st_size > 0 ? map(fd, (size_t)status.st_size) : NULL;
  *size = memory ? (size_t)status.st_size : 0;
  close(fd);
  return memory;
}

void file_unmap(void* memory, size_t size) {
  if (memory) munmap(memory, size);
}

void files_each(void (*visit)(const char* name)) {
  DIR* folder = opendir(settings()->folder);
  if (!folder) return;
  for (struct dirent* entry; (entry = readdir(folder));) visit(entry->d_name);
  closedir(folder);
}

int files_lock(void) {
  char path[PATH_MAX];
  int fd = open(path_of("lock", path), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  while (fd >= 0 && flock(fd, LOCK_EX) != 0 && errno == EINTR) {
  }
  return fd;
}

void files_unlock(int lock) {
  if (lock >= 0) close(lock);
}

/* Open file description locks: unlike others they are not lost when the process opens and closes the same file once more. */
static bool lock_command(int fd, int command, struct flock* lock) {
  *lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET};
  return fcntl(fd, command, lock) == 0;
}

bool file_hold(int fd) {
  struct flock lock;
  return lock_command(fd, F_OFD_SETLK, &lock);
}

bool file_is_held(int fd) {
  struct flock lock;
  return lock_command(fd, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK;
}

void shared_mutex_init(pthread_mutex_t* mutex) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

bool shared_mutex_try(pthread_mutex_t* mutex) {
  /* It is held for a hundred nanoseconds, so a few looks nearly always suffice. */
  for (int look = 0; look < 100; look++) {
    int error = pthread_mutex_trylock(mutex);
    if (error == EOWNERDEAD) pthread_mutex_consistent(mutex);
    if (error == 0 || error == EOWNERDEAD) return true;
    if (error != EBUSY) return false;
    if (look % 10 == 9) sched_yield();
  }
  return false;
}
