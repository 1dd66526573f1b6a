/* The queue pairs that one queue pair sends to: their files, mapped, and whether they answer. */
#pragma once
#include "shared.h"
#include <stdbool.h>

/* The mapped parts of a peer. */
struct attachment {
  struct qp_file* qp; /* null: nothing is */
  struct cq_file* cq;
  struct process_file* process;
  size_t qp_size, cq_size, process_size;
  int process_fd;
  bool by_vm;
};

struct peer {
  struct peer* next;
  uint8_t gid[16];
  uint32_t qpn;
  struct attachment to;
  struct control_nic* control;
  uint64_t attached;    /* how often: what points into the files of before is void */
  uint64_t alive_until; /* not looked again before */
  bool answered;        /* ever: then silence is "unresponsive", else "unreachable" */
  uint16_t guess;       /* the number of our address there */
};

enum { PEER_BUCKETS = 64 };
struct peers {
  struct peer* bucket[PEER_BUCKETS];
};

/* Null when there is no memory for one more. */
struct peer* peers_find(struct peers* peers, const uint8_t* gid, uint32_t qpn);
enum reach { REACHED, NO_ANSWER, NO_SUCH_QP };
enum reach peer_reach(struct peer* peer, uint32_t qkey, uint64_t now);
void peers_close(struct peers* peers);
