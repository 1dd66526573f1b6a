/* Completion queues: one ring in shared memory, which every initiator that targets one of its queue pairs writes. */
#pragma once
#include "nics.h"
#include "shared.h"
#include <stdbool.h>

struct qp;

struct cq {
  struct ibv_cq_ex ex;
  struct efadv_cq dv;
  struct nic* nic;
  struct cq_file* file;
  size_t size;
  uint64_t generation;
  char name[FILE_NAME];
  pthread_mutex_t polling; /* the ring's head, `now` and `qps`; held from start_poll to end_poll as in libefa */
  struct completion now;
  struct qp* qps; /* all whose completions come here */
};

struct cq* cq_create(struct ibv_context* context, const struct ibv_cq_init_attr_ex* attributes);
int cq_destroy(struct cq* cq);

enum pushed { PUSHED, PUSH_BUSY, PUSH_LOST };
/* Busy: someone else writes and may have been stopped there, so come back. Lost: the ring is full, or its owner has destroyed
   it. */
enum pushed cq_push(struct cq_file* file, const struct completion* completion, bool overrun);

/* After this no completion of the queue pair is polled any more. */
void cq_attach(struct cq* cq, struct qp* qp);
void cq_detach(struct cq* cq, struct qp* qp);
