/* The verbs interface as its callers were compiled against it: the structs that cross the border of libibverbs.so.1 and libefa.so.1,
 * written down from their documented layout. Offsets are part of the interface, so each one that is used is asserted below.
 * Only 64-bit Linux: pthread types differ in size between architectures, and everything behind them moves along. */
#pragma once
#include <assert.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { IBV_SYSFS_NAME_MAX = 64, IBV_SYSFS_PATH_MAX = 256 };
enum { IBV_NODE_UNSPECIFIED = 7, IBV_TRANSPORT_UNSPECIFIED = 4 };
enum { IBV_MTU_4096 = 5, IBV_PORT_DOWN = 1, IBV_PORT_ACTIVE = 4 };
enum { IBV_QPT_UD = 4, IBV_QPT_DRIVER = 0xff };
enum { IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR };
enum { IBV_QP_STATE = 1 << 0, IBV_QP_QKEY = 1 << 6, IBV_QP_RNR_RETRY = 1 << 11 };
enum { IBV_SEND_SIGNALED = 1 << 1, IBV_SEND_INLINE = 1 << 3 };
enum { IBV_ACCESS_LOCAL_WRITE = 1, IBV_ACCESS_REMOTE_WRITE = 2, IBV_ACCESS_REMOTE_READ = 4 };
enum { IBV_WC_WITH_IMM = 1 << 1 };
enum { IBV_QP_INIT_ATTR_PD = 1 << 0, IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 1 << 6 };
enum {
  IBV_QP_EX_WITH_RDMA_WRITE = 1 << 0,
  IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 1 << 1,
  IBV_QP_EX_WITH_SEND = 1 << 2,
  IBV_QP_EX_WITH_SEND_WITH_IMM = 1 << 3,
  IBV_QP_EX_WITH_RDMA_READ = 1 << 4,
};
enum ibv_wc_opcode { IBV_WC_SEND = 0, IBV_WC_RDMA_WRITE = 1, IBV_WC_RDMA_READ = 2, IBV_WC_RECV = 128, IBV_WC_RECV_RDMA_WITH_IMM = 129 };
enum ibv_wc_status {
  IBV_WC_SUCCESS = 0,
  IBV_WC_LOC_LEN_ERR = 1,
  IBV_WC_LOC_QP_OP_ERR = 2,
  IBV_WC_LOC_PROT_ERR = 4,
  IBV_WC_WR_FLUSH_ERR = 5,
  IBV_WC_BAD_RESP_ERR = 7,
  IBV_WC_REM_INV_REQ_ERR = 9,
  IBV_WC_REM_ACCESS_ERR = 10,
  IBV_WC_REM_OP_ERR = 11,
  IBV_WC_RNR_RETRY_EXC_ERR = 13,
  IBV_WC_REM_INV_RD_REQ_ERR = 15,
  IBV_WC_REM_ABORT_ERR = 16,
  IBV_WC_RESP_TIMEOUT_ERR = 20,
  IBV_WC_GENERAL_ERR = 21,
};

/* Vendor codes of a completion, as the device writes them. */
enum efa_status {
  EFA_OK = 0,
  EFA_FLUSHED = 1,
  EFA_QP_INTERNAL_ERROR = 2,
  EFA_UNSUPPORTED_OP = 3,
  EFA_INVALID_AH = 4,
  EFA_INVALID_LKEY = 5,
  EFA_BAD_LENGTH = 6,
  EFA_REMOTE_BAD_ADDRESS = 7,
  EFA_REMOTE_ABORT = 8,
  EFA_REMOTE_BAD_DEST_QPN = 9,
  EFA_REMOTE_RNR = 10,
  EFA_REMOTE_BAD_LENGTH = 11,
  EFA_REMOTE_BAD_STATUS = 12,
  EFA_UNRESPONSIVE_REMOTE = 13,
  EFA_REMOTE_UNKNOWN_PEER = 14,
  EFA_UNREACHABLE_REMOTE = 15,
  EFA_STATUSES = 16,
};

struct ibv_context;
struct ibv_comp_channel;
struct ibv_qp;
struct ibv_cq;
struct ibv_recv_wr;

