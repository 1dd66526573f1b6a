/* Moves posted work. Posting and polling run it; a thread that otherwise sleeps sends whatever is not polled. */
#pragma once
#include <stdint.h>

struct qp;

void engine_add(struct qp* qp);
void engine_remove(struct qp* qp);

/* New work requests are in its queue, and its lock is held. */
void engine_post(struct qp* qp);
/* Its completions are being looked for. */
void engine_poll(struct qp* qp);
/* Wakes the thread of another process, which then looks what has come. */
struct process_file;
void engine_ring(struct process_file* process);

void engine_after_fork(void);
