/* The NICs of this host, as the sysfs of SYSFS_PATH lists them. */
#pragma once
#include "abi.h"
#include "control.h"
#include "counters.h"

struct nic {
  struct ibv_device device;
  int index;
  uint8_t gid[16];
  struct control_nic* control;
  struct counts* counts;
};

/* In natural order (rdmap9s0 before rdmap16s0); read once, and they stay. */
struct nic* nics(int* n);
/* Zero, or -1 and a sentence has been said. */
int nics_open(struct nic* nic);

struct nic* nic_of(const struct ibv_context* context);
