/* One work request, from the doorbell to its completion. */
#pragma once
#include "abi.h"
#include "shared.h"
#include <stdbool.h>

enum op { OP_SEND, OP_WRITE, OP_READ };
enum { INLINE_BYTES = 32, PARCELS_OUT = 4 };

/* The next event that the request waits for. */
enum stage {
  STAGE_START,   /* to go out */
  STAGE_MOVE,    /* to get to the target */
  STAGE_DELIVER, /* to be told to the target: all bytes have landed */
  STAGE_FINISH,  /* to be told to its sender */
};

struct request {
  uint64_t turn, index, draw; /* see order.h */
  uint64_t wr_id, remote_address;
  uint64_t again_ns;     /* nothing to do before */
  uint64_t silent_since; /* 0: the target answered last time */
  uint64_t sent_pieces;  /* these three are of parcels.c, which takes several goes */
  uint64_t attached;
  struct parcel* parcel[PARCELS_OUT];
  uint64_t parcel_offset[PARCELS_OUT];
  enum op op;
  enum stage stage;
  enum efa_status status;
  uint32_t rkey, immediate, qpn, qkey, bytes, sges, rnr_tries;
  uint16_t address;
  bool has_immediate, is_inline, has_receive;
  uint8_t gid[16];
  struct ibv_sge sge[2];
  struct receive receive; /* taken from the target */
  uint8_t inline_data[INLINE_BYTES];
};

struct qp;
/* Takes it as far as it goes now. True: its completion has been written, and it is over. */
bool request_advance(struct qp* qp, struct request* request, uint64_t now);
/* Completes it as flushed; false when the queue is busy. */
bool request_flush(struct qp* qp, struct request* request);
