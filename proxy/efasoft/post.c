/* Posting: a session from wr_start to wr_complete stages work requests, and the doorbell at its end hands them to the engine.
 * wr_start takes no lock but the session's own: callers leave a session open over several calls, and the device goes on
 * meanwhile. */
#include "clock.h"
#include "engine.h"
#include "faults.h"
#include "log.h"
#include "address.h"
#include "qp.h"
#include "settings.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct qp* of(struct ibv_qp_ex* ex) { return (struct qp*)ex; }

static void wr_start(struct ibv_qp_ex* ex) {
  struct qp* qp = of(ex);
  while (sem_wait(&qp->posting) != 0) {
  }
  qp->session_error = 0;
  qp->stages = 0;
}

static int check(struct qp* qp) {
  if (qp->generation != process_generation()) return EINVAL;
  if (qp->ex.qp_base.state != IBV_QPS_RTS && qp->ex.qp_base.state != IBV_QPS_SQD) return EINVAL;
  if (!(qp->ex.wr_flags & IBV_SEND_SIGNALED) && !qp->signal_all) return EINVAL;
  if (qp->ex.wr_flags & ~(unsigned)(IBV_SEND_SIGNALED | IBV_SEND_INLINE)) return EINVAL;
  /* Full until completions are polled, not only written: that is how libefa counts. */
  if (atomic_load_explicit(&qp->sent, memory_order_relaxed) + qp->stages >= qp->depth) return ENOMEM;
  return 0;
}

static bool grow(struct qp* qp) {
  if (qp->stages < qp->staged_room) return true;
  uint32_t room = qp->staged_room ? 2 * qp->staged_room : 32;
  struct request* more = realloc(qp->staged, room * sizeof *more);
  if (!more) return false;
  qp->staged = more;
  qp->staged_room = room;
  return true;
}

static struct request* begin(struct ibv_qp_ex* ex, enum op op) {
  struct qp* qp = of(ex);
  if (!qp->session_error) qp->session_error = check(qp);
  if (!qp->session_error && !grow(qp)) qp->session_error = ENOMEM;
  if (qp->session_error) return NULL;
  struct request* request = &qp->staged[qp->stages++];
  *request = (struct request){.wr_id = ex->wr_id, .op = op};
  return request;
}

static void set_immediate(struct request* request, uint32_t immediate) {
  if (!request) return;
  request->has_immediate = true;
  request->immediate = immediate;
}

static struct request* begin_rdma(struct ibv_qp_ex* ex, enum op op, uint32_t rkey, uint64_t address) {
  struct request* request = begin(ex, op);
  if (!request) return NULL;
  request->rkey = rkey;
  request->remote_address = address;
  return request;
}

static void wr_send(struct ibv_qp_ex* ex) { begin(ex, OP_SEND); }
static void wr_send_imm(struct ibv_qp_ex* ex, uint32_t immediate) { set_immediate(begin(ex, OP_SEND), immediate); }
static void wr_rdma_read(struct ibv_qp_ex* ex, uint32_t rkey, uint64_t address) { begin_rdma(ex, OP_READ, rkey, address); }
static void wr_rdma_write(struct ibv_qp_ex* ex, uint32_t rkey, uint64_t address) { begin_rdma(ex, OP_WRITE, rkey, address); }
static void wr_rdma_write_imm(struct ibv_qp_ex* ex, uint32_t rkey, uint64_t address, uint32_t immediate) {
  set_immediate(begin_rdma(ex, OP_WRITE, rkey, address), immediate);
}

/* The one that is being staged; null in a session that has failed. */
static struct request* current(struct qp* qp) { return qp->session_error || !qp->stages ? NULL : &qp->staged[qp->stages - 1]; }

static void wr_set_ud_addr(struct ibv_qp_ex* ex, struct ibv_ah* ah, uint32_t qpn, uint32_t qkey) {
  struct request* request = current(of(ex));
  if (!request) return;
  request->address = address_number(ah);
  memcpy(request->gid, address_gid(ah), 16);
  request->qpn = qpn;
  request->qkey = qkey;
}

static void wr_set_sge_list(struct ibv_qp_ex* ex, size_t n, const struct ibv_sge* list) {
  struct request* request = current(of(ex));
  if (!request) return;
  if (n > (request->op == OP_SEND ? SEND_SGES : RDMA_SGES)) {
    of(ex)->session_error = EINVAL;
    return;
  }
  uint64_t bytes = 0;
  for (size_t i = 0; i < n; i++) bytes += list[i].length;
  request->sges = (uint32_t)n;
  request->bytes = bytes > UINT32_MAX ? UINT32_MAX : (uint32_t)bytes;
  if (n) memcpy(request->sge, list, n * sizeof *list);
}

static void wr_set_sge(struct ibv_qp_ex* ex, uint32_t lkey, uint64_t address, uint32_t length) {
  struct ibv_sge sge = {.addr = address, .length = length, .lkey = lkey};
  wr_set_sge_list(ex, 1, &sge);
}

static void wr_set_inline_data_list(struct ibv_qp_ex* ex, size_t n, const struct ibv_data_buf* list) {
  struct request* request = current(of(ex));
  if (!request) return;
  size_t bytes = 0;
  for (size_t i = 0; i < n; i++) {
    if (request->op != OP_SEND || list[i].length > of(ex)->max_inline - bytes) {
      of(ex)->session_error = EINVAL;
      return;
    }
    memcpy(request->inline_data + bytes, list[i].addr, list[i].length);
    bytes += list[i].length;
  }
  request->is_inline = true;
  request->sges = 1;
  request->bytes = (uint32_t)bytes;
}

