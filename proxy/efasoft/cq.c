#include "cq.h"
#include "engine.h"
#include "log.h"
#include "process.h"
#include "qp.h"
#include "settings.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- writing ---- */

enum pushed cq_push(struct cq_file* file, const struct completion* completion, bool overrun) {
  if (!shared_mutex_try(&file->writing)) return PUSH_BUSY;
  uint64_t tail = atomic_load_explicit(&file->tail, memory_order_relaxed);
  bool room = tail - atomic_load(&file->head) < file->depth && !overrun && !atomic_load(&file->gone);
  if (room) {
    file->ring[tail % file->depth] = *completion;
    atomic_store_explicit(&file->tail, tail + 1, memory_order_release);
  }
  pthread_mutex_unlock(&file->writing);
  return room ? PUSHED : PUSH_LOST;
}

/* ---- polling ---- */

static struct cq* of(struct ibv_cq_ex* ex) { return (struct cq*)ex; }

/* What libefa makes of a vendor code. */
static enum ibv_wc_status verbs_status(uint32_t status) {
  switch (status) {
    case EFA_OK: return IBV_WC_SUCCESS;
    case EFA_FLUSHED: return IBV_WC_WR_FLUSH_ERR;
    case EFA_QP_INTERNAL_ERROR:
    case EFA_UNSUPPORTED_OP:
    case EFA_INVALID_AH: return IBV_WC_LOC_QP_OP_ERR;
    case EFA_INVALID_LKEY: return IBV_WC_LOC_PROT_ERR;
    case EFA_BAD_LENGTH: return IBV_WC_LOC_LEN_ERR;
    case EFA_REMOTE_BAD_ADDRESS: return IBV_WC_REM_ACCESS_ERR;
    case EFA_REMOTE_ABORT: return IBV_WC_REM_ABORT_ERR;
    case EFA_REMOTE_BAD_DEST_QPN: return IBV_WC_REM_INV_RD_REQ_ERR;
    case EFA_REMOTE_RNR: return IBV_WC_RNR_RETRY_EXC_ERR;
    case EFA_REMOTE_BAD_LENGTH: return IBV_WC_REM_INV_REQ_ERR;
    case EFA_REMOTE_BAD_STATUS: return IBV_WC_BAD_RESP_ERR;
    case EFA_UNRESPONSIVE_REMOTE:
    case EFA_UNREACHABLE_REMOTE: return IBV_WC_RESP_TIMEOUT_ERR;
    case EFA_REMOTE_UNKNOWN_PEER: return IBV_WC_REM_OP_ERR;
    default: return IBV_WC_GENERAL_ERR;
  }
}

static struct qp* owner_of(struct cq* cq, const struct completion* completion) {
  for (struct qp* qp = cq->qps; qp; qp = qp->next_in_cq[qp->send_cq != cq])
    if (qp->id == completion->qp) return qp;
  return NULL;
}

/* The next completion into cq->now; those of destroyed queue pairs are passed over. */
static bool take(struct cq* cq) {
  struct cq_file* file = cq->file;
  uint64_t head = atomic_load_explicit(&file->head, memory_order_relaxed);
  while (head != atomic_load_explicit(&file->tail, memory_order_acquire)) {
    cq->now = file->ring[head++ % file->depth];
    atomic_store_explicit(&file->head, head, memory_order_release);
    struct qp* qp = owner_of(cq, &cq->now);
    if (!qp) continue;
    qp_completed(qp, &cq->now);
    cq->ex.wr_id = cq->now.wr_id;
    cq->ex.status = verbs_status(cq->now.vendor_status);
    return true;
  }
  return false;
}

static int next_poll(struct ibv_cq_ex* ex) {
  struct cq* cq = of(ex);
  if (take(cq)) return 0;
  for (struct qp* qp = cq->qps; qp; qp = qp->next_in_cq[qp->send_cq != cq])
    if (qp->send_cq == cq) engine_poll(qp);
  return take(cq) ? 0 : ENOENT;
}

static int start_poll(struct ibv_cq_ex* ex, struct ibv_poll_cq_attr* attributes) {
  if (attributes && attributes->comp_mask) return EINVAL;
  if (of(ex)->generation != process_generation()) return EINVAL;
  pthread_mutex_lock(&of(ex)->polling);
  int error = next_poll(ex);
  if (error) pthread_mutex_unlock(&of(ex)->polling);
  return error;
}