union ibv_gid {
  uint8_t raw[16];
  struct {
    uint64_t subnet_prefix, interface_id; /* big endian */
  } global;
};
struct ibv_device {
  void* reserved[2];
  int node_type, transport_type;
  char name[IBV_SYSFS_NAME_MAX], dev_name[IBV_SYSFS_NAME_MAX];
  char dev_path[IBV_SYSFS_PATH_MAX], ibdev_path[IBV_SYSFS_PATH_MAX];
};
struct ibv_device_attr {
  char fw_ver[64];
  uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
  uint32_t vendor_id, vendor_part_id, hw_ver;
  int max_qp, max_qp_wr;
  unsigned device_cap_flags;
  int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd;
  int max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap;
  int max_ee, max_rdd, max_mw, max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach;
  int max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
  uint16_t max_pkeys;
  uint8_t local_ca_ack_delay, phys_port_cnt;
};
/* The port as the exported ibv_query_port fills it: callers with a longer struct have cleared its end. */
struct ibv_port_attr {
  int state, max_mtu, active_mtu, gid_tbl_len;
  uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
  uint16_t pkey_tbl_len, lid, sm_lid;
  uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state, link_layer, flags;
};
struct ibv_context_ops {
  void* before_req_notify_cq[12];
  int (*req_notify_cq)(struct ibv_cq*, int solicited_only);
  void* before_post_recv[13];
  int (*post_recv)(struct ibv_qp*, struct ibv_recv_wr*, struct ibv_recv_wr** bad);
  void* after_post_recv[5];
};
struct ibv_context {
  struct ibv_device* device;
  struct ibv_context_ops ops;
  int cmd_fd, async_fd, num_comp_vectors;
  pthread_mutex_t mutex;
  void* abi_compat; /* null: there are no extended operations, and the callers' inline functions use the exported ones */
};
struct ibv_pd {
  struct ibv_context* context;
  uint32_t handle;
};
struct ibv_mr {
  struct ibv_context* context;
  struct ibv_pd* pd;
  void* addr;
  size_t length;
  uint32_t handle, lkey, rkey;
};
struct ibv_ah {
  struct ibv_context* context;
  struct ibv_pd* pd;
  uint32_t handle;
};
struct ibv_ah_attr {
  union ibv_gid dgid;
  uint32_t flow_label;
  uint8_t sgid_index, hop_limit, traffic_class;
  uint16_t dlid;
  uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};
struct ibv_sge {
  uint64_t addr;
  uint32_t length, lkey;
};
struct ibv_data_buf {
  void* addr;
  size_t length;
};
struct ibv_recv_wr {
  uint64_t wr_id;
  struct ibv_recv_wr* next;
  struct ibv_sge* sg_list;
  int num_sge;
};
struct ibv_cq {
  struct ibv_context* context;
  struct ibv_comp_channel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t comp_events_completed, async_events_completed;
};
struct ibv_poll_cq_attr {
  uint32_t comp_mask;
};
struct ibv_cq_ex {
  struct ibv_context* context;
  struct ibv_comp_channel* channel;
  void* cq_context;
  uint32_t handle;
  int cqe;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t comp_events_completed, async_events_completed, comp_mask;
  enum ibv_wc_status status;
  uint64_t wr_id;
  int (*start_poll)(struct ibv_cq_ex*, struct ibv_poll_cq_attr*);
  int (*next_poll)(struct ibv_cq_ex*);
  void (*end_poll)(struct ibv_cq_ex*);
  enum ibv_wc_opcode (*read_opcode)(struct ibv_cq_ex*);
  uint32_t (*read_vendor_err)(struct ibv_cq_ex*);
  uint32_t (*read_byte_len)(struct ibv_cq_ex*);
  uint32_t (*read_imm_data)(struct ibv_cq_ex*); /* big endian */
  uint32_t (*read_qp_num)(struct ibv_cq_ex*);
  uint32_t (*read_src_qp)(struct ibv_cq_ex*);
  unsigned (*read_wc_flags)(struct ibv_cq_ex*);
  uint32_t (*read_slid)(struct ibv_cq_ex*);
  uint8_t (*read_sl)(struct ibv_cq_ex*);
  uint8_t (*read_dlid_path_bits)(struct ibv_cq_ex*);
  void* after_read_dlid_path_bits[5];
};
struct ibv_cq_init_attr_ex {
  uint32_t cqe;
  void* cq_context;
  struct ibv_comp_channel* channel;
  uint32_t comp_vector;
  uint64_t wc_flags;
  uint32_t comp_mask, flags;
};
struct ibv_qp_cap {
  uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};
