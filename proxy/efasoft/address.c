#include "address.h"
#include "nics.h"
#include "process.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct handle {
  struct ibv_ah ah;
  uint64_t generation;
  uint16_t number;
  uint8_t gid[16];
};

static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

bool address_is(struct process_file* process, uint16_t number, const uint8_t* gid, uint32_t nic) {
  if (number >= ADDRESSES) return false;
  struct address* address = &process->address[number];
  uint64_t words[2];
  memcpy(words, gid, 16);
  return atomic_load(&address->handles) && atomic_load_explicit(&address->nic, memory_order_relaxed) == nic &&
         atomic_load_explicit(&address->gid[0], memory_order_relaxed) == words[0] &&
         atomic_load_explicit(&address->gid[1], memory_order_relaxed) == words[1];
}

uint16_t address_find(struct process_file* process, const uint8_t* gid, uint32_t nic, uint16_t guess) {
  if (address_is(process, guess, gid, nic)) return guess;
  uint32_t used = atomic_load(&process->addresses);
  for (uint32_t i = 0; i < used; i++)
    if (address_is(process, (uint16_t)i, gid, nic)) return (uint16_t)i;
  return NO_ADDRESS;
}

/* Under `writing`. */
static uint16_t fill_free(struct process_file* process, const uint8_t* gid, uint32_t nic) {
  for (uint32_t i = 0; i < ADDRESSES; i++) {
    struct address* address = &process->address[i];
    if (atomic_load(&address->handles)) continue;
    uint64_t words[2];
    memcpy(words, gid, 16);
    atomic_store_explicit(&address->nic, nic, memory_order_relaxed);
    atomic_store_explicit(&address->gid[0], words[0], memory_order_relaxed);
    atomic_store_explicit(&address->gid[1], words[1], memory_order_relaxed);
    atomic_store(&address->handles, 1);
    if (i >= atomic_load(&process->addresses)) atomic_store(&process->addresses, i + 1);
    return (uint16_t)i;
  }
  return NO_ADDRESS;
}

struct ibv_ah* address_create(struct ibv_pd* pd, const struct ibv_ah_attr* attributes) {
  struct process* self = process_self();
  struct handle* handle = self ? calloc(1, sizeof *handle) : NULL;
  if (!handle) {
    errno = ENOMEM;
    return NULL;
  }
  const uint8_t* gid = attributes->dgid.raw;
  uint32_t nic = (uint32_t)nic_of(pd->context)->index;
  pthread_mutex_lock(&writing);
  uint16_t number = address_find(self->file, gid, nic, NO_ADDRESS);
  if (number != NO_ADDRESS) atomic_fetch_add(&self->file->address[number].handles, 1);
  else number = fill_free(self->file, gid, nic);
  pthread_mutex_unlock(&writing);
  if (number == NO_ADDRESS) {
    free(handle);
    errno = ENOMEM;
    return NULL;
  }
  handle->ah = (struct ibv_ah){.context = pd->context, .pd = pd, .handle = number};
  handle->generation = self->generation;
  handle->number = number;
  memcpy(handle->gid, gid, 16);
  return &handle->ah;
}

int address_destroy(struct ibv_ah* ah) {
  struct handle* handle = (struct handle*)ah;
  struct process* self = process_self();
  if (self && handle->generation == self->generation) {
    pthread_mutex_lock(&writing);
    atomic_fetch_sub(&self->file->address[handle->number].handles, 1);
    pthread_mutex_unlock(&writing);
  }
  free(handle);
  return 0;
}

uint16_t address_number(const struct ibv_ah* ah) { return ((const struct handle*)ah)->number; }
const uint8_t* address_gid(const struct ibv_ah* ah) { return ((const struct handle*)ah)->gid; }

void addresses_after_fork(void) { pthread_mutex_init(&writing, NULL); }
