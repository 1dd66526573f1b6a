// A libfabric with the provider "efa" and "efa-direct", without a NIC. It records its calls for test_efa.cpp, and moves nothing.
// FAKE_CUDA: none (built without CUDA), calls (reaches GPU memory only by calling CUDA); else GPU memory is reached. FAKE_DMABUF=no
// refuses dmabufs. FAKE_KEY_BYTES: keys are the caller's, of that many bytes. FAKE_VERSION: "2.6".
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

std::string log;

void note(const char* what, std::uint64_t a = 0, std::uint64_t b = 0, std::uint64_t c = 0) {
  char line[160];
  std::snprintf(line, sizeof line, "%s %llu %llu %llu\n", what, static_cast<unsigned long long>(a),
                static_cast<unsigned long long>(b), static_cast<unsigned long long>(c));
  log += line;
}

bool set_to(const char* variable, const char* value) {
  const char* is = std::getenv(variable);
  return is != nullptr && std::strcmp(is, value) == 0;
}

template <typename T>
T* zeroed() {
  return static_cast<T*>(std::calloc(1, sizeof(T)));
}

template <typename T>
void copy(T* to, const T* from) {
  if (from != nullptr) *to = *from;
}

int close_any(fid* object) {
  std::free(object);
  return 0;
}
int bind_any(fid*, fid*, std::uint64_t) { return 0; }
int control_any(fid*, int, void*) { return 0; }

template <typename Object>
Object* made() {
  static fi_ops ops{};
  ops.size = sizeof ops;
  ops.close = close_any;
  ops.bind = bind_any;
  ops.control = control_any;
  auto* object = zeroed<Object>();
  object->fid.ops = &ops;
  return object;
}

std::uint64_t keys = 100;

int registered(fid_mr** out) {
  *out = made<fid_mr>();
  (*out)->key = ++keys;
  return 0;
}
int reg(fid*, const void*, std::size_t bytes, std::uint64_t access, std::uint64_t, std::uint64_t key, std::uint64_t, fid_mr** out,
        void*) {
  note("reg", bytes, access, key);
  return registered(out);
}
int regattr(fid*, const fi_mr_attr* attr, std::uint64_t flags, fid_mr** out) {
  if (attr->iface != FI_HMEM_CUDA || attr->iov_count != 1) return -FI_EINVAL;
  // Later libraries read this behind the fields of these headers.
  const auto* words = reinterpret_cast<const std::uint64_t*>(attr + 1);
  for (int i = 0; i < 4; ++i)
    if (words[i] != 0) return -FI_EINVAL;
  if ((flags & 1ull << 40) != 0) {
    struct Dmabuf {
      int fd;
      std::uint64_t offset;
      std::size_t bytes;
      void* base;
    };
    Dmabuf dmabuf;
    std::memcpy(&dmabuf, attr->mr_iov, sizeof dmabuf);
    note("regattr dmabuf", static_cast<std::uint64_t>(dmabuf.fd), dmabuf.offset, dmabuf.bytes);
    note("access", attr->access, attr->requested_key);
    return set_to("FAKE_DMABUF", "no") ? -FI_EOPNOTSUPP : registered(out);
  }
  note("regattr pointer", reinterpret_cast<std::uint64_t>(attr->mr_iov->iov_base), attr->mr_iov->iov_len,
       static_cast<std::uint64_t>(attr->device.cuda));
  return registered(out);
}

int setopt(fid*, int, int option, const void* value, std::size_t) {
  note("setopt", static_cast<std::uint64_t>(option), *static_cast<const bool*>(value));
  return option == 10 && set_to("FAKE_CUDA", "calls") ? -FI_EOPNOTSUPP : 0;
}
int getname(fid*, void* address, std::size_t* size) {
  const bool room = *size >= 8;
  *size = 8;
  if (!room) return -FI_ETOOSMALL;
  std::memcpy(address, "address", 8);
  return 0;
}
ssize_t writemsg(fid_ep*, const fi_msg_rma* message, std::uint64_t flags) {
  note("write", flags, message->msg_iov->iov_len, message->rma_iov->key);
  return 0;
}
ssize_t cq_read(fid_cq*, void*, std::size_t) { return -FI_EAGAIN; }
int av_insert(fid_av*, const void*, std::size_t, fi_addr_t* out, std::uint64_t, void*) {
  note("insert");
  *out = 1;
  return 1;
}

