/* Faults that EFA_SOFT_FAIL asks for. Each is counted in this process: after=K skips K times, count=C ends after C, every=K is each
   Kth. */
#pragma once
#include "abi.h"
#include <stdbool.h>

bool faults_read(const char* text);

/* The fault of a work request that goes out: the vendor code that it fails with, or 0; its NIC's port goes down; this process falls
silent. */
struct struck {
  enum efa_status status;
  bool port_down, silent;
};
struct struck fault_on_start(int nic);
/* A message comes to the target: whether it must find no receive. */
bool fault_rnr(int nic);
/* A doorbell of one work request: whether the send queue must be full. */
bool fault_full(int nic);
/* A completion is written: whether the queue must overrun. */
bool fault_overrun(int nic);
