#include "mover.h"
#include "log.h"
#include "order.h"
#include "parcels.h"
#include "process.h"
#include "settings.h"
#include <errno.h>
#include <string.h>
#include <sys/uio.h>

enum { PIECES = 128 }; /* in one system call; it takes 1024 vectors, and a piece may begin in one buffer and end in the next */

bool mover_can_vm(const struct process_file* process) {
  if (settings()->mover != MOVER_AUTO) return settings()->mover == MOVER_VM;
  uint64_t seen = 0;
  struct iovec here = {&seen, sizeof seen}, there = {(void*)process->nonce_at, sizeof seen};
  ssize_t read = process_vm_readv((pid_t)process->pid, &here, 1, &there, 1, 0);
  if (read == sizeof seen && seen == process->nonce) return true;
  /* Another number: the pid is one of another namespace, and means somebody else here. */
  const char* why = read == sizeof seen ? "its pid is of another namespace" : strerror(errno);
  static _Atomic bool said;
  if (!atomic_exchange(&said, true)) {
    say("process %u cannot be written to directly (%s), so bytes go through shared memory; a stopped process then takes nothing",
        process->pid, why);
  }
  return false;
}

int mover_local(const struct request* request, uint64_t offset, uint64_t bytes, struct iovec* to) {
  int n = 0;
  for (uint32_t i = 0; i < request->sges && bytes; i++) {
    uint64_t length = request->sge[i].length;
    if (offset >= length) {
      offset -= length;
      continue;
    }
    uint64_t part = length - offset < bytes ? length - offset : bytes;
    to[n++] = (struct iovec){(char*)request->sge[i].addr + offset, part};
    offset = 0;
    bytes -= part;
  }
  return n;
}

static enum moved by_vm(struct request* request, const struct process_file* process, uint64_t address, uint64_t bytes) {
  uint64_t mtu = settings()->mtu;
  struct shuffle order = shuffle((bytes + mtu - 1) / mtu, request->draw);
  for (uint64_t piece = 0; piece < order.n;) {
    struct iovec here[2 * PIECES], there[PIECES];
    int locals = 0, remotes = 0;
    ssize_t length = 0;
    for (; remotes < PIECES && piece < order.n; piece++) {
      uint64_t offset = shuffled(&order, piece) * mtu, part = bytes - offset < mtu ? bytes - offset : mtu;
      locals += mover_local(request, offset, part, here + locals);
      there[remotes++] = (struct iovec){(void*)(address + offset), part};
      length += (ssize_t)part;
    }
    pid_t pid = (pid_t)process->pid;
    ssize_t done = request->op == OP_READ ? process_vm_readv(pid, here, (unsigned long)locals, there, (unsigned long)remotes, 0)
                                          : process_vm_writev(pid, here, (unsigned long)locals, there, (unsigned long)remotes, 0);
    if (done < 0 && errno == ESRCH) return MOVE_AGAIN; /* it has just died, which the next look will see */
    if (done != length) {
      note(1, "%zd of %zd bytes moved at %#llx of process %d: %s", done, length, (unsigned long long)address, pid, strerror(errno));
      return MOVE_FAULT;
    }
  }
  return MOVED;
}

enum moved mover_move(struct request* request, struct peer* peer, uint64_t address, uint32_t key, uint64_t bytes) {
  if (!bytes) return MOVED;
  if (peer->to.by_vm) return by_vm(request, peer->to.process, address, bytes);
  return parcels_move(request, peer, address, key, bytes);
}
