/* Symbols that a libfabric with other verbs users in it (verbs, librdmacm) must find to load. They say that they are not there. */
#include "abi.h"
#include "settings.h"
#include <errno.h>

static void* none(void) {
  errno = EOPNOTSUPP;
  return NULL;
}

struct ibv_mr* ibv_reg_dmabuf_mr(struct ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  (void)pd, (void)offset, (void)length, (void)iova, (void)fd, (void)access;
  return none();
}
struct ibv_comp_channel* ibv_create_comp_channel(struct ibv_context* context) {
  (void)context;
  return none();
}
int ibv_destroy_comp_channel(struct ibv_comp_channel* channel) {
  (void)channel;
  return EOPNOTSUPP;
}
int ibv_get_cq_event(struct ibv_comp_channel* channel, struct ibv_cq** cq, void** context) {
  (void)channel, (void)cq, (void)context;
  errno = EOPNOTSUPP;
  return -1;
}
void ibv_ack_cq_events(struct ibv_cq* cq, unsigned n) { (void)cq, (void)n; }

struct ibv_cq* ibv_create_cq(struct ibv_context* context, int cqe, void* cq_context, struct ibv_comp_channel* channel, int vector) {
  (void)context, (void)cqe, (void)cq_context, (void)channel, (void)vector;
  return none();
}
struct ibv_qp* ibv_create_qp(struct ibv_pd* pd, void* attributes) {
  (void)pd, (void)attributes;
  return none();
}
void* ibv_create_srq(struct ibv_pd* pd, void* attributes) {
  (void)pd, (void)attributes;
  return none();
}
int ibv_destroy_srq(void* srq) {
  (void)srq;
  return EOPNOTSUPP;
}
int ibv_attach_mcast(struct ibv_qp* qp, const union ibv_gid* gid, uint16_t lid) {
  (void)qp, (void)gid, (void)lid;
  return EOPNOTSUPP;
}
int ibv_detach_mcast(struct ibv_qp* qp, const union ibv_gid* gid, uint16_t lid) {
  (void)qp, (void)gid, (void)lid;
  return EOPNOTSUPP;
}
int ibv_query_ece(struct ibv_qp* qp, void* ece) {
  (void)qp, (void)ece;
  return EOPNOTSUPP;
}
int ibv_set_ece(struct ibv_qp* qp, void* ece) {
  (void)qp, (void)ece;
  return EOPNOTSUPP;
}
const char* ibv_wc_status_str(enum ibv_wc_status status) {
  return status == IBV_WC_SUCCESS ? "success" : "failed; the vendor code says how";
}

/* librdmacm's. It ends at the first file of a sysfs that it misses. */
const char* ibv_get_sysfs_path(void) { return settings()->sysfs ? settings()->sysfs : "/sys"; }
int ibv_read_sysfs_file(const char* folder, const char* file, char* text, size_t size) {
  (void)folder, (void)file, (void)text, (void)size;
  return -1;
}
void ibv_copy_ah_attr_from_kern(void* to, const void* from) { (void)to, (void)from; }
void ibv_copy_path_rec_from_kern(void* to, const void* from) { (void)to, (void)from; }
void ibv_copy_qp_attr_from_kern(void* to, const void* from) { (void)to, (void)from; }
