#include "request.h"
#include "clock.h"
#include "faults.h"
#include "log.h"
#include "memory.h"
#include "address.h"
#include "mover.h"
#include "parcels.h"
#include "qp.h"
#include "settings.h"
#include <string.h>

enum { BUSY_NS = 20000, SILENT_NS = 200000, RNR_DOUBLINGS = 4 };

/* What a stage makes of a request: it waits for again_ns, or goes on to its next stage. */
enum step { WAIT, ON };

static enum step fail(struct request* request, enum efa_status status) {
  request->status = status;
  request->stage = STAGE_FINISH;
  return ON;
}

static enum step wait_until(struct request* request, uint64_t when) {
  request->again_ns = when;
  return WAIT;
}

static uint32_t pd_of(struct qp* qp) { return qp->ex.qp_base.pd->handle; }

/* ---- going out ---- */

static bool own_memory(struct qp* qp, const struct request* request, struct region** regions) {
  unsigned access = request->op == OP_READ ? IBV_ACCESS_LOCAL_WRITE : 0;
  for (uint32_t i = 0; i < request->sges; i++) {
    const struct ibv_sge* sge = &request->sge[i];
    regions[i] = NULL;
    if (request->is_inline || !sge->length) continue;
    regions[i] = memory_acquire(qp->self->file, sge->lkey, sge->addr, sge->length, access, pd_of(qp));
    if (regions[i]) continue;
    while (i--)
      if (regions[i]) memory_release(regions[i]);
    return false;
  }
  return true;
}

static void release(const struct request* request, struct region** regions) {
  for (uint32_t i = 0; i < request->sges; i++)
    if (regions[i]) memory_release(regions[i]);
}

static enum efa_status check_own(struct qp* qp, struct request* request) {
  struct region* regions[SEND_SGES];
  if (request->op == OP_SEND && request->bytes > settings()->mtu) return EFA_BAD_LENGTH;
  if (!address_is(qp->self->file, request->address, request->gid, (uint32_t)qp->nic->index)) return EFA_INVALID_AH;
  if (!own_memory(qp, request, regions)) return EFA_INVALID_LKEY;
  release(request, regions);
  return EFA_OK;
}

/* When its last byte arrives: it leaves by one wire and comes in by another, which other processes use too. */
static uint64_t arrival(struct qp* qp, const struct request* request, uint64_t now) {
  const struct settings* set = settings();
  uint64_t end = now;
  if (set->gbit > 0) {
    struct control_nic *here = qp->nic->control, *there = control_find(request->gid);
    bool reads = request->op == OP_READ;
    struct control_nic *from = reads ? there : here, *to = reads ? here : there;
    if (from) end = control_reserve(&from->egress_ns, now, request->bytes, set->gbit);
    if (to) end = later(end, control_reserve(&to->ingress_ns, now, request->bytes, set->gbit));
  }
  return end + set->latency_ns;
}

static enum step start(struct qp* qp, struct request* request, uint64_t now) {
  struct struck struck = fault_on_start(qp->nic->index);
  if (struck.port_down) atomic_store(&qp->nic->control->port_down, 1);
  if (struck.silent) atomic_store(&qp->self->file->silent, 1);
  enum efa_status status = struck.status;
  if (!status) status = check_own(qp, request);
  if (status) return fail(request, status);
  request->stage = STAGE_MOVE;
  uint64_t arrives = arrival(qp, request, now);
  return arrives > now ? wait_until(request, arrives) : ON;
}

/* ---- at the target ---- */

static bool is_silent(struct qp* qp) {
  return atomic_load(&qp->nic->control->port_down) || atomic_load(&qp->nic->control->silent) ||
         atomic_load(&qp->self->file->silent);
}

static enum step unanswered(struct request* request, const struct peer* peer, uint64_t now) {
  if (!request->silent_since) request->silent_since = now;
  if (now - request->silent_since < settings()->unresponsive_ns) return wait_until(request, now + SILENT_NS);
  return fail(request, peer && peer->answered ? EFA_UNRESPONSIVE_REMOTE : EFA_UNREACHABLE_REMOTE);
}

/* Gets to the target, or says what becomes of the request. */
static bool reach(struct qp* qp, struct request* request, uint64_t now, struct peer** found, enum step* otherwise) {
  struct peer* peer = *found = peers_find(&qp->peers, request->gid, request->qpn);
  enum reach reached = peer && !is_silent(qp) ? peer_reach(peer, request->qkey, now) : NO_ANSWER;
  if (reached == REACHED) request->silent_since = 0;
  else if (reached == NO_SUCH_QP) *otherwise = fail(request, EFA_REMOTE_BAD_DEST_QPN);
  else *otherwise = unanswered(request, peer, now);
  return reached == REACHED;
}

