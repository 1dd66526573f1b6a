#pragma once
#include <stdint.h>
#include <time.h>

#define NEVER UINT64_MAX

/* CLOCK_MONOTONIC is one clock for all processes of a machine, so times may stand in shared memory. */
static inline uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static inline uint64_t earlier(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }
