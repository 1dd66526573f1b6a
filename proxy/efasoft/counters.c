#include "counters.h"
#include "files.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { NAME = 32, MAGIC = 0x43414645 /* "EFAC" */ };

struct page {
  uint32_t magic, version, pid, counters, nics;
  uint32_t names_at, nics_at, nic_size;
};
struct nic_counts {
  char name[NAME];
  uint8_t gid[16];
  struct counts counts;
};

static const char* const NAMES[COUNT_ERROR] = {
    [COUNT_SENDS] = "sends",
    [COUNT_WRITES] = "writes",
    [COUNT_WRITES_WITH_IMMEDIATE] = "writes_with_immediate",
    [COUNT_READS] = "reads",
    [COUNT_BYTES] = "bytes",
    [COUNT_OUT_OF_ORDER] = "out_of_order",
    [COUNT_RNR_TRIES] = "rnr_tries",
    [COUNT_REFUSED_POSTS] = "refused_posts",
    [COUNT_RECEIVES_USED] = "receives_used",
    [COUNT_UNSOLICITED_ARRIVALS] = "unsolicited_arrivals",
    [COUNT_NO_DOORBELL] = "posted_without_doorbell",
    [COUNT_CQ_OVERRUNS] = "cq_overruns",
    [COUNT_KEYS_GIVEN_TWICE] = "keys_given_twice",
};

static void write_names(char (*names)[NAME]) {
  for (int i = 0; i < COUNTERS; i++) {
    if (i < COUNT_ERROR) snprintf(names[i], NAME, "%s", NAMES[i]);
    else snprintf(names[i], NAME, "error_%d", i - COUNT_ERROR);
  }
}

struct counts* counters_open(const char* name, int nics) {
  size_t names_at = sizeof(struct page), nics_at = names_at + COUNTERS * NAME;
  struct page* page = file_create(name, nics_at + (size_t)nics * sizeof(struct nic_counts));
  if (!page) return NULL;
  write_names((char(*)[NAME])((char*)page + names_at));
  *page = (struct page){
      .version = 1,
      .pid = (uint32_t)getpid(),
      .counters = COUNTERS,
      .nics = (uint32_t)nics,
      .names_at = (uint32_t)names_at,
      .nics_at = (uint32_t)nics_at,
      .nic_size = sizeof(struct nic_counts),
  };
  __atomic_store_n(&page->magic, MAGIC, __ATOMIC_RELEASE);
  return (struct counts*)((char*)page + nics_at);
}

static struct nic_counts* at(struct counts* first, int nic) { return (struct nic_counts*)first + nic; }

void counters_name(struct counts* first, int nic, const char* name, const uint8_t* gid) {
  if (!first) return;
  snprintf(at(first, nic)->name, NAME, "%.31s", name);
  memcpy(at(first, nic)->gid, gid, 16);
}

struct counts* counters_at(struct counts* first, int nic) { return first ? &at(first, nic)->counts : NULL; }
