#ifdef PPLX_HAVE_LIBFABRIC_HEADERS

#include "endpoint.h"

#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <optional>

#include "shm_files.h"

namespace pplx::libfabric {
namespace {

// fi_endpoint.h has them since 1.18 and 1.19.
constexpr int kOptCudaApiPermitted = 10, kOptSharedMemoryPermitted = 11;
// A flag for writes in efa's fi_ext_efa.h since 2.6: the NIC favours their rate. Older versions of efa refuse flags of this range.
constexpr std::uint64_t kEfaHighRate = 1ull << 60;

constexpr std::size_t kMostWritesUnderWay = 4096;   // per endpoint
constexpr std::size_t kPostedReceives = 512;        // where an arriving immediate uses one up
constexpr std::size_t kCompletionQueue = 16384;     // arrivals come unasked, from every peer

void name_shm_endpoint(Endpoint& endpoint, const Provider& provider, int index) {
  endpoint.shm_name = new_shm_name(index);
  // smr_setname copies SMR_NAME_MAX bytes in no version, but wants the terminating zero.
  provider.check(fi_setname(&endpoint.ep->fid, endpoint.shm_name.data(), endpoint.shm_name.size() + 1), "fi_setname",
                 endpoint.shm_name);
}

}  // namespace

void Provider::fail(const std::string& call, const std::string& object, std::int64_t result) const {
  const int error = static_cast<int>(result < 0 ? -result : result);
  throw FabricError(call + " " + object + ": " + library->strerror(error) + " (" + std::to_string(error) + ") [" +
                    full_name() + "]");
}

void open_endpoint(Endpoint& endpoint, const Provider& provider, int index, bool device_memory) {
  fi_info* info = endpoint.info.get();
  const std::string& object = endpoint.name;
  fid_fabric* fabric = nullptr;
  provider.check(provider.library->fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric", object);
  endpoint.fabric.reset(fabric);
  fid_domain* domain = nullptr;
  provider.check(fi_domain(fabric, info, &domain, nullptr), "fi_domain", object);
  endpoint.domain.reset(domain);

  fi_cq_attr cq_attr{};
  cq_attr.format = FI_CQ_FORMAT_DATA;
  cq_attr.wait_obj = FI_WAIT_NONE;
  cq_attr.size = std::max(kCompletionQueue, info->tx_attr->size + info->rx_attr->size);
  fid_cq* cq = nullptr;
  if (fi_cq_open(domain, &cq_attr, &cq, nullptr) != 0) {
    cq_attr.size = 0;   // the provider's own choice: some devices have less
    provider.check(fi_cq_open(domain, &cq_attr, &cq, nullptr), "fi_cq_open", object);
  }
  endpoint.cq.reset(cq);

  fi_av_attr av_attr{};
  av_attr.type = info->domain_attr->av_type;
  fid_av* av = nullptr;
  provider.check(fi_av_open(domain, &av_attr, &av, nullptr), "fi_av_open", object);
  endpoint.av.reset(av);

  std::optional<ShmTurn> turn;
  if (provider.name == "shm") turn.emplace();
  fid_ep* ep = nullptr;
  provider.check(fi_endpoint(domain, info, &ep, nullptr), "fi_endpoint", object);
  endpoint.ep.reset(ep);
  if (turn) name_shm_endpoint(endpoint, provider, index);
  if (provider.is_efa()) {
    bool permitted = false;   // a library without this option has read the environment variable that the loader set
    fi_setopt(&ep->fid, FI_OPT_ENDPOINT, kOptSharedMemoryPermitted, &permitted, sizeof(permitted));
  }
  if (device_memory) {
    // A provider that calls CUDA may wait for a kernel which waits for this very provider.
    const bool permitted = false;
    const int result = fi_setopt(&ep->fid, FI_OPT_ENDPOINT, kOptCudaApiPermitted, &permitted, sizeof(permitted));
    provider.check(result, "fi_setopt(FI_OPT_CUDA_API_PERMITTED, false): GPU memory is not reached without calling CUDA,", object);
  }
  provider.check(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind(av)", object);
  provider.check(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind(cq)", object);
  provider.check(fi_enable(ep), "fi_enable", object);
  if (turn) turn->reserve(endpoint.shm_name);
  endpoint.most_under_way = std::min(kMostWritesUnderWay, std::max<std::size_t>(info->tx_attr->size, 1));
  // Not on provider efa: up to 2.6 it queues a write to a peer whose handshake is not over, and posts it later with FI_MORE still
  // set. If the batch's last write, which rings, went out before that, no doorbell rings for the queued ones, and they hang.
  endpoint.rings_doorbells = provider.name == "efa-direct" || provider.name.rfind("verbs", 0) == 0;
  if (provider.is_efa() && provider.library->version >= version(2, 6)) endpoint.write_flags |= kEfaHighRate;
}

void post_receives(Endpoint& endpoint, const Provider& provider, Scratch& scratch) {
  if (((endpoint.info->mode | endpoint.info->rx_attr->mode) & FI_RX_CQ_DATA) == 0) return;
  endpoint.receives.resize(std::min(kPostedReceives, endpoint.info->rx_attr->size));
  for (fi_context2& context : endpoint.receives) post_receive(endpoint, provider, scratch, &context);
}

void post_receive(Endpoint& endpoint, const Provider& provider, Scratch& scratch, void* context) {
  // No peer sends to it; efa-direct requires its registration all the same.
  const ssize_t result = fi_recv(endpoint.ep.get(), scratch.bytes, sizeof(scratch.bytes), endpoint.scratch_descriptor,
                                 FI_ADDR_UNSPEC, context);
  if (result != 0) provider.fail("fi_recv", endpoint.name, result);
}

Blob address_of(const Endpoint& endpoint, const Provider& provider) {
  std::size_t size = 0;
  const int result = fi_getname(&endpoint.ep->fid, nullptr, &size);
  if (result != -FI_ETOOSMALL || size == 0) provider.fail("fi_getname", endpoint.name, result);
  Blob blob(size);
  provider.check(fi_getname(&endpoint.ep->fid, blob.data(), &size), "fi_getname", endpoint.name);
  blob.resize(size);
  return blob;
}

}  // namespace pplx::libfabric

#endif
