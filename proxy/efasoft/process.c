#include "process.h"
#include "engine.h"
#include "log.h"
#include "memory.h"
#include "address.h"
#include "nics.h"
#include "settings.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <unistd.h>

static struct process self;
static _Atomic(struct process*) ready;
static _Atomic uint64_t generation = 1, last_id;
static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
static uint64_t nonce; /* others read it where the file says that it lies */
static int held = -1;
static pid_t owner_pid;

uint64_t process_generation(void) { return atomic_load_explicit(&generation, memory_order_relaxed); }
uint64_t process_next_id(void) { return atomic_fetch_add(&last_id, 1) + 1; }

void process_file_name(const char* owner, char* name) { snprintf(name, FILE_NAME, "process-%.*s", OWNER, owner); }
void cq_file_name(const char* owner, uint64_t id, char* name) {
  snprintf(name, FILE_NAME, "cq-%.*s-%llu", OWNER, owner, (unsigned long long)id);
}
void qp_file_name(const uint8_t* gid, uint32_t qpn, char* name) {
  int at = snprintf(name, FILE_NAME, "qp-");
  for (int i = 0; i < 16; i++) at += snprintf(name + at, FILE_NAME - (size_t)at, "%02x", gid[i]);
  snprintf(name + at, FILE_NAME - (size_t)at, "-%u", qpn);
}

/* ---- removing what a process leaves ---- */

static const char* whose; /* under files_lock */

static void unlink_if_its(const char* name) {
  char prefix[FILE_NAME];
  snprintf(prefix, sizeof prefix, "cq-%s-", whose);
  if (!strncmp(name, prefix, strlen(prefix))) file_unlink(name);
  if (strncmp(name, "qp-", 3)) return;
  size_t size;
  struct qp_file* qp = file_map(name, &size);
  if (qp && !strncmp(qp->owner, whose, OWNER)) file_unlink(name);
  file_unmap(qp, size);
}

static void unlink_all_of(const char* owner) {
  whose = owner;
  files_each(unlink_if_its);
  char name[FILE_NAME];
  process_file_name(owner, name);
  file_unlink(name);
}

bool process_is_dead(const char* owner) {
  char name[FILE_NAME];
  process_file_name(owner, name);
  int fd = file_open(name);
  bool held = fd >= 0 && file_is_held(fd);
  if (fd >= 0) close(fd);
  return !held;
}

static void sweep_if_dead(const char* name) {
  if (strncmp(name, "process-", 8) || !process_is_dead(name + 8)) return;
  note(1, "takes over what %s left", name);
  unlink_all_of(name + 8);
}

static void at_exit(void) {
  /* Not in a child that was forked, whose exit runs the same handlers. */
  if (!atomic_load(&ready) || getpid() != owner_pid) return;
  int lock = files_lock();
  unlink_all_of(self.owner);
  files_unlock(lock);
}

/* ---- starting, and starting again after a fork ---- */

/* In the child of a fork: nothing is ours, and whatever lock another thread of the parent held, nobody opens any more. */
static void in_child(void) {
  pthread_mutex_init(&starting, NULL);
  atomic_fetch_add(&generation, 1);
  atomic_store(&ready, NULL);
  if (held >= 0) close(held); /* the parent's description: as long as it is open, the parent would seem to live */
  held = -1;
  engine_after_fork();
  memory_after_fork();
  addresses_after_fork();
}

static bool make_file(void) {
  if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) return false;
  snprintf(self.owner, sizeof self.owner, "%d-%016llx", getpid(), (unsigned long long)nonce);
  char name[FILE_NAME];
  process_file_name(self.owner, name);
  self.file = file_create(name, sizeof *self.file);
  if (!self.file) return false;
  self.file->pid = (uint32_t)getpid();
  self.file->nonce = nonce;
  self.file->nonce_at = (uintptr_t)&nonce;
  held = file_open(name);
  return held >= 0 && file_hold(held);
}

static void make_counters(void) {
  char name[FILE_NAME];
  snprintf(name, sizeof name, "counters-%s", self.owner);
  int n;
  struct nic* all = nics(&n);
  self.counts = counters_open(name, n);
  for (int i = 0; i < n; i++) {
    counters_name(self.counts, i, all[i].device.name, all[i].gid);
    all[i].counts = counters_at(self.counts, i);
  }
}

static bool start(void) {
  static bool registered;
  int lock = files_lock();
  if (lock >= 0) files_each(sweep_if_dead);
  bool made = lock >= 0 && make_file();
  int error = errno;
  if (made) make_counters();
  files_unlock(lock);
  if (!made) {
    say("EFA_SOFT_DIR=%s cannot be used: %s", settings()->folder, strerror(error));
    return false;
  }
  self.generation = process_generation();
  owner_pid = getpid();
  /* Where Yama lets only parents look into a process, everybody may look into this one. */
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  if (!registered) {
    registered = true;
    atexit(at_exit);
    pthread_atfork(NULL, NULL, in_child);
  }
  return true;
}

struct process* process_self(void) {
  struct process* process = atomic_load_explicit(&ready, memory_order_acquire);
  if (process || !settings()->usable) return process;
  pthread_mutex_lock(&starting);
  if (!atomic_load(&ready) && start()) atomic_store_explicit(&ready, &self, memory_order_release);
  pthread_mutex_unlock(&starting);
  return atomic_load(&ready);
}
