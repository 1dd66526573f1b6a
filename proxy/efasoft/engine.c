#include "engine.h"
#include "clock.h"
#include "log.h"
#include "parcels.h"
#include "process.h"
#include "qp.h"
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* What waits only so that later posts may overtake it goes out after this, if nobody polls. */
enum { HOLD_NS = 200000 };

static pthread_mutex_t listing = PTHREAD_MUTEX_INITIALIZER;
static struct qp* all;                        /* under `listing` */
static bool has_thread;                       /* under `listing` */
static _Atomic uint64_t thread_due = NEVER;   /* when the thread looks next, unless it is woken */

/* ---- one queue pair ---- */

/* Under its lock. Those whose turn may still be overtaken stay, unless `all_turns`. */
static void run(struct qp* qp, bool all_turns, uint64_t now) {
  uint64_t horizon = all_turns ? NEVER : order_horizon(&qp->order), due = NEVER;
  uint32_t waits = atomic_load_explicit(&qp->waits, memory_order_relaxed), kept = 0;
  bool held = false;
  for (uint32_t i = 0; i < waits; i++) {
    struct request* request = qp->waiting[i];
    bool overtakable = request->stage == STAGE_START && request->turn >= horizon;
    if (!overtakable && request->again_ns <= now && request_advance(qp, request, now)) {
      qp->free_list[qp->depth - waits + i - kept] = request;
      continue;
    }
    held |= overtakable;
    due = earlier(due, overtakable ? now + HOLD_NS : request->again_ns);
    qp->waiting[kept++] = request;
  }
  atomic_store_explicit(&qp->waits, kept, memory_order_relaxed);
  atomic_store_explicit(&qp->held, held, memory_order_relaxed);
  atomic_store_explicit(&qp->due, due, memory_order_relaxed);
}

void engine_poll(struct qp* qp) {
  if (!atomic_load_explicit(&qp->waits, memory_order_relaxed)) return;
  uint64_t now = now_ns();
  if (!atomic_load_explicit(&qp->held, memory_order_relaxed) && now < atomic_load_explicit(&qp->due, memory_order_relaxed)) return;
  if (pthread_mutex_trylock(&qp->lock)) return; /* someone is moving it */
  run(qp, true, now);
  pthread_mutex_unlock(&qp->lock);
}

/* ---- the thread ---- */

static void futex_wait(_Atomic uint32_t* word, uint32_t seen, uint64_t ns) {
  struct timespec timeout = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, ns == NEVER ? NULL : &timeout, NULL, 0);
}

void engine_ring(struct process_file* process) {
  atomic_fetch_add(&process->bell, 1);
  if (atomic_load(&process->asleep)) syscall(SYS_futex, &process->bell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

void engine_post(struct qp* qp) {
  run(qp, false, now_ns());
  uint64_t due = atomic_load_explicit(&qp->due, memory_order_relaxed);
  if (due < atomic_load(&thread_due)) engine_ring(qp->self->file);
}

static uint64_t run_all(uint64_t now) {
  uint64_t due = NEVER;
  pthread_mutex_lock(&listing);
  for (struct qp* qp = all; qp; qp = qp->next) {
    if (!atomic_load_explicit(&qp->waits, memory_order_relaxed)) continue;
    pthread_mutex_lock(&qp->lock);
    if (atomic_load_explicit(&qp->due, memory_order_relaxed) <= now) run(qp, true, now);
    due = earlier(due, atomic_load_explicit(&qp->due, memory_order_relaxed));
    pthread_mutex_unlock(&qp->lock);
  }
  pthread_mutex_unlock(&listing);
  return due;
}

static void* serve(void* argument) {
  struct process* self = argument;
  struct process_file* file = self->file;
  for (;;) {
    uint32_t seen = atomic_load(&file->bell);
    parcels_unpack(self);
    uint64_t due = run_all(now_ns()), now = now_ns();
    if (due <= now) continue;
    atomic_store(&thread_due, due);
    atomic_store(&file->asleep, 1);
    futex_wait(&file->bell, seen, due == NEVER ? NEVER : due - now);
    atomic_store(&file->asleep, 0);
    atomic_store(&thread_due, NEVER);
  }
  return NULL;
}

/* Under `listing`. */
static void start_thread(struct process* self) {
  if (has_thread) return;
  pthread_t thread;
  sigset_t none, before;
  sigfillset(&none); /* signals are for the threads of the program */
  pthread_sigmask(SIG_SETMASK, &none, &before);
  int error = pthread_create(&thread, NULL, serve, self);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error) {
    say("no thread for the device (%s): work requests move only while the program polls", strerror(error));
    return;
  }
  pthread_setname_np(thread, "efa-soft");
  pthread_detach(thread);
  has_thread = true;
}

void engine_add(struct qp* qp) {
  pthread_mutex_lock(&listing);
  start_thread(qp->self);
  qp->next = all;
  all = qp;
  pthread_mutex_unlock(&listing);
}

void engine_remove(struct qp* qp) {
  pthread_mutex_lock(&listing);
  for (struct qp** at = &all; *at; at = &(*at)->next) {
    if (*at != qp) continue;
    *at = qp->next;
    break;
  }
  pthread_mutex_unlock(&listing);
}

void engine_after_fork(void) {
  pthread_mutex_init(&listing, NULL);
  all = NULL;
  has_thread = false;
  atomic_store(&thread_due, NEVER);
}
