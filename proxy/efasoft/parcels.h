/* Bytes through shared memory, for where ptrace is refused: the target's own thread unpacks what lies in its file. */
#pragma once
#include "mover.h"
#include "process.h"

enum moved parcels_move(struct request* request, struct peer* peer, uint64_t address, uint32_t key, uint64_t bytes);
/* The request is over, whatever has come of its parcels. */
void parcels_forget(struct request* request);
/* Unpacks what has come for this process. */
void parcels_unpack(struct process* self);
