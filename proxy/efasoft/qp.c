#include "qp.h"
#include "clock.h"
#include "engine.h"
#include "log.h"
#include "parcels.h"
#include "settings.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- its number and its file ---- */

/* Removes the file of a number whose process was killed. */
static bool take_over(const char* name) {
  size_t size;
  struct qp_file* left = file_map(name, &size);
  bool dead = left && process_is_dead(left->owner);
  file_unmap(left, size);
  if (dead) file_unlink(name);
  return dead;
}

static struct qp_file* file_of(struct qp* qp, uint32_t number) {
  qp_file_name(qp->nic->gid, number, qp->name);
  struct qp_file* file = file_create(qp->name, qp->file_size);
  if (!file && errno == EEXIST && take_over(qp->name)) file = file_create(qp->name, qp->file_size);
  return file;
}

/* The lowest free number: numbers of the dead are used again at once, which is hardest for those who still send to them. */
static uint32_t claim_number(struct qp* qp) {
  uint32_t slots = 1;
  while (slots < qp->receive_depth) slots *= 2;
  qp->file_size = sizeof *qp->file + slots * sizeof *qp->file->ring;
  int lock = files_lock();
  uint32_t number = 1;
  while (number < QPS && !(qp->file = file_of(qp, number)) && errno == EEXIST) number++;
  if (qp->file) {
    memcpy(qp->file->owner, qp->self->owner, OWNER);
    qp->file->slots = slots;
  }
  files_unlock(lock);
  return qp->file ? number : 0;
}

/* ---- creating ---- */

static int check(const struct ibv_qp_init_attr_ex* attributes, bool unsolicited) {
  const struct settings* set = settings();
  uint64_t operations = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
  if (set->rdma_read) operations |= IBV_QP_EX_WITH_RDMA_READ;
  if (set->rdma_write) operations |= IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  uint32_t known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  /* Datagram queue pairs (IBV_QPT_UD) exist on EFA, and are not modelled. */
  if (attributes->qp_type != IBV_QPT_DRIVER || (attributes->comp_mask & ~known)) return EOPNOTSUPP;
  if (unsolicited && !set->unsolicited) return EOPNOTSUPP;
  if ((attributes->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) && (attributes->send_ops_flags & ~operations)) return EOPNOTSUPP;
  if (!(attributes->comp_mask & IBV_QP_INIT_ATTR_PD) || !attributes->pd) return EINVAL;
  if (!attributes->send_cq || !attributes->recv_cq || attributes->srq) return EINVAL;
  const struct ibv_qp_cap* cap = &attributes->cap;
  if (cap->max_send_wr > set->sq_depth || cap->max_recv_wr > set->rq_depth) return EINVAL;
  if (cap->max_send_sge > SEND_SGES || cap->max_recv_sge > RECEIVE_SGES || cap->max_inline_data > INLINE_BYTES) return EINVAL;
  return 0;
}

static bool make_queues(struct qp* qp) {
  qp->requests = calloc(qp->depth, sizeof *qp->requests);
  qp->free_list = calloc(qp->depth, sizeof(struct request*));
  qp->waiting = calloc(qp->depth, sizeof(struct request*));
  if (!qp->requests || !qp->free_list || !qp->waiting) return false;
  for (uint32_t i = 0; i < qp->depth; i++) qp->free_list[i] = &qp->requests[i];
  return true;
}

static void free_qp(struct qp* qp) {
  file_unmap(qp->file, qp->file_size);
  free(qp->requests);
  free(qp->free_list);
  free(qp->waiting);
  free(qp->staged);
  free(qp);
}

static void fill(struct qp* qp, const struct ibv_qp_init_attr_ex* attributes, struct ibv_context* context, uint32_t number) {
  struct ibv_qp* base = &qp->ex.qp_base;
  base->context = context;
  base->qp_context = attributes->qp_context;
  base->pd = attributes->pd;
  base->send_cq = attributes->send_cq;
  base->recv_cq = attributes->recv_cq;
  base->qp_num = base->handle = number;
  base->state = IBV_QPS_RESET;
  base->qp_type = attributes->qp_type;
  pthread_mutex_init(&base->mutex, NULL);
  pthread_cond_init(&base->cond, NULL);
  post_fill(qp, attributes->send_ops_flags);
}

static void fill_file(struct qp* qp, bool unsolicited) {
  struct qp_file* file = qp->file;
  memcpy(file->cq, qp->recv_cq->name, FILE_NAME);
  memcpy(file->gid, qp->nic->gid, 16);
  file->nic = (uint32_t)qp->nic->index;
  file->pd = qp->ex.qp_base.pd->handle;
  file->unsolicited = unsolicited;
  file->id = qp->id;
}

