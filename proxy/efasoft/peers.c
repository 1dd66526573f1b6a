#include "peers.h"
#include "clock.h"
#include "control.h"
#include "log.h"
#include "mover.h"
#include "process.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LOOK_AGAIN_NS = 1000000 };

struct peer* peers_find(struct peers* peers, const uint8_t* gid, uint32_t qpn) {
  uint32_t hash = qpn * 31 + gid[15] * 7 + gid[14] + gid[13];
  struct peer** bucket = &peers->bucket[hash % PEER_BUCKETS];
  for (struct peer* peer = *bucket; peer; peer = peer->next)
    if (peer->qpn == qpn && !memcmp(peer->gid, gid, 16)) return peer;
  struct peer* peer = calloc(1, sizeof *peer);
  if (!peer) return NULL;
  memcpy(peer->gid, gid, 16);
  peer->qpn = qpn;
  peer->next = *bucket;
  return *bucket = peer;
}

static void detach(struct attachment* to) {
  if (!to->qp) return;
  file_unmap(to->qp, to->qp_size);
  file_unmap(to->cq, to->cq_size);
  file_unmap(to->process, to->process_size);
  if (to->process_fd >= 0) close(to->process_fd);
  *to = (struct attachment){0};
}

enum attached { ATTACHED, DEAD, MISSING };

static enum attached attach(const struct peer* peer, struct attachment* to) {
  char name[FILE_NAME];
  qp_file_name(peer->gid, peer->qpn, name);
  *to = (struct attachment){.process_fd = -1};
  to->qp = file_map(name, &to->qp_size);
  if (!to->qp) return MISSING;
  bool live = atomic_load(&to->qp->life) == QP_LIVE;
  process_file_name(to->qp->owner, name);
  to->process_fd = file_open(name);
  bool dead = to->process_fd < 0 || !file_is_held(to->process_fd);
  if (live && !dead) {
    to->cq = file_map(to->qp->cq, &to->cq_size);
    to->process = file_map(name, &to->process_size);
  }
  if (!to->cq || !to->process) {
    detach(to);
    return live && dead ? DEAD : MISSING;
  }
  to->by_vm = mover_can_vm(to->process);
  return ATTACHED;
}

static bool is_alive(struct peer* peer, uint64_t now) {
  if (now < peer->alive_until) return true;
  if (!file_is_held(peer->to.process_fd)) return false;
  peer->alive_until = now + LOOK_AGAIN_NS;
  return true;
}

/* Its NIC or its process answers nobody. */
static bool is_silent(struct peer* peer) {
  return atomic_load(&peer->control->port_down) || atomic_load(&peer->control->silent) || atomic_load(&peer->to.process->silent);
}

static enum reach absent(struct peer* peer) {
  /* Some process has opened that NIC, so it would answer that there is no such queue pair. */
  if (!peer->control) peer->control = control_find(peer->gid);
  if (!peer->control || atomic_load(&peer->control->port_down) || atomic_load(&peer->control->silent)) return NO_ANSWER;
  return NO_SUCH_QP;
}

/* Whoever was there has gone: perhaps another has come in its place. */
static enum attached attach_next(struct peer* peer) {
  struct attachment next;
  enum attached attached = attach(peer, &next);
  if (attached != ATTACHED) return attached;
  detach(&peer->to);
  peer->to = next;
  peer->attached++;
  peer->alive_until = 0;
  peer->answered = false;
  return ATTACHED;
}

/* False: nobody is there, and `reach` says what is heard of it. */
static bool find_out(struct peer* peer, uint64_t now, enum reach* reach) {
  bool known = peer->to.qp, closed = known && atomic_load(&peer->to.qp->life) != QP_LIVE;
  if (known && !closed && is_alive(peer, now)) return true;
  enum attached next = attach_next(peer);
  /* The dead stay dead, whoever else opens their NIC; what was closed in order has a NIC that says so. */
  bool died = next == DEAD || (known && !closed);
  if (next != ATTACHED) *reach = died ? NO_ANSWER : absent(peer);
  return next == ATTACHED;
}

enum reach peer_reach(struct peer* peer, uint32_t qkey, uint64_t now) {
  enum reach reach;
  if (!find_out(peer, now, &reach)) return reach;
  if (!peer->control && !(peer->control = control_find(peer->gid))) return NO_ANSWER;
  /* A wrong queue key is dropped without an answer, as InfiniBand has it for datagrams. */
  if (is_silent(peer) || atomic_load(&peer->to.qp->qkey) != qkey) return NO_ANSWER;
  peer->answered = true;
  return REACHED;
}

void peers_close(struct peers* peers) {
  for (int i = 0; i < PEER_BUCKETS; i++) {
    while (peers->bucket[i]) {
      struct peer* peer = peers->bucket[i];
      peers->bucket[i] = peer->next;
      detach(&peer->to);
      free(peer);
    }
  }
}
