/* Address handles: the peers that a NIC knows. Two handles for one GID share a number. */
#pragma once
#include "shared.h"
#include <stdbool.h>

struct ibv_ah* address_create(struct ibv_pd* pd, const struct ibv_ah_attr* attributes);
int address_destroy(struct ibv_ah* ah);
uint16_t address_number(const struct ibv_ah* ah);
const uint8_t* address_gid(const struct ibv_ah* ah);

/* True if that number still names that GID. */
bool address_is(struct process_file* process, uint16_t number, const uint8_t* gid, uint32_t nic);
/* The number that a process's NIC knows a GID by, or NO_ADDRESS. `guess` is tried first. */
uint16_t address_find(struct process_file* process, const uint8_t* gid, uint32_t nic, uint16_t guess);

void addresses_after_fork(void);
