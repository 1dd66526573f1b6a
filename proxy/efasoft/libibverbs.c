/* What libibverbs.so.1 exports and libfabric's efa provider calls. */
#include "address.h"
#include "log.h"
#include "memory.h"
#include "nics.h"
#include "process.h"
#include "qp.h"
#include "settings.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PDS = 1024, CQS = 1024, VENDOR_AMAZON = 0x1d0f, PART_EFA2 = 0xefa2, LINK_UP = 5, LINK_DOWN = 3 };

/* ---- devices ---- */

struct ibv_device** ibv_get_device_list(int* number) {
  int n;
  struct nic* all = nics(&n);
  struct ibv_device** list = calloc((size_t)n + 1, sizeof *list);
  for (int i = 0; list && i < n; i++) list[i] = &all[i].device;
  if (number) *number = list ? n : 0;
  return list;
}
void ibv_free_device_list(struct ibv_device** list) { free(list); }
const char* ibv_get_device_name(struct ibv_device* device) { return device->name; }
uint64_t ibv_get_device_guid(struct ibv_device* device) {
  uint64_t guid;
  memcpy(&guid, ((struct nic*)device)->gid + 8, sizeof guid);
  return guid;
}
int ibv_get_device_index(struct ibv_device* device) { return ((struct nic*)device)->index; }

static int no_notification(struct ibv_cq* cq, int solicited_only) {
  (void)cq, (void)solicited_only;
  return EOPNOTSUPP;
}

struct ibv_context* ibv_open_device(struct ibv_device* device) {
  if (nics_open((struct nic*)device) != 0) {
    errno = ENODEV;
    return NULL;
  }
  struct ibv_context* context = calloc(1, sizeof *context);
  if (!context) return NULL;
  context->device = device;
  context->ops.post_recv = post_recv;
  context->ops.req_notify_cq = no_notification;
  context->cmd_fd = context->async_fd = -1;
  context->num_comp_vectors = 1;
  pthread_mutex_init(&context->mutex, NULL);
  return context;
}
int ibv_close_device(struct ibv_context* context) {
  free(context);
  return 0;
}

int ibv_query_device(struct ibv_context* context, struct ibv_device_attr* attributes) {
  const struct settings* set = settings();
  *attributes = (struct ibv_device_attr){
      .node_guid = ibv_get_device_guid(context->device),
      .max_mr_size = 1ull << 46,
      .page_size_cap = 4096,
      .vendor_id = VENDOR_AMAZON,
      .vendor_part_id = PART_EFA2,
      .hw_ver = PART_EFA2,
      .max_qp = QPS,
      .max_qp_wr = (int)set->sq_depth,
      .max_sge = SEND_SGES,
      .max_sge_rd = RDMA_SGES,
      .max_cq = CQS,
      .max_cqe = (int)set->cq_depth,
      .max_mr = REGIONS - 1,
      .max_pd = PDS,
      .max_ah = ADDRESSES,
      .max_pkeys = 1,
      .phys_port_cnt = 1,
  };
  snprintf(attributes->fw_ver, sizeof attributes->fw_ver, "0.0.0.0 software");
  return 0;
}

int ibv_query_port(struct ibv_context* context, uint8_t port, struct ibv_port_attr* attributes) {
  if (port != 1) return EINVAL;
  bool down = atomic_load(&nic_of(context)->control->port_down);
  *attributes = (struct ibv_port_attr){
      .state = down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
      .max_mtu = IBV_MTU_4096,
      .active_mtu = IBV_MTU_4096,
      .gid_tbl_len = 1,
      .max_msg_sz = settings()->mtu,
      .pkey_tbl_len = 1,
      .active_width = 2, /* 4 lanes of 25 Gbit/s: what an EFA says of itself */
      .active_speed = 32,
      .phys_state = down ? LINK_DOWN : LINK_UP,
  };
  return 0;
}

int ibv_query_gid(struct ibv_context* context, uint8_t port, int index, union ibv_gid* gid) {
  if (port != 1 || index != 0) {
    errno = EINVAL;
    return -1;
  }
  memcpy(gid->raw, nic_of(context)->gid, 16);
  return 0;
}

int ibv_query_pkey(struct ibv_context* context, uint8_t port, int index, uint16_t* pkey) {
  (void)context;
  if (port != 1 || index != 0) return -1;
  *pkey = 0xffff;
  return 0;
}
int ibv_get_pkey_index(struct ibv_context* context, uint8_t port, uint16_t pkey) {
  (void)context;
  return port == 1 && pkey == 0xffff ? 0 : -1;
}