static enum step not_ready(struct qp* qp, struct request* request, uint64_t now) {
  count(qp->nic->counts, COUNT_RNR_TRIES, 1);
  if (qp->rnr_retry < RNR_FOREVER && request->rnr_tries >= qp->rnr_retry) return fail(request, EFA_REMOTE_RNR);
  uint32_t doublings = request->rnr_tries < RNR_DOUBLINGS ? request->rnr_tries : RNR_DOUBLINGS;
  request->rnr_tries++;
  return wait_until(request, now + (settings()->rnr_ns << doublings));
}

/* The oldest posted receive, and then taking it: lock-free, so that nobody who is stopped here holds up the others. */
static bool peek_receive(struct qp_file* target, uint32_t* head, struct receive* receive) {
  *head = atomic_load(&target->head);
  if (*head == atomic_load_explicit(&target->tail, memory_order_acquire)) return false;
  /* Perhaps half of a later one: then someone took it, and it cannot be taken once more. */
  *receive = target->ring[*head & (target->slots - 1)];
  return true;
}

static bool take_receive(struct qp_file* target, uint32_t head) {
  return atomic_compare_exchange_strong(&target->head, &head, head + 1);
}

/* What the target's posted buffer allows. A message that it does not take leaves it posted. */
static enum efa_status check_receive(const struct request* request, struct peer* peer, struct region** region) {
  const struct receive* receive = &request->receive;
  if (request->bytes > receive->bytes) return EFA_REMOTE_BAD_LENGTH;
  *region = NULL;
  if (!request->bytes) return EFA_OK;
  const struct ibv_sge* sge = &receive->sge[0];
  *region = memory_acquire(peer->to.process, sge->lkey, sge->addr, request->bytes, IBV_ACCESS_LOCAL_WRITE, peer->to.qp->pd);
  return *region ? EFA_OK : EFA_REMOTE_BAD_STATUS;
}

static enum step after_move(struct request* request, enum moved moved, enum efa_status fault, uint64_t now) {
  if (moved == MOVE_AGAIN) return wait_until(request, now + BUSY_NS);
  if (moved == MOVE_FAULT) return fail(request, fault);
  request->stage = STAGE_DELIVER;
  return ON;
}

static enum step move_message(struct qp* qp, struct request* request, struct peer* peer, uint64_t now) {
  struct region* region;
  for (;;) {
    uint32_t head = 0;
    if (!request->has_receive && (fault_rnr(qp->nic->index) || !peek_receive(peer->to.qp, &head, &request->receive)))
      return not_ready(qp, request, now);
    enum efa_status status = check_receive(request, peer, &region);
    if (status) return fail(request, status);
    if (request->has_receive || take_receive(peer->to.qp, head)) break;
    if (region) memory_release(region);
  }
  request->has_receive = true;
  enum moved moved = mover_move(request, peer, request->receive.sge[0].addr, request->receive.sge[0].lkey, request->bytes);
  if (region) memory_release(region);
  return after_move(request, moved, EFA_REMOTE_BAD_STATUS, now);
}

static enum step move_memory(struct qp* qp, struct request* request, struct peer* peer, uint64_t now) {
  unsigned access = request->op == OP_READ ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
  peer->guess = address_find(peer->to.process, qp->nic->gid, peer->to.qp->nic, peer->guess);
  if (peer->guess == NO_ADDRESS) return fail(request, EFA_REMOTE_UNKNOWN_PEER);
  struct region* region =
      memory_acquire(peer->to.process, request->rkey, request->remote_address, request->bytes, access, peer->to.qp->pd);
  if (!region) return fail(request, EFA_REMOTE_BAD_ADDRESS);
  enum moved moved = mover_move(request, peer, request->remote_address, request->rkey, request->bytes);
  memory_release(region);
  return after_move(request, moved, EFA_REMOTE_BAD_ADDRESS, now);
}

static enum step move(struct qp* qp, struct request* request, uint64_t now) {
  struct peer* peer;
  struct region* own[SEND_SGES];
  enum step step;
  if (!reach(qp, request, now, &peer, &step)) return step;
  if (!own_memory(qp, request, own)) return fail(request, EFA_INVALID_LKEY);
  step = request->op == OP_SEND ? move_message(qp, request, peer, now) : move_memory(qp, request, peer, now);
  release(request, own);
  return step;
}

