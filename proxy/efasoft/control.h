/* The control page: what all processes of a fabric share about each NIC. Tests flip its words while processes run. */
#pragma once
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct control_nic {
  uint8_t gid[16];
  char name[32];
  _Atomic uint32_t port_down, silent;
  _Atomic uint64_t egress_ns, ingress_ns; /* until then the wire is busy */
  uint64_t reserved[6];
};

/* The words of the NIC with this GID, made where there are none yet; null when the page is full or cannot be made. */
struct control_nic* control_nic(const uint8_t* gid, const char* name);
/* Null for a NIC that no process has opened. */
struct control_nic* control_find(const uint8_t* gid);

/* Puts `bytes` on a wire that carries `gbit` gigabits a second: when their last bit has passed. */
uint64_t control_reserve(_Atomic uint64_t* busy_until, uint64_t from, uint64_t bytes, double gbit);