int open_endpoint(fid_domain*, fi_info*, fid_ep** out, void*) {
  static fi_ops_ep ops{};
  static fi_ops_cm cm{};
  static fi_ops_rma rma{};
  ops.setopt = setopt;
  cm.getname = getname;
  rma.writemsg = writemsg;
  *out = made<fid_ep>();
  (*out)->ops = &ops;
  (*out)->cm = &cm;
  (*out)->rma = &rma;
  return 0;
}
int open_cq(fid_domain*, fi_cq_attr*, fid_cq** out, void*) {
  static fi_ops_cq ops{};
  ops.read = cq_read;
  *out = made<fid_cq>();
  (*out)->ops = &ops;
  return 0;
}
int open_av(fid_domain*, fi_av_attr*, fid_av** out, void*) {
  static fi_ops_av ops{};
  ops.insert = av_insert;
  *out = made<fid_av>();
  (*out)->ops = &ops;
  return 0;
}
int open_domain(fid_fabric*, fi_info*, fid_domain** out, void*) {
  static fi_ops_domain ops{};
  static fi_ops_mr mr{};
  ops.av_open = open_av;
  ops.cq_open = open_cq;
  ops.endpoint = open_endpoint;
  mr.reg = reg;
  mr.regattr = regattr;
  *out = made<fid_domain>();
  (*out)->ops = &ops;
  (*out)->mr = &mr;
  return 0;
}

}  // namespace

extern "C" {

const char* fake_log() { return log.c_str(); }
void fake_forget() { log.clear(); }

std::uint32_t fi_version() {
  const char* version = std::getenv("FAKE_VERSION");
  unsigned major = 2, minor = 6;
  if (version != nullptr) std::sscanf(version, "%u.%u", &major, &minor);
  return major << 16 | minor;
}

const char* fi_strerror(int error) { return error == FI_EOPNOTSUPP ? "Operation not supported" : "an error"; }
char* fi_tostr(const void*, fi_type) { return nullptr; }

void fi_freeinfo(fi_info* info) {
  while (info != nullptr) {
    fi_info* next = info->next;
    std::free(info->fabric_attr->name);
    std::free(info->fabric_attr->prov_name);
    std::free(info->domain_attr->name);
    std::free(info->fabric_attr);
    std::free(info->domain_attr);
    std::free(info->ep_attr);
    std::free(info->tx_attr);
    std::free(info->rx_attr);
    std::free(info);
    info = next;
  }
}

fi_info* fi_dupinfo(const fi_info* from) {
  auto* info = zeroed<fi_info>();
  if (from != nullptr) *info = *from;
  info->next = nullptr;
  info->fabric_attr = zeroed<fi_fabric_attr>();
  info->domain_attr = zeroed<fi_domain_attr>();
  info->ep_attr = zeroed<fi_ep_attr>();
  info->tx_attr = zeroed<fi_tx_attr>();
  info->rx_attr = zeroed<fi_rx_attr>();
  if (from == nullptr) return info;
  copy(info->fabric_attr, from->fabric_attr);
  copy(info->domain_attr, from->domain_attr);
  copy(info->ep_attr, from->ep_attr);
  copy(info->tx_attr, from->tx_attr);
  copy(info->rx_attr, from->rx_attr);
  for (char** text : {&info->fabric_attr->name, &info->fabric_attr->prov_name, &info->domain_attr->name})
    if (*text != nullptr) *text = strdup(*text);
  return info;
}

int fi_getinfo(std::uint32_t, const char*, const char*, std::uint64_t, const fi_info* hints, fi_info** out) {
  *out = nullptr;
  if (hints == nullptr || std::strcmp(hints->fabric_attr->prov_name, "efa") != 0) return -FI_ENODATA;
  if ((hints->caps & FI_HMEM) != 0 && set_to("FAKE_CUDA", "none")) return -FI_ENODATA;
  for (const char* fabric : {"efa-direct", "efa"}) {
    fi_info* info = fi_dupinfo(nullptr);
    info->caps = hints->caps;
    info->fabric_attr->name = strdup(fabric);
    info->fabric_attr->prov_name = strdup("efa");
    info->domain_attr->name = strdup("fake0-rdm");
    info->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    if (const char* bytes = std::getenv("FAKE_KEY_BYTES")) {
      info->domain_attr->mr_mode &= ~FI_MR_PROV_KEY;
      info->domain_attr->mr_key_size = static_cast<std::size_t>(std::atoi(bytes));
    }
    info->tx_attr->size = info->rx_attr->size = 64;
    info->ep_attr->max_msg_size = 1 << 30;
    info->next = *out;
    *out = info;
  }
  return 0;
}

int fi_fabric(fi_fabric_attr*, fid_fabric** out, void*) {
  static fi_ops_fabric ops{};
  ops.domain = open_domain;
  *out = made<fid_fabric>();
  (*out)->ops = &ops;
  return 0;
}

}
