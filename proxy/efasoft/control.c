#include "control.h"
#include "files.h"
#include "clock.h"
#include <assert.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

enum { NICS = 1024, MAGIC = 0x45414645 /* "EFAE" */ };

struct control {
  uint32_t magic, version;
  _Atomic uint32_t nics;
  uint32_t nic_size, first_nic, reserved[11];
  struct control_nic nic[NICS];
};
static_assert(offsetof(struct control, nic) == 64 && sizeof(struct control_nic) == 120, "README.md has these numbers");

static struct control* page;
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

static struct control* map_page(void) {
  pthread_mutex_lock(&opening);
  if (!page) {
    int lock = files_lock();
    size_t size;
    page = file_map("control", &size);
    if (!page && (page = file_create("control", sizeof *page))) {
      page->version = 1;
      page->nic_size = sizeof(struct control_nic);
      page->first_nic = offsetof(struct control, nic);
      __atomic_store_n(&page->magic, MAGIC, __ATOMIC_RELEASE);
    }
    files_unlock(lock);
  }
  pthread_mutex_unlock(&opening);
  return page;
}

struct control_nic* control_find(const uint8_t* gid) {
  struct control* control = map_page();
  uint32_t nics = control ? atomic_load(&control->nics) : 0;
  for (uint32_t i = 0; i < nics; i++)
    if (!memcmp(control->nic[i].gid, gid, 16)) return &control->nic[i];
  return NULL;
}

struct control_nic* control_nic(const uint8_t* gid, const char* name) {
  struct control_nic* found = control_find(gid);
  if (found || !page) return found;
  int lock = files_lock();
  found = control_find(gid);
  uint32_t at = atomic_load(&page->nics);
  if (!found && at < NICS) {
    found = &page->nic[at];
    memcpy(found->gid, gid, 16);
    snprintf(found->name, sizeof found->name, "%.31s", name);
    atomic_store(&page->nics, at + 1);
  }
  files_unlock(lock);
  return found;
}

uint64_t control_reserve(_Atomic uint64_t* busy_until, uint64_t from, uint64_t bytes, double gbit) {
  uint64_t takes = (uint64_t)((double)bytes * 8 / gbit);
  uint64_t busy = atomic_load(busy_until), end;
  do end = later(busy, from) + takes;
  while (!atomic_compare_exchange_weak(busy_until, &busy, end));
  return end;
}
