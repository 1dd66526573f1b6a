/* Memory regions: keys, and the checks that a NIC makes with them. */
#pragma once
#include "shared.h"
#include <stdbool.h>

struct ibv_mr* memory_register(struct ibv_pd* pd, void* memory, size_t length, uint64_t address, unsigned access);
int memory_deregister(struct ibv_mr* mr);

/* The region when `key` allows all of it in this protection domain; then it stays until memory_release. Null otherwise. */
struct region* memory_acquire(struct process_file* process, uint32_t key, uint64_t address, uint64_t length, unsigned access,
                              uint32_t pd);
void memory_release(struct region* region);

void memory_after_fork(void);