struct ibv_qp {
  struct ibv_context* context;
  void* qp_context;
  struct ibv_pd* pd;
  struct ibv_cq *send_cq, *recv_cq;
  void* srq;
  uint32_t handle, qp_num;
  int state, qp_type;
  pthread_mutex_t mutex;
  pthread_cond_t cond;
  uint32_t events_completed;
};
struct ibv_qp_ex {
  struct ibv_qp qp_base;
  uint64_t comp_mask, wr_id;
  unsigned wr_flags;
  void* before_wr_rdma_read[4];
  void (*wr_rdma_read)(struct ibv_qp_ex*, uint32_t rkey, uint64_t addr);
  void (*wr_rdma_write)(struct ibv_qp_ex*, uint32_t rkey, uint64_t addr);
  void (*wr_rdma_write_imm)(struct ibv_qp_ex*, uint32_t rkey, uint64_t addr, uint32_t imm);
  void (*wr_send)(struct ibv_qp_ex*);
  void (*wr_send_imm)(struct ibv_qp_ex*, uint32_t imm);
  void* before_wr_set_ud_addr[2];
  void (*wr_set_ud_addr)(struct ibv_qp_ex*, struct ibv_ah*, uint32_t qpn, uint32_t qkey);
  void* wr_set_xrc_srqn;
  void (*wr_set_inline_data)(struct ibv_qp_ex*, void*, size_t);
  void (*wr_set_inline_data_list)(struct ibv_qp_ex*, size_t, const struct ibv_data_buf*);
  void (*wr_set_sge)(struct ibv_qp_ex*, uint32_t lkey, uint64_t addr, uint32_t length);
  void (*wr_set_sge_list)(struct ibv_qp_ex*, size_t, const struct ibv_sge*);
  void (*wr_start)(struct ibv_qp_ex*);
  int (*wr_complete)(struct ibv_qp_ex*);
  void (*wr_abort)(struct ibv_qp_ex*);
  void* after_wr_abort[2];
};
struct ibv_qp_attr {
  int qp_state, cur_qp_state, path_mtu, path_mig_state;
  uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
  unsigned qp_access_flags;
  struct ibv_qp_cap cap;
  struct ibv_ah_attr ah_attr, alt_ah_attr;
  uint16_t pkey_index, alt_pkey_index;
  uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry;
  uint8_t alt_port_num, alt_timeout;
};
struct ibv_qp_init_attr_ex {
  void* qp_context;
  struct ibv_cq *send_cq, *recv_cq;
  void* srq;
  struct ibv_qp_cap cap;
  int qp_type, sq_sig_all;
  uint32_t comp_mask;
  struct ibv_pd* pd;
  void* xrcd;
  uint32_t create_flags;
  uint16_t max_tso_header;
  void* rwq_ind_tbl;
  struct {
    uint8_t function, key_length;
    uint8_t* key;
    uint64_t fields_mask;
  } rx_hash_conf;
  uint32_t source_qpn;
  uint64_t send_ops_flags;
};

/* libefa's own. They grow at the end, so callers say how long theirs is. */
enum {
  EFADV_CAP_RDMA_READ = 1 << 0,
  EFADV_CAP_RNR_RETRY = 1 << 1,
  EFADV_CAP_CQ_WITH_SGID = 1 << 2,
  EFADV_CAP_RDMA_WRITE = 1 << 3,
  EFADV_CAP_UNSOLICITED_WRITE_RECV = 1 << 4,
};
enum { EFADV_QP_UNSOLICITED_WRITE_RECV = 1 << 0 };
struct efadv_device_attr {
  uint64_t comp_mask;
  uint32_t max_sq_wr, max_rq_wr;
  uint16_t max_sq_sge, max_rq_sge, inline_buf_size, reserved;
  uint32_t device_caps, max_rdma_size;
};
struct efadv_ah_attr {
  uint64_t comp_mask;
  uint16_t ahn;
  uint8_t reserved[6];
};
struct efadv_qp_init_attr {
  uint64_t comp_mask;
  uint32_t driver_qp_type;
  uint16_t flags;
  uint8_t sl, reserved;
};
struct efadv_cq {
  uint64_t comp_mask;
  int (*wc_read_sgid)(struct efadv_cq*, union ibv_gid*);
  bool (*wc_is_unsolicited)(struct efadv_cq*);
};

