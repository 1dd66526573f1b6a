#include "nics.h"
#include "log.h"
#include "process.h"
#include "settings.h"
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct nic* all;
static int number;

static bool read_gid(const char* folder, const char* name, uint8_t* gid) {
  char path[PATH_MAX + 300], text[64] = "";
  snprintf(path, sizeof path, "%s/%s/ports/1/gids/0", folder, name);
  FILE* file = fopen(path, "re");
  if (!file) return false;
  bool read = fgets(text, sizeof text, file) != NULL;
  fclose(file);
  unsigned part[8];
  if (!read || sscanf(text, "%4x:%4x:%4x:%4x:%4x:%4x:%4x:%4x", part, part + 1, part + 2, part + 3, part + 4, part + 5, part + 6,
                      part + 7) != 8)
    return false;
  for (int i = 0; i < 8; i++) {
    gid[2 * i] = (uint8_t)(part[i] >> 8);
    gid[2 * i + 1] = (uint8_t)part[i];
  }
  return true;
}

static int visible(const struct dirent* entry) { return entry->d_name[0] != '.'; }

static void add(const char* folder, const char* name) {
  struct nic* nic = &all[number];
  if (strlen(name) >= IBV_SYSFS_NAME_MAX || !read_gid(folder, name, nic->gid)) {
    say("%s/%s has no readable ports/1/gids/0, so it is left out", folder, name);
    return;
  }
  struct ibv_device* device = &nic->device;
  device->node_type = IBV_NODE_UNSPECIFIED;
  device->transport_type = IBV_TRANSPORT_UNSPECIFIED;
  snprintf(device->name, sizeof device->name, "%s", name);
  snprintf(device->dev_name, sizeof device->dev_name, "uverbs%d", number);
  snprintf(device->ibdev_path, sizeof device->ibdev_path, "%.180s/%s", folder, name);
  snprintf(device->dev_path, sizeof device->dev_path, "%.180s_verbs/uverbs%d", folder, number);
  nic->index = number++;
}

static void list(void) {
  if (!settings()->usable) return;
  char folder[PATH_MAX];
  snprintf(folder, sizeof folder, "%s/class/infiniband", settings()->sysfs);
  struct dirent** entries;
  int found = scandir(folder, &entries, visible, versionsort);
  if (found < 0) {
    say("SYSFS_PATH=%s: no folder class/infiniband in it (%s), so there are no EFA devices", settings()->sysfs, strerror(errno));
    return;
  }
  all = calloc((size_t)found + 1, sizeof *all);
  for (int i = 0; i < found; i++) {
    if (all) add(folder, entries[i]->d_name);
    free(entries[i]);
  }
  free(entries);
}

struct nic* nics(int* n) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, list);
  *n = number;
  return all;
}

int nics_open(struct nic* nic) {
  struct process* self = process_self();
  if (!self) return -1;
  nic->control = control_nic(nic->gid, nic->device.name);
  if (!nic->control) say("no room for %s in EFA_SOFT_DIR=%s", nic->device.name, settings()->folder);
  return nic->control ? 0 : -1;
}

struct nic* nic_of(const struct ibv_context* context) { return (struct nic*)context->device; }