struct qp* qp_create(struct ibv_context* context, struct ibv_qp_init_attr_ex* attributes, bool unsolicited) {
  struct process* self = process_self();
  int error = self ? check(attributes, unsolicited) : ENODEV;
  struct qp* qp = error ? NULL : calloc(1, sizeof *qp);
  if (!qp) {
    errno = error ? error : ENOMEM;
    return NULL;
  }
  qp->self = self;
  qp->nic = nic_of(context);
  qp->generation = self->generation;
  qp->id = process_next_id();
  qp->send_cq = (struct cq*)attributes->send_cq;
  qp->recv_cq = (struct cq*)attributes->recv_cq;
  qp->depth = attributes->cap.max_send_wr ? attributes->cap.max_send_wr : 1;
  qp->receive_depth = attributes->cap.max_recv_wr ? attributes->cap.max_recv_wr : 1;
  qp->max_inline = INLINE_BYTES;
  qp->signal_all = attributes->sq_sig_all;
  qp->rnr_retry = RNR_FOREVER;
  atomic_store(&qp->due, NEVER);
  uint32_t number = make_queues(qp) ? claim_number(qp) : 0;
  if (!number) {
    free_qp(qp);
    errno = ENOMEM;
    return NULL;
  }
  sem_init(&qp->posting, 0, 1);
  pthread_mutex_init(&qp->receiving, NULL);
  pthread_mutex_init(&qp->lock, NULL);
  order_start(&qp->order, settings()->seed, qp->nic->gid, number);
  fill(qp, attributes, context, number);
  fill_file(qp, unsolicited);
  attributes->cap.max_inline_data = qp->max_inline;
  cq_attach(qp->send_cq, qp);
  if (qp->recv_cq != qp->send_cq) cq_attach(qp->recv_cq, qp);
  engine_add(qp);
  note(1, "queue pair %u on %s%s", number, qp->nic->device.name, unsolicited ? ", takes unsolicited writes" : "");
  return qp;
}

/* ---- states ---- */

/* All that is posted ends as flushed. Those for which the completion queue is busy stay, and the engine finds the queue pair
   broken. */
static void flush_sends(struct qp* qp) {
  pthread_mutex_lock(&qp->lock);
  uint32_t waits = atomic_load(&qp->waits);
  for (uint32_t i = 0; i < waits; i++) {
    qp->waiting[i]->status = EFA_FLUSHED;
    qp->waiting[i]->stage = STAGE_FINISH;
    qp->waiting[i]->again_ns = 0;
  }
  engine_post(qp);
  pthread_mutex_unlock(&qp->lock);
}

static void flush_receives(struct qp* qp) {
  struct qp_file* file = qp->file;
  uint32_t head = atomic_load(&file->head);
  while (head != atomic_load(&file->tail)) {
    struct receive receive = file->ring[head & (file->slots - 1)];
    if (!atomic_compare_exchange_strong(&file->head, &head, head + 1)) continue;
    struct completion flushed = {
        .wr_id = receive.wr_id,
        .qp = qp->id,
        .opcode = IBV_WC_RECV,
        .vendor_status = EFA_FLUSHED,
        .qpn = qp->ex.qp_base.qp_num,
        .address = NO_ADDRESS,
    };
    while (cq_push(qp->recv_cq->file, &flushed, false) == PUSH_BUSY) {
    }
    head++;
  }
}

static int set_state(struct qp* qp, int state) {
  qp->ex.qp_base.state = state;
  if (state == IBV_QPS_RTR || state == IBV_QPS_RTS) atomic_store(&qp->file->life, QP_LIVE);
  if (state != IBV_QPS_ERR) return 0;
  atomic_store(&qp->file->life, QP_GONE);
  flush_sends(qp);
  flush_receives(qp);
  return 0;
}

int qp_modify(struct qp* qp, const struct ibv_qp_attr* attributes, int mask) {
  if (qp->generation != process_generation()) return EINVAL;
  if (mask & IBV_QP_QKEY) atomic_store(&qp->file->qkey, attributes->qkey);
  if (mask & IBV_QP_RNR_RETRY) {
    if (attributes->rnr_retry > RNR_FOREVER) return EINVAL;
    pthread_mutex_lock(&qp->lock);
    qp->rnr_retry = attributes->rnr_retry;
    pthread_mutex_unlock(&qp->lock);
  }
  return mask & IBV_QP_STATE ? set_state(qp, attributes->qp_state) : 0;
}

void qp_completed(struct qp* qp, const struct completion* completion) {
  struct counts* counts = qp->nic->counts;
  if (completion->is_send) {
    atomic_fetch_sub_explicit(&qp->sent, 1, memory_order_relaxed);
  } else if (completion->unsolicited) {
    count(counts, COUNT_UNSOLICITED_ARRIVALS, 1);
  } else {
    atomic_fetch_sub_explicit(&qp->received, 1, memory_order_relaxed);
    if (!completion->vendor_status) count(counts, COUNT_RECEIVES_USED, 1);
  }
}

static void leave(struct qp* qp) {
  atomic_store(&qp->file->life, QP_GONE);
  file_unlink(qp->name);
  cq_detach(qp->send_cq, qp);
  if (qp->recv_cq != qp->send_cq) cq_detach(qp->recv_cq, qp);
  engine_remove(qp);
  if (qp->stages) {
    count(qp->nic->counts, COUNT_NO_DOORBELL, qp->stages);
    say("queue pair %u is destroyed with %u work requests posted for which no doorbell was ever rung (wr_complete was not called)",
        qp->ex.qp_base.qp_num, qp->stages);
  }
}

int qp_destroy(struct qp* qp) {
  /* A forked child only forgets it: the queue pair is the parent's. */
  if (qp->generation == process_generation()) leave(qp);
  for (uint32_t i = 0; i < atomic_load(&qp->waits); i++) parcels_forget(qp->waiting[i]);
  note(1, "queue pair %u destroyed, %u work requests waited", qp->ex.qp_base.qp_num, atomic_load(&qp->waits));
  peers_close(&qp->peers);
  free_qp(qp);
  return 0;
}
