/* Files in EFA_SOFT_DIR, named without the folder. What processes share is mapped from them. */
#pragma once
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

enum { FILE_NAME = 96 };

/* New, zeroed and mapped; null with errno where it exists already (EEXIST) or there is no room. */
void* file_create(const char* name, size_t size);
/* Mapped as long as it is; null where it does not exist. */
void* file_map(const char* name, size_t* size);
void file_unmap(void* memory, size_t size);
int file_open(const char* name);
void file_unlink(const char* name);
/* Calls `visit` with every name. */
void files_each(void (*visit)(const char* name));

/* A lock of the whole folder, for creating, sweeping and taking over. The kernel opens it when its owner dies. */
int files_lock(void);
void files_unlock(int lock);

/* Liveness: a process holds its file as long as it lives; an exec ends it too. Never a pid, which may come again. */
bool file_hold(int fd);
bool file_is_held(int fd);

/* A mutex in shared memory that survives the death of its owner. */
void shared_mutex_init(pthread_mutex_t* mutex);
/* False when another process holds it. That one may have been stopped there, so the caller comes back later and never waits. */
bool shared_mutex_try(pthread_mutex_t* mutex);
