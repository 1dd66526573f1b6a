#include "parcels.h"
#include "engine.h"
#include "memory.h"
#include "order.h"
#include "settings.h"
#include <string.h>
#include <sys/uio.h>

/* ---- the sender ---- */

/* All are taken: perhaps by the dead, who free nothing. */
static void free_those_of_the_dead(struct process_file* target) {
  for (int i = 0; i < PARCELS; i++) {
    struct parcel* parcel = &target->parcel[i];
    uint32_t state = atomic_load(&parcel->state);
    if (state != PARCEL_FREE && state != PARCEL_SENT && process_is_dead(parcel->sender)) atomic_store(&parcel->state, PARCEL_FREE);
  }
}

static struct parcel* claim(struct process_file* target) {
  for (int i = 0; i < PARCELS; i++) {
    uint32_t free_state = PARCEL_FREE;
    if (atomic_compare_exchange_strong(&target->parcel[i].state, &free_state, PARCEL_PACKING)) {
      memcpy(target->parcel[i].sender, process_self()->owner, OWNER);
      return &target->parcel[i];
    }
  }
  free_those_of_the_dead(target);
  return NULL;
}

/* Between a parcel and the request's own buffers. */
static void copy(const struct request* request, struct parcel* parcel, uint64_t offset, bool pack) {
  struct iovec local[2];
  int parts = mover_local(request, offset, parcel->length, local);
  uint8_t* bytes = parcel->bytes;
  for (int i = 0; i < parts; bytes += local[i++].iov_len) {
    if (pack) memcpy(bytes, local[i].iov_base, local[i].iov_len);
    else memcpy(local[i].iov_base, bytes, local[i].iov_len);
  }
}

/* What has come back. False: a parcel could not be unpacked. */
static bool collect(struct request* request, int* out) {
  bool right = true;
  for (int i = 0; i < PARCELS_OUT; i++) {
    struct parcel* parcel = request->parcel[i];
    uint32_t state = parcel ? atomic_load(&parcel->state) : PARCEL_FREE;
    if (state == PARCEL_DONE && request->op == OP_READ) copy(request, parcel, request->parcel_offset[i], false);
    if (state == PARCEL_DONE || state == PARCEL_FAILED) {
      right &= state == PARCEL_DONE;
      atomic_store(&parcel->state, PARCEL_FREE);
      request->parcel[i] = NULL;
    }
    *out += request->parcel[i] != NULL;
  }
  return right;
}

static void send(struct request* request, struct parcel* parcel, int at, uint64_t offset) {
  request->parcel[at] = parcel;
  request->parcel_offset[at] = offset;
  parcel->is_read = request->op == OP_READ;
  if (!parcel->is_read) copy(request, parcel, offset, true);
  atomic_store(&parcel->state, PARCEL_SENT);
}

enum moved parcels_move(struct request* request, struct peer* peer, uint64_t address, uint32_t key, uint64_t bytes) {
  if (request->attached != peer->attached) {
    /* Those of before went to a process that has gone. */
    memset(request->parcel, 0, sizeof request->parcel);
    request->sent_pieces = 0;
    request->attached = peer->attached;
  }
  int out = 0;
  if (!collect(request, &out)) return MOVE_FAULT;
  uint64_t piece = settings()->mtu < PARCEL_BYTES ? settings()->mtu : PARCEL_BYTES;
  struct shuffle order = shuffle((bytes + piece - 1) / piece, request->draw);
  bool sent = false;
  for (int i = 0; i < PARCELS_OUT && request->sent_pieces < order.n; i++) {
    struct parcel* parcel = request->parcel[i] ? NULL : claim(peer->to.process);
    if (!parcel) continue;
    uint64_t offset = shuffled(&order, request->sent_pieces++) * piece;
    parcel->length = (uint32_t)(bytes - offset < piece ? bytes - offset : piece);
    parcel->address = address + offset;
    parcel->key = key;
    parcel->pd = peer->to.qp->pd;
    send(request, parcel, i, offset);
    sent = true;
    out++;
  }
  if (sent) engine_ring(peer->to.process);
  return out || request->sent_pieces < order.n ? MOVE_AGAIN : MOVED;
}

void parcels_forget(struct request* request) {
  for (int i = 0; i < PARCELS_OUT; i++) {
    struct parcel* parcel = request->parcel[i];
    uint32_t sent = PARCEL_SENT;
    /* One that is on its way is freed by who unpacks it. */
    if (parcel && !atomic_compare_exchange_strong(&parcel->state, &sent, PARCEL_ABANDONED))
      atomic_store(&parcel->state, PARCEL_FREE);
    request->parcel[i] = NULL;
  }
}

/* ---- the target ---- */

/* These bytes are moved by a NIC, as process_vm_writev would do it: what orders them with the program's own reads and writes is
 * what other processes say, and a ThreadSanitizer sees only one. */
#ifdef __SANITIZE_THREAD__
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
static void copy_as_nic(void* to, const void* from, size_t bytes) {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  memcpy(to, from, bytes);
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}
#else
static void copy_as_nic(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
#endif

static bool unpack(struct process* self, struct parcel* parcel) {
  /* What it may do the sender has checked; this is for what was deregistered since. */
  struct region* region = memory_acquire(self->file, parcel->key, parcel->address, parcel->length, 0, parcel->pd);
  if (!region) return false;
  if (parcel->is_read) copy_as_nic(parcel->bytes, (const void*)parcel->address, parcel->length);
  else copy_as_nic((void*)parcel->address, parcel->bytes, parcel->length);
  memory_release(region);
  return true;
}

void parcels_unpack(struct process* self) {
  for (int i = 0; i < PARCELS; i++) {
    struct parcel* parcel = &self->file->parcel[i];
    uint32_t state = atomic_load_explicit(&parcel->state, memory_order_acquire);
    if (state == PARCEL_ABANDONED) atomic_store(&parcel->state, PARCEL_FREE);
    if (state != PARCEL_SENT) continue;
    uint32_t done = unpack(self, parcel) ? PARCEL_DONE : PARCEL_FAILED;
    /* Abandoned meanwhile: then nobody looks at it any more. */
    if (!atomic_compare_exchange_strong(&parcel->state, &state, done)) atomic_store(&parcel->state, PARCEL_FREE);
  }
}