static struct completion arrived(struct qp* qp, const struct request* request, struct peer* peer, bool uses_receive) {
  struct completion done = {
      .wr_id = uses_receive ? request->receive.wr_id : 0,
      .qp = peer->to.qp->id,
      .opcode = request->op == OP_SEND ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM,
      .bytes = request->bytes,
      .immediate = request->immediate,
      .qpn = peer->qpn,
      .source_qpn = qp->ex.qp_base.qp_num,
      .has_immediate = request->has_immediate,
      .unsolicited = !uses_receive,
  };
  peer->guess = address_find(peer->to.process, qp->nic->gid, peer->to.qp->nic, peer->guess);
  done.address = peer->guess;
  memcpy(done.gid, qp->nic->gid, 16);
  return done;
}

static enum step deliver(struct qp* qp, struct request* request, uint64_t now) {
  struct peer* peer;
  enum step step;
  if (request->op == OP_SEND || request->has_immediate) {
    if (!reach(qp, request, now, &peer, &step)) return step;
    bool uses_receive = request->op == OP_SEND || !peer->to.qp->unsolicited;
    while (uses_receive && !request->has_receive) {
      uint32_t head;
      if (fault_rnr(qp->nic->index) || !peek_receive(peer->to.qp, &head, &request->receive)) return not_ready(qp, request, now);
      request->has_receive = take_receive(peer->to.qp, head);
    }
    struct completion done = arrived(qp, request, peer, uses_receive);
    enum pushed pushed = cq_push(peer->to.cq, &done, fault_overrun(qp->nic->index));
    if (pushed == PUSH_BUSY) return wait_until(request, now + BUSY_NS);
    if (pushed == PUSH_LOST) {
      count(qp->nic->counts, COUNT_CQ_OVERRUNS, 1);
      note(1, "the completion queue of queue pair %u is full: a completion is lost", request->qpn);
    }
  }
  request->stage = STAGE_FINISH;
  return settings()->latency_ns ? wait_until(request, now + settings()->latency_ns) : ON;
}

/* ---- back at the sender ---- */

static void count_done(struct qp* qp, const struct request* request) {
  struct counts* counts = qp->nic->counts;
  if (request->status) {
    count(counts, (enum counter)(COUNT_ERROR + request->status), 1);
    return;
  }
  if (request->op == OP_SEND) count(counts, COUNT_SENDS, 1);
  else if (request->op == OP_READ) count(counts, COUNT_READS, 1);
  else count(counts, request->has_immediate ? COUNT_WRITES_WITH_IMMEDIATE : COUNT_WRITES, 1);
  count(counts, COUNT_BYTES, request->bytes);
  if (request->index < qp->last_done) count(counts, COUNT_OUT_OF_ORDER, 1);
  else qp->last_done = request->index;
}

/* False: the queue is busy. */
static bool finish(struct qp* qp, struct request* request) {
  static const enum ibv_wc_opcode OPCODES[] = {[OP_SEND] = IBV_WC_SEND, [OP_WRITE] = IBV_WC_RDMA_WRITE, [OP_READ] = IBV_WC_SEND};
  struct completion done = {
      .wr_id = request->wr_id,
      .qp = qp->id,
      .opcode = OPCODES[request->op], /* libefa calls a read's completion that of a send */
      .vendor_status = request->status,
      .qpn = qp->ex.qp_base.qp_num,
      .is_send = true,
  };
  enum pushed pushed = cq_push(qp->send_cq->file, &done, false);
  if (pushed == PUSH_BUSY) return false;
  parcels_forget(request);
  if (pushed == PUSH_LOST) count(qp->nic->counts, COUNT_CQ_OVERRUNS, 1);
  count_done(qp, request);
  if (request->status) {
    note(1, "queue pair %u: work request %#llx to queue pair %u ends with vendor code %d", qp->ex.qp_base.qp_num,
         (unsigned long long)request->wr_id, request->qpn, request->status);
  }
  return true;
}

bool request_advance(struct qp* qp, struct request* request, uint64_t now) {
  enum step step = ON;
  while (step == ON) {
    switch (request->stage) {
      case STAGE_START: step = start(qp, request, now); break;
      case STAGE_MOVE: step = move(qp, request, now); break;
      case STAGE_DELIVER: step = deliver(qp, request, now); break;
      case STAGE_FINISH:
        if (finish(qp, request)) return true;
        step = wait_until(request, now + BUSY_NS);
    }
  }
  return false;
}

bool request_flush(struct qp* qp, struct request* request) {
  request->status = EFA_FLUSHED;
  return finish(qp, request);
}
