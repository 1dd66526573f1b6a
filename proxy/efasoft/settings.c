#include "settings.h"
#include "faults.h"
#include "log.h"
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static struct settings current;

static const char* text_of(const char* name) {
  const char* text = getenv(name);
  return text && *text ? text : NULL;
}

/* A number that is no number is worse than none: the device stays away and says so. */
static double number(const char* name, double otherwise, double least, double most) {
  const char* text = text_of(name);
  if (!text) return otherwise;
  char* end = NULL;
  double value = strtod(text, &end);
  if (*end || !(value >= least && value <= most)) {
    say("%s=%s: give a number from %.15g to %.15g", name, text, least, most);
    current.usable = false;
    return otherwise;
  }
  return value;
}

static bool flag(const char* name, bool otherwise) { return number(name, otherwise, 0, 1) != 0; }

static enum mover mover(void) {
  const char* text = text_of("EFA_SOFT_MOVER");
  if (!text || !strcmp(text, "auto")) return MOVER_AUTO;
  if (!strcmp(text, "vm")) return MOVER_VM;
  if (!strcmp(text, "shm")) return MOVER_SHM;
  say("EFA_SOFT_MOVER=%s: give auto, vm or shm", text);
  current.usable = false;
  return MOVER_AUTO;
}

static const char* folder_of(const char* name, const char* what) {
  const char* text = text_of(name);
  if (!text) {
    say("%s is not set, so there are no EFA devices; it names %s. `python -m pplx_comm efa-soft -- COMMAND` sets it up",
        name, what);
    current.usable = false;
  }
  return text;
}

static void read_settings(void) {
  current.usable = true;
  log_to(text_of("EFA_SOFT_LOG"));
  log_verbosity((int)number("EFA_SOFT_VERBOSE", 0, 0, 9));
  current.sysfs = folder_of("SYSFS_PATH", "a folder with class/infiniband/NIC/ports/1/gids/0 for every NIC");
  if (current.sysfs) current.folder = folder_of("EFA_SOFT_DIR", "a folder on tmpfs that all processes of one fabric share");
  current.seed = (uint64_t)number("EFA_SOFT_SEED", 1, 0, 1e15);
  current.window = (uint32_t)number("EFA_SOFT_WINDOW", 16, 1, 4096);
  current.mtu = (uint32_t)number("EFA_SOFT_MTU", 8928, 64, 65536);
  current.sq_depth = (uint32_t)number("EFA_SOFT_SQ_DEPTH", 4096, 1, 65536);
  current.rq_depth = (uint32_t)number("EFA_SOFT_RQ_DEPTH", 8192, 1, 65536);
  current.cq_depth = (uint32_t)number("EFA_SOFT_CQ_DEPTH", 65536, 1, 1 << 20);
  current.unsolicited = flag("EFA_SOFT_UNSOLICITED", true);
  current.rdma_write = flag("EFA_SOFT_RDMA_WRITE", true);
  current.rdma_read = flag("EFA_SOFT_RDMA_READ", true);
  current.reuse_keys = flag("EFA_SOFT_REUSE_KEYS", false);
  current.latency_ns = (uint64_t)(number("EFA_SOFT_LATENCY_US", 0, 0, 1e7) * 1e3);
  current.gbit = number("EFA_SOFT_GBIT", 0, 0, 1e5);
  current.rnr_ns = (uint64_t)(number("EFA_SOFT_RNR_US", 100, 1, 1e6) * 1e3);
  current.unresponsive_ns = (uint64_t)(number("EFA_SOFT_UNRESPONSIVE_MS", 500, 0, 1e6) * 1e6);
  current.mover = mover();
  if (!faults_read(text_of("EFA_SOFT_FAIL"))) current.usable = false;
}

const struct settings* settings(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, read_settings);
  return &current;
}