static void end_poll(struct ibv_cq_ex* ex) { pthread_mutex_unlock(&of(ex)->polling); }
static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex* ex) { return (enum ibv_wc_opcode)of(ex)->now.opcode; }
static uint32_t read_vendor_err(struct ibv_cq_ex* ex) { return of(ex)->now.vendor_status; }
static uint32_t read_byte_len(struct ibv_cq_ex* ex) { return of(ex)->now.bytes; }
static uint32_t read_imm_data(struct ibv_cq_ex* ex) { return of(ex)->now.immediate; }
static uint32_t read_qp_num(struct ibv_cq_ex* ex) { return of(ex)->now.qpn; }
static uint32_t read_src_qp(struct ibv_cq_ex* ex) { return of(ex)->now.source_qpn; }
static unsigned read_wc_flags(struct ibv_cq_ex* ex) { return of(ex)->now.has_immediate ? IBV_WC_WITH_IMM : 0; }
static uint32_t read_slid(struct ibv_cq_ex* ex) { return of(ex)->now.address; }
static uint8_t read_zero(struct ibv_cq_ex* ex) {
  (void)ex;
  return 0;
}

static struct completion* now_of(struct efadv_cq* dv) { return &((struct cq*)((char*)dv - offsetof(struct cq, dv)))->now; }

/* The source's GID is there only where its address handle is not. */
static int read_sgid(struct efadv_cq* dv, union ibv_gid* gid) {
  if (now_of(dv)->address != NO_ADDRESS) return -ENOENT;
  memcpy(gid->raw, now_of(dv)->gid, 16);
  return 0;
}
static bool is_unsolicited(struct efadv_cq* dv) { return now_of(dv)->unsolicited; }

/* ---- life ---- */

void cq_attach(struct cq* cq, struct qp* qp) {
  pthread_mutex_lock(&cq->polling);
  qp->next_in_cq[qp->send_cq != cq] = cq->qps;
  cq->qps = qp;
  pthread_mutex_unlock(&cq->polling);
}

void cq_detach(struct cq* cq, struct qp* qp) {
  pthread_mutex_lock(&cq->polling);
  for (struct qp** at = &cq->qps; *at; at = &(*at)->next_in_cq[(*at)->send_cq != cq]) {
    if (*at != qp) continue;
    *at = qp->next_in_cq[qp->send_cq != cq];
    break;
  }
  pthread_mutex_unlock(&cq->polling);
}

static bool make_file(struct cq* cq, struct process* self, uint32_t depth) {
  cq->size = sizeof *cq->file + depth * sizeof *cq->file->ring;
  cq_file_name(self->owner, process_next_id(), cq->name);
  cq->file = file_create(cq->name, cq->size);
  if (!cq->file) return false;
  memcpy(cq->file->owner, self->owner, OWNER);
  cq->file->depth = depth;
  shared_mutex_init(&cq->file->writing);
  return true;
}

struct cq* cq_create(struct ibv_context* context, const struct ibv_cq_init_attr_ex* attributes) {
  struct process* self = process_self();
  if (attributes->channel || attributes->cqe < 1 || attributes->cqe > settings()->cq_depth) {
    /* A queue to sleep on: the device does not say that it could. */
    errno = attributes->channel ? EOPNOTSUPP : EINVAL;
    return NULL;
  }
  uint32_t depth = 1;
  while (depth < attributes->cqe) depth *= 2;
  struct cq* cq = self ? calloc(1, sizeof *cq) : NULL;
  if (!cq || !make_file(cq, self, depth)) {
    free(cq);
    errno = ENOMEM;
    return NULL;
  }
  cq->nic = nic_of(context);
  cq->generation = self->generation;
  pthread_mutex_init(&cq->polling, NULL);
  struct ibv_cq_ex* ex = &cq->ex;
  ex->context = context;
  ex->cq_context = attributes->cq_context;
  ex->cqe = (int)depth;
  ex->start_poll = start_poll;
  ex->next_poll = next_poll;
  ex->end_poll = end_poll;
  ex->read_opcode = read_opcode;
  ex->read_vendor_err = read_vendor_err;
  ex->read_byte_len = read_byte_len;
  ex->read_imm_data = read_imm_data;
  ex->read_qp_num = read_qp_num;
  ex->read_src_qp = read_src_qp;
  ex->read_wc_flags = read_wc_flags;
  ex->read_slid = read_slid;
  ex->read_sl = read_zero;
  ex->read_dlid_path_bits = read_zero;
  cq->dv.wc_read_sgid = read_sgid;
  cq->dv.wc_is_unsolicited = is_unsolicited;
  pthread_mutex_init(&ex->mutex, NULL);
  pthread_cond_init(&ex->cond, NULL);
  return cq;
}

int cq_destroy(struct cq* cq) {
  if (cq->qps && cq->generation == process_generation()) return EBUSY;
  if (cq->generation == process_generation()) {
    atomic_store(&cq->file->gone, 1);
    file_unlink(cq->name);
  }
  file_unmap(cq->file, cq->size);
  pthread_mutex_destroy(&cq->polling);
  free(cq);
  return 0;
}
