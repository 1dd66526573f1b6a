/* Structures in files that several processes map: one per process, one per completion queue, one per queue pair.
 * The initiator of a work request plays both NICs: it checks the target's keys here, moves the bytes, takes a posted receive and
 writes
 * the completion. The target's threads take no part, so data lands even while the target is stopped. */
#pragma once
#include "abi.h"
#include "files.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

enum { OWNER = 40, REGIONS = 65536, ADDRESSES = 4096, RECEIVE_SGES = 1, NO_ADDRESS = 0xffff };
enum { PARCELS = 64, PARCEL_BYTES = 65536 };

/* Registered memory. A thread that moves bytes counts itself in `users` first, so that a deregistration can wait for it. */
struct region {
  _Atomic uint32_t key; /* 0: free */
  _Atomic int32_t users;
  _Atomic uint64_t address, length;
  _Atomic uint32_t access, pd;
};

/* An address handle: the peers that this process knows, by NIC. */
struct address {
  _Atomic uint32_t handles; /* 0: free */
  _Atomic uint32_t nic;
  _Atomic uint64_t gid[2];
};

/* Where ptrace is refused, bytes travel in these and the target's own thread unpacks them. */
enum parcel_state { PARCEL_FREE, PARCEL_PACKING, PARCEL_SENT, PARCEL_ABANDONED, PARCEL_DONE, PARCEL_FAILED };
struct parcel {
  _Atomic uint32_t state;
  uint32_t is_read, length, key, pd;
  uint64_t address;
  char sender[OWNER];
  uint8_t bytes[PARCEL_BYTES];
};

struct process_file {
  uint64_t nonce, nonce_at; /* the same number lies at that address of the process: this is the one, and ptrace is allowed */
  uint32_t pid;
  _Atomic uint32_t silent;  /* its NICs do not answer */
  _Atomic uint32_t bell, asleep; /* the futex of its thread */
  _Atomic uint32_t addresses;    /* this many of address[] have ever been used */
  struct address address[ADDRESSES];
  struct region region[REGIONS];
  struct parcel parcel[PARCELS];
};

struct completion {
  uint64_t wr_id, qp; /* qp: the queue pair's id, which unlike its number never comes again; 0: whose queue pair is gone */
  uint32_t opcode, vendor_status, bytes, immediate, qpn, source_qpn;
  uint16_t address;
  uint8_t has_immediate, unsolicited, is_send;
  uint8_t gid[16];
};

struct cq_file {
  char owner[OWNER];
  pthread_mutex_t writing; /* the writers' alone: the reader never waits */
  _Atomic uint32_t gone;
  uint32_t depth;
  _Atomic uint64_t head, tail;
  struct completion ring[];
};

struct receive {
  uint64_t wr_id;
  uint32_t sges, bytes;
  struct ibv_sge sge[RECEIVE_SGES];
};

enum qp_life { QP_NEW, QP_LIVE, QP_GONE };
struct qp_file {
  char owner[OWNER], cq[FILE_NAME];
  _Atomic uint32_t life;
  uint32_t nic, pd, unsolicited;
  _Atomic uint32_t qkey;
  uint64_t id;
  uint8_t gid[16];
  uint32_t slots; /* a power of two */
  _Atomic uint32_t head, tail; /* taken by compare-and-swap, posted by the owner */
  struct receive ring[];
};
