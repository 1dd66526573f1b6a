/* This process on the fabric: its shared file, and whether others live. */
#pragma once
#include "counters.h"
#include "shared.h"
#include <stdbool.h>

struct process {
  struct process_file* file;
  char owner[OWNER]; /* PID-NONCE: in the names of its files, and in those of its queue pairs */
  struct counts* counts;
  uint64_t generation; /* a fork's child has another */
};

/* Null, and a sentence has been said, when EFA_SOFT_DIR cannot be used. A child of a fork gets a file of its own. */
struct process* process_self(void);
/* Objects that were made before a fork belong to the parent. */
uint64_t process_generation(void);
/* Unique in this process. */
uint64_t process_next_id(void);


/* True if the process of that name in file names has ended. */
bool process_is_dead(const char* owner);

void process_file_name(const char* owner, char* name);
void cq_file_name(const char* owner, uint64_t id, char* name);
void qp_file_name(const uint8_t* gid, uint32_t qpn, char* name);