static_assert(sizeof(void*) == 8, "a 64-bit interface");
static_assert(offsetof(struct ibv_device, node_type) == 16 && offsetof(struct ibv_device, name) == 24, "ibv_device");
static_assert(offsetof(struct ibv_device, dev_name) == 88 && offsetof(struct ibv_device, dev_path) == 152, "ibv_device");
static_assert(offsetof(struct ibv_device, ibdev_path) == 408 && sizeof(struct ibv_device) == 664, "ibv_device");
static_assert(offsetof(struct ibv_device_attr, max_mr_size) == 80 && offsetof(struct ibv_device_attr, vendor_part_id) == 100, "device attr");
static_assert(offsetof(struct ibv_device_attr, max_sge_rd) == 124 && offsetof(struct ibv_device_attr, max_ah) == 200, "device attr");
static_assert(offsetof(struct ibv_device_attr, phys_port_cnt) == 227 && sizeof(struct ibv_device_attr) == 232, "device attr");
static_assert(offsetof(struct ibv_port_attr, pkey_tbl_len) == 32 && offsetof(struct ibv_port_attr, flags) == 47, "ibv_port_attr");
static_assert(offsetof(struct ibv_context, ops.req_notify_cq) == 104 && offsetof(struct ibv_context, ops.post_recv) == 216, "ibv_context");
static_assert(offsetof(struct ibv_context, cmd_fd) == 264 && offsetof(struct ibv_context, mutex) == 280, "ibv_context");
static_assert(offsetof(struct ibv_context, abi_compat) == 280 + sizeof(pthread_mutex_t), "ibv_context");
static_assert(offsetof(struct ibv_mr, length) == 24 && offsetof(struct ibv_mr, rkey) == 40, "ibv_mr");
static_assert(offsetof(struct ibv_ah_attr, dlid) == 24 && sizeof(struct ibv_ah_attr) == 32, "ibv_ah_attr");
static_assert(sizeof(struct ibv_sge) == 16 && sizeof(struct ibv_data_buf) == 16 && sizeof(struct ibv_recv_wr) == 32, "lists");
enum { ABI_PTHREADS = sizeof(pthread_mutex_t) + sizeof(pthread_cond_t) };
static_assert(offsetof(struct ibv_cq, cqe) == 28 && offsetof(struct ibv_cq, mutex) == 32, "ibv_cq");
static_assert(offsetof(struct ibv_cq_ex, comp_mask) == 40 + ABI_PTHREADS, "ibv_cq_ex");
static_assert(offsetof(struct ibv_cq_ex, status) == 44 + ABI_PTHREADS && offsetof(struct ibv_cq_ex, wr_id) == 48 + ABI_PTHREADS, "ibv_cq_ex");
static_assert(offsetof(struct ibv_cq_ex, start_poll) == 56 + ABI_PTHREADS, "ibv_cq_ex");
static_assert(offsetof(struct ibv_cq_ex, read_slid) == 136 + ABI_PTHREADS && sizeof(struct ibv_cq_ex) == 200 + ABI_PTHREADS, "ibv_cq_ex");
static_assert(offsetof(struct ibv_cq_init_attr_ex, channel) == 16 && offsetof(struct ibv_cq_init_attr_ex, flags) == 44, "cq init");
static_assert(offsetof(struct ibv_qp, qp_num) == 52 && offsetof(struct ibv_qp, state) == 56 && offsetof(struct ibv_qp, mutex) == 64, "ibv_qp");
static_assert(sizeof(struct ibv_qp) == 72 + ABI_PTHREADS, "ibv_qp");
static_assert(offsetof(struct ibv_qp_ex, wr_id) == 80 + ABI_PTHREADS, "ibv_qp_ex");
static_assert(offsetof(struct ibv_qp_ex, wr_rdma_read) == 128 + ABI_PTHREADS, "ibv_qp_ex");
static_assert(offsetof(struct ibv_qp_ex, wr_set_ud_addr) == 184 + ABI_PTHREADS, "ibv_qp_ex");
static_assert(offsetof(struct ibv_qp_ex, wr_start) == 232 + ABI_PTHREADS && sizeof(struct ibv_qp_ex) == 272 + ABI_PTHREADS, "ibv_qp_ex");
static_assert(offsetof(struct ibv_qp_attr, qkey) == 16 && offsetof(struct ibv_qp_attr, cap) == 36, "ibv_qp_attr");
static_assert(offsetof(struct ibv_qp_attr, rnr_retry) == 132, "ibv_qp_attr");
static_assert(offsetof(struct ibv_qp_init_attr_ex, cap) == 32 && offsetof(struct ibv_qp_init_attr_ex, qp_type) == 52, "qp init");
static_assert(offsetof(struct ibv_qp_init_attr_ex, pd) == 64 && offsetof(struct ibv_qp_init_attr_ex, send_ops_flags) == 128, "qp init");
static_assert(offsetof(struct efadv_device_attr, inline_buf_size) == 20 && offsetof(struct efadv_device_attr, device_caps) == 24, "efadv device");
static_assert(sizeof(struct efadv_device_attr) == 32 && offsetof(struct efadv_ah_attr, ahn) == 8, "efadv");
static_assert(offsetof(struct efadv_qp_init_attr, flags) == 12 && offsetof(struct efadv_cq, wc_is_unsolicited) == 16, "efadv");
