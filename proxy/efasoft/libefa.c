/* What libefa.so.1 exports: EFA's own part of the interface. */
#include "abi.h"
#include <errno.h>
#include <string.h>

struct ibv_cq_ex* efasoft_create_cq(struct ibv_context* context, const struct ibv_cq_init_attr_ex* attributes);
struct efadv_cq* efasoft_dv_cq(struct ibv_cq_ex* cq);
struct ibv_qp* efasoft_create_qp(struct ibv_context* context, struct ibv_qp_init_attr_ex* attributes, bool unsolicited);
uint16_t efasoft_address_number(const struct ibv_ah* ah);
void efasoft_query_device(struct efadv_device_attr* attributes);

/* As much as the caller's struct holds: both sides' structs have grown at the end over the years. */
static void copy_out(void* to, size_t room, const void* from, size_t size) {
  memset(to, 0, room);
  memcpy(to, from, room < size ? room : size);
}

int efadv_query_device(struct ibv_context* context, struct efadv_device_attr* attributes, uint32_t room) {
  (void)context;
  struct efadv_device_attr full;
  efasoft_query_device(&full);
  copy_out(attributes, room, &full, sizeof full);
  return 0;
}

int efadv_query_ah(struct ibv_ah* ah, struct efadv_ah_attr* attributes, uint32_t room) {
  struct efadv_ah_attr full = {.ahn = efasoft_address_number(ah)};
  copy_out(attributes, room, &full, sizeof full);
  return 0;
}

struct ibv_cq_ex* efadv_create_cq(struct ibv_context* context, struct ibv_cq_init_attr_ex* attributes, void* own, uint32_t room) {
  (void)own, (void)room; /* the source's GID and the mark of unsolicited writes can be read always */
  return efasoft_create_cq(context, attributes);
}
struct efadv_cq* efadv_cq_from_ibv_cq_ex(struct ibv_cq_ex* cq) { return efasoft_dv_cq(cq); }

struct ibv_qp* efadv_create_qp_ex(struct ibv_context* context, struct ibv_qp_init_attr_ex* attributes,
                                  struct efadv_qp_init_attr* own, uint32_t room) {
  struct efadv_qp_init_attr given = {0};
  if (own) memcpy(&given, own, room < sizeof given ? room : sizeof given);
  if (given.driver_qp_type != 0 || (given.flags & ~EFADV_QP_UNSOLICITED_WRITE_RECV)) {
    errno = EOPNOTSUPP;
    return NULL;
  }
  return efasoft_create_qp(context, attributes, given.flags & EFADV_QP_UNSOLICITED_WRITE_RECV);
}

/* The interface before efadv_create_qp_ex; no libfabric with RDMA uses it. */
struct ibv_qp* efadv_create_driver_qp(struct ibv_pd* pd, void* attributes, uint32_t type) {
  (void)pd, (void)attributes, (void)type;
  errno = EOPNOTSUPP;
  return NULL;
}
/* No queue of a device is there to write to, so callers keep to the functions above. */
int efadv_query_mr(struct ibv_mr* mr, void* attributes, uint32_t room) {
  (void)mr;
  memset(attributes, 0, room);
  return 0;
}
int efadv_query_cq(struct ibv_cq* cq, void* attributes, uint32_t room) {
  (void)cq, (void)attributes, (void)room;
  return EOPNOTSUPP;
}
int efadv_query_qp_wqs(struct ibv_qp* qp, void* send, void* receive, uint32_t room) {
  (void)qp, (void)send, (void)receive, (void)room;
  return EOPNOTSUPP;
}
