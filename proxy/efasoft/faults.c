#include "faults.h"
#include "log.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum kind { ERROR, PORT_DOWN, SILENT, RNR, FULL, OVERRUN };
enum { FAULTS = 16, ANY_NIC = -1 };

struct fault {
  enum kind kind;
  long code, nic, after, count, every;
  _Atomic long seen;
};

static struct fault faults[FAULTS];
static int number;

static const struct {
  const char* name;
  enum kind kind;
} KINDS[] = {{"error", ERROR}, {"port-down", PORT_DOWN}, {"silent", SILENT}, {"rnr", RNR}, {"full", FULL}, {"cq-overrun", OVERRUN}};

static long* word_of(struct fault* fault, const char* name) {
  if (!strcmp(name, "nic")) return &fault->nic;
  if (!strcmp(name, "after")) return &fault->after;
  if (!strcmp(name, "count")) return &fault->count;
  if (!strcmp(name, "every")) return &fault->every;
  return NULL;
}

static bool number_of(const char* text, long* value) {
  char* end = NULL;
  *value = text ? strtol(text, &end, 0) : 0;
  return text && *text && !*end && *value >= 0;
}

static bool read_kind(struct fault* fault, char* word) {
  char* value = strchr(word, '=');
  if (value) *value++ = 0;
  for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++) {
    if (strcmp(word, KINDS[i].name)) continue;
    fault->kind = KINDS[i].kind;
    if (fault->kind != ERROR) return !value;
    return number_of(value, &fault->code) && fault->code > 0 && fault->code < EFA_STATUSES;
  }
  return false;
}

static bool read_fault(struct fault* fault, char* text) {
  char* rest = NULL;
  char* word = strtok_r(text, ",", &rest);
  if (!word || !read_kind(fault, word)) return false;
  while ((word = strtok_r(NULL, ",", &rest))) {
    char* value = strchr(word, '=');
    if (!value) return false;
    *value++ = 0;
    long* to = word_of(fault, word);
    if (!to || !number_of(value, to)) return false;
  }
  /* What is done once unless it is said otherwise: a port or a process does not fail twice. */
  if (fault->count < 0) fault->count = fault->every ? 0 : fault->kind == RNR || fault->kind == FULL ? 0 : 1;
  return true;
}

bool faults_read(const char* text) {
  number = 0;
  if (!text) return true;
  char* copy = strdup(text);
  char* rest = NULL;
  bool right = copy != NULL;
  for (char* one = strtok_r(copy, ";", &rest); right && one; one = strtok_r(NULL, ";", &rest)) {
    right = number < FAULTS;
    if (!right) break;
    struct fault* fault = &faults[number++];
    *fault = (struct fault){.nic = ANY_NIC, .count = -1};
    right = read_fault(fault, one);
  }
  free(copy);
  if (!right) {
    say("EFA_SOFT_FAIL=%s: give faults with `;` between them: error=CODE (1 to 15), port-down, silent, rnr, full or cq-overrun, "
        "each with any of ,nic=N ,after=K ,count=C ,every=K",
        text);
  }
  return right;
}

/* Whether this time is one of its times. */
static bool strikes(struct fault* fault, int nic) {
  if (fault->nic != ANY_NIC && fault->nic != nic) return false;
  long time = atomic_fetch_add(&fault->seen, 1) - fault->after;
  if (time < 0 || (fault->every && (time + 1) % fault->every)) return false;
  long before = fault->every ? time / fault->every : time;
  return !fault->count || before < fault->count;
}

static bool any(enum kind kind, int nic) {
  for (int i = 0; i < number; i++)
    if (faults[i].kind == kind && strikes(&faults[i], nic)) return true;
  return false;
}

struct struck fault_on_start(int nic) {
  struct struck struck = {.status = EFA_OK};
  for (int i = 0; i < number; i++) {
    struct fault* fault = &faults[i];
    if (fault->kind > SILENT || !strikes(fault, nic)) continue;
    if (fault->kind == ERROR) struck.status = (enum efa_status)fault->code;
    struck.port_down |= fault->kind == PORT_DOWN;
    struck.silent |= fault->kind == SILENT;
  }
  return struck;
}

bool fault_rnr(int nic) { return number && any(RNR, nic); }
bool fault_full(int nic) { return number && any(FULL, nic); }
bool fault_overrun(int nic) { return number && any(OVERRUN, nic); }
