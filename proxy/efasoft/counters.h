/* Counts of events, by NIC, in a page per process that outlives it. The page describes itself: README.md has its layout. */
#pragma once
#include <stdatomic.h>
#include <stdint.h>

enum counter {
  COUNT_SENDS,
  COUNT_WRITES,
  COUNT_WRITES_WITH_IMMEDIATE,
  COUNT_READS,
  COUNT_BYTES,
  COUNT_OUT_OF_ORDER,
  COUNT_RNR_TRIES,
  COUNT_REFUSED_POSTS,
  COUNT_RECEIVES_USED,
  COUNT_UNSOLICITED_ARRIVALS,
  COUNT_NO_DOORBELL,
  COUNT_CQ_OVERRUNS,
  COUNT_KEYS_GIVEN_TWICE,
  COUNT_ERROR, /* one for each vendor code from here on */
  COUNTERS = COUNT_ERROR + 16,
};

/* The words of one NIC. */
struct counts {
  _Atomic uint64_t of[COUNTERS];
};

/* Makes the page, with room for that many NICs; null where it cannot, and then nothing is counted. What it gives is for the two
   below. */
struct counts* counters_open(const char* name, int nics);
void counters_name(struct counts* first, int nic, const char* name, const uint8_t* gid);
struct counts* counters_at(struct counts* first, int nic);

static inline void count(struct counts* counts, enum counter what, uint64_t n) {
  if (counts) atomic_fetch_add_explicit(&counts->of[what], n, memory_order_relaxed);
}
