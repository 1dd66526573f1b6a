#include "memory.h"
#include "clock.h"
#include "log.h"
#include "nics.h"
#include "process.h"
#include "settings.h"
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

/* A key is its slot and how often keys have been made: an old key of a slot that is used again is no key.
 * With EFA_SOFT_REUSE_KEYS the key that was given back last is the next one given out, the worst that a device may do. */
static pthread_mutex_t slots = PTHREAD_MUTEX_INITIALIZER;
static uint32_t next_slot = 1, generation, given_back;

static struct region* region_of(struct process_file* process, uint32_t key) { return &process->region[key & (REGIONS - 1)]; }

static bool is_free(struct process_file* process, uint32_t slot) {
  struct region* region = &process->region[slot];
  return !atomic_load(&region->key) && atomic_load(&region->users) <= 0;
}

/* Under `slots`. 0: none is left. */
static uint32_t new_key(struct process* self, struct nic* nic) {
  uint32_t again = settings()->reuse_keys ? given_back : 0;
  given_back = 0;
  if (again && is_free(self->file, again & (REGIONS - 1))) {
    count(nic->counts, COUNT_KEYS_GIVEN_TWICE, 1);
    return again;
  }
  for (uint32_t tried = 0; tried < REGIONS; tried++) {
    uint32_t slot = next_slot;
    next_slot = next_slot % (REGIONS - 1) + 1;
    if (!is_free(self->file, slot)) continue;
    generation = generation % 0x7fff + 1;
    return slot | generation << 16;
  }
  return 0;
}

struct ibv_mr* memory_register(struct ibv_pd* pd, void* memory, size_t length, uint64_t address, unsigned access) {
  struct process* self = process_self();
  struct ibv_mr* mr = self ? calloc(1, sizeof *mr) : NULL;
  if (!mr) {
    errno = ENOMEM;
    return NULL;
  }
  pthread_mutex_lock(&slots);
  uint32_t key = new_key(self, nic_of(pd->context));
  if (key) {
    struct region* region = region_of(self->file, key);
    atomic_store_explicit(&region->address, address, memory_order_relaxed);
    atomic_store_explicit(&region->length, length, memory_order_relaxed);
    atomic_store_explicit(&region->access, access, memory_order_relaxed);
    atomic_store_explicit(&region->pd, pd->handle, memory_order_relaxed);
    atomic_store(&region->key, key);
  }
  pthread_mutex_unlock(&slots);
  if (!key) {
    free(mr);
    errno = ENOMEM;
    return NULL;
  }
  *mr = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = memory, .length = length, .handle = key, .lkey = key,
                         .rkey = key};
  note(1, "region %#x: %p + %zu, access %#x", key, memory, length, access);
  return mr;
}

/* After this nothing lands there any more. An initiator that was stopped or killed in the middle is not waited for long. */
static void wait_for_users(struct region* region) {
  uint64_t until = now_ns() + 100000000;
  while (atomic_load(&region->users) > 0 && now_ns() < until) sched_yield();
}

int memory_deregister(struct ibv_mr* mr) {
  struct process* self = process_self();
  if (!self) return ENODEV;
  struct region* region = region_of(self->file, mr->handle);
  uint32_t key = mr->lkey;
  /* Not for what a parent registered before a fork: in the child its key is unknown. */
  if (atomic_compare_exchange_strong(&region->key, &key, 0)) {
    wait_for_users(region);
    pthread_mutex_lock(&slots);
    given_back = mr->lkey;
    pthread_mutex_unlock(&slots);
  }
  free(mr);
  return 0;
}

static bool covers(struct region* region, uint64_t address, uint64_t length, unsigned access, uint32_t pd) {
  uint64_t from = atomic_load_explicit(&region->address, memory_order_relaxed);
  uint64_t size = atomic_load_explicit(&region->length, memory_order_relaxed);
  uint32_t allowed = atomic_load_explicit(&region->access, memory_order_relaxed);
  return atomic_load_explicit(&region->pd, memory_order_relaxed) == pd && (allowed & access) == access && address >= from &&
         length <= size && address - from <= size - length;
}

struct region* memory_acquire(struct process_file* process, uint32_t key, uint64_t address, uint64_t length, unsigned access,
                              uint32_t pd) {
  struct region* region = region_of(process, key);
  if (!key) return NULL;
  /* First in, then look: a deregistration takes the key first, and then waits until nobody is in. */
  atomic_fetch_add(&region->users, 1);
  if (atomic_load(&region->key) == key && covers(region, address, length, access, pd)) return region;
  memory_release(region);
  return NULL;
}

void memory_release(struct region* region) { atomic_fetch_sub(&region->users, 1); }

void memory_after_fork(void) {
  pthread_mutex_init(&slots, NULL);
  next_slot = 1;
  given_back = 0;
}
