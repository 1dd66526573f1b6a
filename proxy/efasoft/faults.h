/* Faults that EFA_SOFT_FAIL asks for. Each is counted in this process: after=K skips K times, count=C ends after C, every=K is each Kth. */
#pragma once
#include "nics.h"
#include "process.h"
#include <stdbool.h>

bool faults_read(const char* text);

/* A work request goes out: the vendor code that it must fail with, or 0. May take the port down or silence the process. */
enum efa_status fault_on_start(struct nic* nic, struct process* self);
/* A message comes to the target: whether it must find no receive. */
bool fault_rnr(struct nic* nic);
/* A doorbell of one work request: whether the send queue must be full. */
bool fault_full(struct nic* nic);
/* A completion is written: whether the queue must overrun. */
bool fault_overrun(struct nic* nic);