/* ---- protection domains, memory, address handles ---- */

struct ibv_pd* ibv_alloc_pd(struct ibv_context* context) {
  struct ibv_pd* pd = calloc(1, sizeof *pd);
  if (pd) *pd = (struct ibv_pd){.context = context, .handle = (uint32_t)process_next_id()};
  return pd;
}
int ibv_dealloc_pd(struct ibv_pd* pd) {
  free(pd);
  return 0;
}

struct ibv_mr* ibv_reg_mr_iova2(struct ibv_pd* pd, void* memory, size_t length, uint64_t address, unsigned access) {
  return memory_register(pd, memory, length, address, access);
}
struct ibv_mr* ibv_reg_mr(struct ibv_pd* pd, void* memory, size_t length, int access) {
  return memory_register(pd, memory, length, (uintptr_t)memory, (unsigned)access);
}
int ibv_dereg_mr(struct ibv_mr* mr) { return memory_deregister(mr); }

struct ibv_ah* ibv_create_ah(struct ibv_pd* pd, struct ibv_ah_attr* attributes) { return address_create(pd, attributes); }
int ibv_destroy_ah(struct ibv_ah* ah) { return address_destroy(ah); }

/* ---- queues ---- */

int ibv_destroy_cq(struct ibv_cq* cq) { return cq_destroy((struct cq*)cq); }
int ibv_modify_qp(struct ibv_qp* qp, struct ibv_qp_attr* attributes, int mask) {
  return qp_modify((struct qp*)qp, attributes, mask);
}
int ibv_destroy_qp(struct ibv_qp* qp) { return qp_destroy((struct qp*)qp); }
struct ibv_qp_ex* ibv_qp_to_qp_ex(struct ibv_qp* qp) { return &((struct qp*)qp)->ex; }
/* None of it: SRD promises no order of bytes. */
int ibv_query_qp_data_in_order(struct ibv_qp* qp, int opcode, uint32_t flags) {
  (void)qp, (void)opcode, (void)flags;
  return 0;
}

/* ---- forks: a child may open devices of its own, and nothing has to be prepared ---- */

int ibv_fork_init(void) { return 0; }
int ibv_is_fork_initialized(void) { return 2; /* unneeded */ }

/* ---- libefa.so.1 comes in by these ---- */

struct ibv_cq_ex* efasoft_create_cq(struct ibv_context* context, const struct ibv_cq_init_attr_ex* attributes);
struct efadv_cq* efasoft_dv_cq(struct ibv_cq_ex* cq);
struct ibv_qp* efasoft_create_qp(struct ibv_context* context, struct ibv_qp_init_attr_ex* attributes, bool unsolicited);
uint16_t efasoft_address_number(const struct ibv_ah* ah);
void efasoft_query_device(struct efadv_device_attr* attributes);

struct ibv_cq_ex* efasoft_create_cq(struct ibv_context* context, const struct ibv_cq_init_attr_ex* attributes) {
  struct cq* cq = cq_create(context, attributes);
  return cq ? &cq->ex : NULL;
}
struct efadv_cq* efasoft_dv_cq(struct ibv_cq_ex* cq) { return &((struct cq*)cq)->dv; }
struct ibv_qp* efasoft_create_qp(struct ibv_context* context, struct ibv_qp_init_attr_ex* attributes, bool unsolicited) {
  struct qp* qp = qp_create(context, attributes, unsolicited);
  return qp ? &qp->ex.qp_base : NULL;
}
uint16_t efasoft_address_number(const struct ibv_ah* ah) { return address_number(ah); }

void efasoft_query_device(struct efadv_device_attr* attributes) {
  const struct settings* set = settings();
  uint32_t caps = EFADV_CAP_RNR_RETRY | EFADV_CAP_CQ_WITH_SGID;
  if (set->rdma_read) caps |= EFADV_CAP_RDMA_READ;
  if (set->rdma_write) caps |= EFADV_CAP_RDMA_WRITE;
  if (set->unsolicited) caps |= EFADV_CAP_UNSOLICITED_WRITE_RECV;
  *attributes = (struct efadv_device_attr){
      .max_sq_wr = set->sq_depth,
      .max_rq_wr = set->rq_depth,
      .max_sq_sge = SEND_SGES,
      .max_rq_sge = RECEIVE_SGES,
      .inline_buf_size = INLINE_BYTES,
      .device_caps = caps,
      .max_rdma_size = 1u << 30,
  };
}