static void wr_set_inline_data(struct ibv_qp_ex* ex, void* data, size_t length) {
  struct ibv_data_buf buffer = {data, length};
  wr_set_inline_data_list(ex, 1, &buffer);
}

/* Under the queue pair's lock. Turns are nearly sorted, so it is found from the end. */
static void enqueue(struct qp* qp, const struct request* staged) {
  uint32_t waits = atomic_load_explicit(&qp->waits, memory_order_relaxed);
  struct request* request = qp->free_list[qp->depth - 1 - waits];
  *request = *staged;
  request->index = qp->next_index++;
  request->turn = order_turn(&qp->order, settings()->window);
  request->draw = settings()->window > 1 ? order_draw(&qp->order) : 0;
  if (request->is_inline) request->sge[0] = (struct ibv_sge){.addr = (uintptr_t)request->inline_data, .length = request->bytes};
  uint32_t at = waits;
  for (; at && qp->waiting[at - 1]->turn > request->turn; at--) qp->waiting[at] = qp->waiting[at - 1];
  qp->waiting[at] = request;
  atomic_store_explicit(&qp->waits, waits + 1, memory_order_relaxed);
}

static void ring_doorbell(struct qp* qp) {
  pthread_mutex_lock(&qp->lock);
  atomic_fetch_add_explicit(&qp->sent, qp->stages, memory_order_relaxed);
  for (uint32_t i = 0; i < qp->stages; i++) enqueue(qp, &qp->staged[i]);
  engine_post(qp);
  pthread_mutex_unlock(&qp->lock);
}

static int wr_complete(struct ibv_qp_ex* ex) {
  struct qp* qp = of(ex);
  int error = qp->session_error;
  /* Of more than one, the caller has been told by its provider that the first were accepted: a queue with room for them takes them
     all. */
  if (!error && qp->stages == 1 && fault_full(qp->nic->index)) error = ENOMEM;
  if (error == ENOMEM) count(qp->nic->counts, COUNT_REFUSED_POSTS, 1);
  if (!error && qp->stages) ring_doorbell(qp);
  qp->stages = 0; /* or all are taken back, as libefa does */
  sem_post(&qp->posting);
  return error;
}

static void wr_abort(struct ibv_qp_ex* ex) {
  of(ex)->stages = 0;
  sem_post(&of(ex)->posting);
}

void post_fill(struct qp* qp, uint64_t operations) {
  struct ibv_qp_ex* ex = &qp->ex;
  ex->wr_start = wr_start;
  ex->wr_complete = wr_complete;
  ex->wr_abort = wr_abort;
  ex->wr_set_ud_addr = wr_set_ud_addr;
  ex->wr_set_sge = wr_set_sge;
  ex->wr_set_sge_list = wr_set_sge_list;
  ex->wr_set_inline_data = wr_set_inline_data;
  ex->wr_set_inline_data_list = wr_set_inline_data_list;
  if (operations & IBV_QP_EX_WITH_SEND) ex->wr_send = wr_send;
  if (operations & IBV_QP_EX_WITH_SEND_WITH_IMM) ex->wr_send_imm = wr_send_imm;
  if (operations & IBV_QP_EX_WITH_RDMA_READ) ex->wr_rdma_read = wr_rdma_read;
  if (operations & IBV_QP_EX_WITH_RDMA_WRITE) ex->wr_rdma_write = wr_rdma_write;
  if (operations & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) ex->wr_rdma_write_imm = wr_rdma_write_imm;
}

static int check_receive(struct qp* qp, const struct ibv_recv_wr* wr) {
  if (qp->generation != process_generation()) return EINVAL;
  if (qp->ex.qp_base.state == IBV_QPS_RESET || qp->ex.qp_base.state == IBV_QPS_ERR) return EINVAL;
  if (wr->num_sge > RECEIVE_SGES) return EINVAL;
  if (atomic_load_explicit(&qp->received, memory_order_relaxed) >= qp->receive_depth) return ENOMEM;
  return 0;
}

static void put_receive(struct qp* qp, const struct ibv_recv_wr* wr) {
  struct qp_file* file = qp->file;
  uint32_t tail = atomic_load_explicit(&file->tail, memory_order_relaxed);
  struct receive* receive = &file->ring[tail & (file->slots - 1)];
  *receive = (struct receive){.wr_id = wr->wr_id};
  for (int i = 0; i < wr->num_sge; i++) {
    receive->sge[i] = wr->sg_list[i];
    receive->bytes += wr->sg_list[i].length;
  }
  receive->sges = (uint32_t)wr->num_sge;
  atomic_store_explicit(&file->tail, tail + 1, memory_order_release);
  atomic_fetch_add_explicit(&qp->received, 1, memory_order_relaxed);
}

int post_recv(struct ibv_qp* ibv, struct ibv_recv_wr* wr, struct ibv_recv_wr** bad) {
  struct qp* qp = (struct qp*)ibv;
  int error = 0;
  pthread_mutex_lock(&qp->receiving);
  for (; wr; wr = wr->next) {
    error = check_receive(qp, wr);
    if (error) {
      *bad = wr;
      break;
    }
    put_receive(qp, wr);
  }
  pthread_mutex_unlock(&qp->receiving);
  return error;
}
