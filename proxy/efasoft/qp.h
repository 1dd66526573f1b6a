/* Queue pairs. */
#pragma once
#include "cq.h"
#include "order.h"
#include "peers.h"
#include "process.h"
#include "request.h"
#include <semaphore.h>

enum { SEND_SGES = 2, RDMA_SGES = 1, QPS = 1024, RNR_FOREVER = 7 };

struct qp {
  struct ibv_qp_ex ex;
  struct nic* nic;
  struct process* self;
  uint64_t generation, id;
  struct qp_file* file;
  size_t file_size;
  char name[FILE_NAME];
  struct cq *send_cq, *recv_cq;
  struct qp* next_in_cq[2]; /* as a sender, as a receiver only */
  struct qp* next;          /* the engine's list of all queue pairs */
  uint32_t depth, receive_depth, max_inline;
  bool signal_all;
  _Atomic uint32_t sent, received; /* posted and not polled yet */

  /* The session from wr_start to wr_complete. A semaphore, because another thread may end it than began it. */
  sem_t posting;
  int session_error;
  struct request* staged;
  uint32_t stages, staged_room;

  pthread_mutex_t receiving;

  /* The engine's, under `lock`. */
  pthread_mutex_t lock;
  struct order order;
  struct request* requests;     /* memory for `depth` of them */
  struct request** free_list;   /* those that are not in `waiting` */
  struct request** waiting;     /* in order of turns */
  _Atomic uint32_t waits;       /* how many are in `waiting` */
  _Atomic bool held;            /* some wait only for their turn, and any poll lets them go */
  _Atomic uint64_t due;         /* when the next one has something to do */
  uint64_t next_index, last_done;
  uint32_t rnr_retry;
  struct peers peers;
};

struct qp* qp_create(struct ibv_context* context, struct ibv_qp_init_attr_ex* attributes, bool unsolicited);
int qp_modify(struct qp* qp, const struct ibv_qp_attr* attributes, int mask);
int qp_destroy(struct qp* qp);

/* One of its completions has been polled. */
void qp_completed(struct qp* qp, const struct completion* completion);

/* post.c: the functions that work requests are posted by. */
void post_fill(struct qp* qp, uint64_t operations);
int post_recv(struct ibv_qp* ibv, struct ibv_recv_wr* wr, struct ibv_recv_wr** bad);
