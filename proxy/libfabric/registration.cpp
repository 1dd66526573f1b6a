#ifdef PPLX_HAVE_LIBFABRIC_HEADERS

#include "registration.h"

#include <rdma/fi_errno.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>

namespace pplx::libfabric {
namespace {

// A flag of fi_mr_regattr in fi_domain.h since 1.20, whose attributes then start with a pointer to this.
constexpr std::uint64_t kRegisterDmabuf = 1ull << 40;
struct Dmabuf {
  int fd;
  std::uint64_t offset;
  std::size_t bytes;
  void* base;
};

constexpr int kKeysTried = 8;

// Returns a random key of 64 bits, or of the provider's size, where it lets us choose it. Knowledge of a key suffices to write, so
// keys must not be guessable.
std::uint64_t random_key(const fi_domain_attr& domain) {
  const bool shorter = domain.mr_key_size > 0 && domain.mr_key_size < sizeof(std::uint64_t);
  const std::uint64_t mask = shorter ? (std::uint64_t{1} << 8 * domain.mr_key_size) - 1 : ~std::uint64_t{0};
  std::uint64_t key = 0;
  do {
    if (getrandom(&key, sizeof(key), 0) != sizeof(key)) throw FabricError("getrandom: " + std::string(std::strerror(errno)));
    key &= mask;
  } while (key == FI_KEY_NOTAVAIL);
  return key;
}

// A dmabuf needs no driver of the NIC's vendor in the kernel (nvidia-peermem), but a library, a kernel and a NIC that take it. Not
// every host has them, so a registration by address is tried next.
int ask_for_registration(const Provider& provider, Endpoint& endpoint, const DeviceMemory& part, bool on_device,
                         std::uint64_t access, fid_mr** registration) {
  const std::uint64_t key = random_key(*endpoint.info->domain_attr);
  if (!on_device) return fi_mr_reg(endpoint.domain.get(), part.base, part.bytes, access, 0, key, 0, registration, nullptr);
  iovec whole{};
  whole.iov_base = part.base;
  whole.iov_len = part.bytes;
  // The library reads fields that these headers may not know, and wants zeroes there: fi_mr_attr grew in 1.20 and in 2.0.
  union Attributes {
    fi_mr_attr attr;
    char room[256];
  } attributes{};
  static_assert(sizeof(Attributes) == 256, "room for what later libraries read");
  std::memset(&attributes, 0, sizeof(attributes));
  attributes.attr.iov_count = 1;
  attributes.attr.access = access;
  attributes.attr.requested_key = key;
  attributes.attr.iface = FI_HMEM_CUDA;
  attributes.attr.device.cuda = part.device;
  if (part.dmabuf >= 0 && provider.library->version >= version(1, 20)) {
    const Dmabuf dmabuf{part.dmabuf, part.dmabuf_offset, part.bytes, part.base};
    attributes.attr.mr_iov = reinterpret_cast<const iovec*>(&dmabuf);
    if (fi_mr_regattr(endpoint.domain.get(), &attributes.attr, kRegisterDmabuf, registration) == 0) return 0;
  }
  attributes.attr.mr_iov = &whole;
  return fi_mr_regattr(endpoint.domain.get(), &attributes.attr, 0, registration);
}

Handle<fid_mr> register_on(const Provider& provider, Endpoint& endpoint, const DeviceMemory& part, bool on_device,
                           std::uint64_t access) {
  const std::string whose = on_device ? " bytes of GPU " + std::to_string(part.device) : " bytes";
  const std::string object = std::to_string(part.bytes) + whose + " on " + endpoint.name;
  fid_mr* registration = nullptr;
  int result = -FI_ENOKEY;
  for (int attempt = 0; attempt < kKeysTried && result == -FI_ENOKEY; ++attempt)   // FI_ENOKEY: the key is in use
    result = ask_for_registration(provider, endpoint, part, on_device, access, &registration);
  if (result == -FI_ENOMEM)
    provider.fail("fi_mr_reg", object + " (is `ulimit -l`, the memory that may be locked, large enough?)", result);
  provider.check(result, "fi_mr_reg", object);
  Handle<fid_mr> owner(registration);
  if ((endpoint.info->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
    provider.check(fi_mr_bind(registration, &endpoint.ep->fid, 0), "fi_mr_bind", object);
    provider.check(fi_mr_enable(registration), "fi_mr_enable", object);
  }
  return owner;
}

}  // namespace

Region register_everywhere(const Provider& provider, std::deque<Endpoint>& endpoints, const DeviceMemory& memory, bool on_device) {
  if (memory.shared_bytes > memory.bytes)
    throw FabricError("register_memory: " + std::to_string(memory.shared_bytes) + " shared bytes of " +
                      std::to_string(memory.bytes));
  DeviceMemory shared = memory, sources = memory;
  shared.bytes = memory.shared_bytes;
  sources.base = static_cast<std::uint8_t*>(memory.base) + memory.shared_bytes;
  sources.bytes = memory.bytes - memory.shared_bytes;
  sources.dmabuf_offset += memory.shared_bytes;
  Region region;
  RegionDescription& description = region.description;
  const bool offsets_are_addresses = (endpoints.front().info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
  description.base = offsets_are_addresses ? reinterpret_cast<std::uint64_t>(memory.base) : 0;
  description.bytes = memory.shared_bytes;
  for (Endpoint& endpoint : endpoints) {
    // A receive's buffer is shared too: efa-direct wants FI_RECV of it.
    if (shared.bytes > 0)
      region.shared.push_back(register_on(provider, endpoint, shared, on_device, FI_RECV | FI_WRITE | FI_REMOTE_WRITE));
    if (sources.bytes > 0) region.sources.push_back(register_on(provider, endpoint, sources, on_device, FI_WRITE));
    const std::uint64_t key = shared.bytes > 0 ? fi_mr_key(region.shared.back().get()) : 0;
    if (key == FI_KEY_NOTAVAIL)
      throw FabricError("fi_mr_key on " + endpoint.name + ": the key is longer than 64 bits [" + provider.full_name() + "]");
    description.keys.push_back(key);
  }
  region.local.base = memory.base;
  region.local.bytes = memory.bytes;
  region.local.shared_bytes = memory.shared_bytes;
  region.local.description = encode(description);
  return region;
}

}  // namespace pplx::libfabric

#endif
