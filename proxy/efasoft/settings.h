/* Settings from the environment, read once. README.md lists the variables. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

enum mover { MOVER_AUTO, MOVER_VM, MOVER_SHM };

struct settings {
  bool usable; /* false: something is missing or wrong, it has been said, and there are no devices */
  const char *sysfs, *folder;
  uint64_t seed;
  uint32_t window, mtu, sq_depth, rq_depth, cq_depth;
  bool unsolicited, rdma_write, rdma_read, reuse_keys;
  uint64_t latency_ns, rnr_ns, unresponsive_ns;
  double gbit;
  enum mover mover;
};

const struct settings* settings(void);
