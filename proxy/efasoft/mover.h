/* Moves bytes between this process and the target: straight into its memory, or in parcels that its own thread unpacks. */
#pragma once
#include "peers.h"
#include "request.h"

enum moved { MOVED, MOVE_AGAIN, MOVE_FAULT };

/* True if this process may look into that one. Says once if it may not. */
bool mover_can_vm(const struct process_file* process);
/* The parts of the local buffers that hold `bytes` from `offset` on; how many there are. */
struct iovec;
int mover_local(const struct request* request, uint64_t offset, uint64_t bytes, struct iovec* to);
/* Between the request's local buffers and `address` of the target, `bytes` in pieces of the MTU, in an order that the request
   drew. */
enum moved mover_move(struct request* request, struct peer* peer, uint64_t address, uint32_t key, uint64_t bytes);
