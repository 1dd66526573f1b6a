#include "libfabric_fabric.h"

#ifdef PPLX_HAVE_LIBFABRIC_HEADERS

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>

#include "blobs.h"

namespace pplx {
namespace {

using libfabric::Address;
using libfabric::Library;
using libfabric::RegionDescription;

// What headers of 1.17 do not have yet. Of fi_endpoint.h since 1.18 and 1.19:
constexpr int kOptCudaApiPermitted = 10, kOptSharedMemoryPermitted = 11;
// Of fi_domain.h since 1.20: a flag of fi_mr_regattr, whose attributes then start with a pointer to this.
constexpr std::uint64_t kRegisterDmabuf = 1ull << 40;
struct Dmabuf {
  int fd;
  std::uint64_t offset;
  std::size_t bytes;
  void* base;
};
// Of efa's fi_ext_efa.h since 2.6, a flag of writes: the NIC favours their rate. efa before that knows no flags of this range.
constexpr std::uint64_t kEfaHighRate = 1ull << 60;

constexpr std::size_t kMostWritesUnderWay = 4096;   // per endpoint
constexpr std::size_t kPostedReceives = 512;        // where an arriving immediate uses one up
constexpr std::size_t kCompletionQueue = 16384;     // arrivals come unasked, from every peer
constexpr int kReadAtOnce = 64;
constexpr std::size_t kErrorsKept = 64;
constexpr std::size_t kScratchBytes = 64;

struct CloseFid {
  template <class Object>
  void operator()(Object* object) const {
    fi_close(&object->fid);
  }
};
template <class Object>
using Handle = std::unique_ptr<Object, CloseFid>;

// What the provider gets as context. Providers with FI_CONTEXT2 write into the first member.
struct Operation {
  fi_context2 provider_use;
  std::uint64_t context;
  int peer;
  bool under_way;
  bool forgotten;      // its peer was removed: reported already
};

class Operations {
 public:
  Operation* take() {
    if (free_.empty()) {
      all_.emplace_back();
      return &all_.back();
    }
    Operation* operation = free_.back();
    free_.pop_back();
    return operation;
  }
  void give_back(Operation* operation) {
    operation->under_way = false;
    free_.push_back(operation);
  }
  // Error entries of some providers carry contexts that are not ours.
  Operation* find(void* context) {
    for (Operation& operation : all_) {
      if (&operation == context && operation.under_way) return &operation;
    }
    return nullptr;
  }
  std::deque<Operation>& all() { return all_; }

 private:
  std::deque<Operation> all_;          // a deque: addresses stay
  std::vector<Operation*> free_;
};

// The order of members is the order of opening; they close the other way round.
struct Endpoint {
  std::string name;
  libfabric::Info info;
  std::string shm_name;
  Operations operations;
  std::size_t under_way = 0;
  std::size_t most_under_way = 0;
  bool rings_doorbells = false;                // a device: writes can share one
  std::uint64_t write_flags = FI_REMOTE_CQ_DATA | FI_COMPLETION;
  std::vector<fi_context2> receives;
  void* scratch_descriptor = nullptr;
  Handle<fid_fabric> fabric;
  Handle<fid_domain> domain;
  Handle<fid_cq> cq;
  Handle<fid_av> av;
  Handle<fid_ep> ep;
};

struct Region {
  LocalRegion local;
  std::vector<Handle<fid_mr>> registrations;   // by endpoint
};

struct Peer {
  bool alive = false;
  Address address;
  RemoteRegion scratch;
  std::vector<fi_addr_t> addresses;            // by our endpoint
};

struct ErrorText {
  int endpoint;
  bool has_context;
  std::uint64_t context;
  std::string text;
};

// What fi_writemsg says of a call that is wrong whoever the peer is. All else is about the connection, and every provider has its own code
// for a peer that is gone: ENOTCONN, ECONNREFUSED, EIO, and sockets ENOENT.
bool is_a_mistake(int error) {
  switch (error) {
    case FI_EINVAL: case FI_EMSGSIZE: case FI_ETOOSMALL: case FI_ENOSYS: case FI_EOPNOTSUPP: case FI_EBADFLAGS: case FI_EACCES: case FI_ENOKEY:
    case FI_EKEYREJECTED: case FI_EOPBADSTATE: case FI_ENOMEM: case EFAULT: case EPERM:
      return true;
    default:
      return false;
  }
}

RemoteRegion to_remote(const RegionDescription& description) {
  RemoteRegion remote;
  remote.base = description.base;
  remote.bytes = description.bytes;
  std::copy(description.keys.begin(), description.keys.end(), remote.key);
  return remote;
}

}  // namespace

struct LibfabricFabric::State {
  const Library* library = nullptr;
  std::string provider, why;
  int cpu = -1;
  bool device_memory = false;
  std::deque<Endpoint> endpoints;
  std::vector<Region> regions;                 // by id; after the endpoints, so that they close before the domains
  std::uint64_t next_key = 1;
  bool offsets_are_addresses = false;
  std::vector<Peer> peers;
  std::deque<Completion> ready;                // Failed completions that are not the provider's
  std::deque<ErrorText> errors;
  int next_endpoint = 0;                       // whose queue is read first
  alignas(64) std::uint8_t scratch[kScratchBytes] = {};
  LocalRegion scratch_region;
  RegionDescription scratch_description;

  ~State() {
    // Endpoints first: registered memory must not go while one may still use it. MR_ENDPOINT registrations belong to theirs and go before.
    for (Endpoint& endpoint : endpoints) {
      if ((endpoint.info->domain_attr->mr_mode & FI_MR_ENDPOINT) == 0) endpoint.ep.reset();
    }
    regions.clear();
  }

  std::string full_name() const { return provider + " (libfabric " + libfabric::version_text(library->version) + ")"; }

  [[noreturn]] void fail(const std::string& call, const std::string& object, std::int64_t result) const {
    const int error = static_cast<int>(result < 0 ? -result : result);
    throw FabricError(call + " " + object + ": " + library->strerror(error) + " (" + std::to_string(error) + ") [" + full_name() + "]");
  }
  void check(std::int64_t result, const char* call, const std::string& object) const {
    if (result != 0) fail(call, object, result);
  }

  void open_endpoint(Endpoint& endpoint, int index);
  void name_shm_endpoint(Endpoint& endpoint, int index);
  void post_receives(Endpoint& endpoint);
  void post_receive(Endpoint& endpoint, void* context);
  Blob endpoint_address(const Endpoint& endpoint) const;
  RegionDescription register_everywhere(const DeviceMemory& memory, bool on_device, LocalRegion& out);
  int register_on(Endpoint& endpoint, const DeviceMemory& memory, bool on_device, std::uint64_t key, fid_mr** registration) const;
  const Peer& peer_of(int peer, const char* what) const;
  void remember(const Completion& completion, std::string text);
  void fail_write(int endpoint, std::uint64_t context, int error, std::string text);
  int read_errors(int index, Completion* out, int capacity);
  bool take(int index, const fi_cq_data_entry& entry, Completion& out);
};

void LibfabricFabric::State::open_endpoint(Endpoint& endpoint, int index) {
  fi_info* info = endpoint.info.get();
  const std::string& object = endpoint.name;
  fid_fabric* fabric = nullptr;
  check(library->fabric(info->fabric_attr, &fabric, nullptr), "fi_fabric", object);
  endpoint.fabric.reset(fabric);
  fid_domain* domain = nullptr;
  check(fi_domain(fabric, info, &domain, nullptr), "fi_domain", object);
  endpoint.domain.reset(domain);

  fi_cq_attr cq_attr{};
  cq_attr.format = FI_CQ_FORMAT_DATA;
  cq_attr.wait_obj = FI_WAIT_NONE;
  cq_attr.size = std::max(kCompletionQueue, info->tx_attr->size + info->rx_attr->size);
  fid_cq* cq = nullptr;
  if (fi_cq_open(domain, &cq_attr, &cq, nullptr) != 0) {
    cq_attr.size = 0;   // the provider's own choice: some devices have less
    check(fi_cq_open(domain, &cq_attr, &cq, nullptr), "fi_cq_open", object);
  }
  endpoint.cq.reset(cq);

  fi_av_attr av_attr{};
  av_attr.type = info->domain_attr->av_type;
  fid_av* av = nullptr;
  check(fi_av_open(domain, &av_attr, &av, nullptr), "fi_av_open", object);
  endpoint.av.reset(av);

  fid_ep* ep = nullptr;
  check(fi_endpoint(domain, info, &ep, nullptr), "fi_endpoint", object);
  endpoint.ep.reset(ep);
  if (provider == "shm") name_shm_endpoint(endpoint, index);
  if (provider.rfind("efa", 0) == 0) {
    bool permitted = false;   // a library without this option has read the environment variable that the loader set
    fi_setopt(&ep->fid, FI_OPT_ENDPOINT, kOptSharedMemoryPermitted, &permitted, sizeof(permitted));
  }
  if (device_memory) {
    // A provider that calls CUDA may wait for a kernel which waits for this very provider.
    const bool permitted = false;
    const int result = fi_setopt(&ep->fid, FI_OPT_ENDPOINT, kOptCudaApiPermitted, &permitted, sizeof(permitted));
    check(result, "fi_setopt(FI_OPT_CUDA_API_PERMITTED, false): GPU memory is not reached without calling CUDA,", object);
  }
  check(fi_ep_bind(ep, &av->fid, 0), "fi_ep_bind(av)", object);
  check(fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind(cq)", object);
  check(fi_enable(ep), "fi_enable", object);
  endpoint.most_under_way = std::min(kMostWritesUnderWay, std::max<std::size_t>(info->tx_attr->size, 1));
  endpoint.rings_doorbells = provider.rfind("efa", 0) == 0 || provider.rfind("verbs", 0) == 0;
  if (provider.rfind("efa", 0) == 0 && library->version >= libfabric::version(2, 6)) endpoint.write_flags |= kEfaHighRate;
}

void LibfabricFabric::State::name_shm_endpoint(Endpoint& endpoint, int index) {
  endpoint.shm_name = libfabric::new_shm_name(index);
  // smr_setname copies SMR_NAME_MAX bytes in no version, but wants the terminating zero.
  check(fi_setname(&endpoint.ep->fid, endpoint.shm_name.data(), endpoint.shm_name.size() + 1), "fi_setname", endpoint.shm_name);
}

void LibfabricFabric::State::post_receives(Endpoint& endpoint) {
  if (((endpoint.info->mode | endpoint.info->rx_attr->mode) & FI_RX_CQ_DATA) == 0) return;
  endpoint.receives.resize(std::min(kPostedReceives, endpoint.info->rx_attr->size));
  for (fi_context2& context : endpoint.receives) post_receive(endpoint, &context);
}

void LibfabricFabric::State::post_receive(Endpoint& endpoint, void* context) {
  // Nobody sends to it; efa-direct wants it registered all the same.
  const ssize_t result = fi_recv(endpoint.ep.get(), scratch, sizeof(scratch), endpoint.scratch_descriptor, FI_ADDR_UNSPEC, context);
  if (result != 0) fail("fi_recv", endpoint.name, result);
}

Blob LibfabricFabric::State::endpoint_address(const Endpoint& endpoint) const {
  std::size_t size = 0;
  const int result = fi_getname(&endpoint.ep->fid, nullptr, &size);
  if (result != -FI_ETOOSMALL || size == 0) fail("fi_getname", endpoint.name, result);
  Blob blob(size);
  check(fi_getname(&endpoint.ep->fid, blob.data(), &size), "fi_getname", endpoint.name);
  blob.resize(size);
  return blob;
}

// A dmabuf needs no driver of the NIC's vendor in the kernel (nvidia-peermem), but a library, a kernel and a NIC that take it. Not
// every host has them, so a registration by address is tried next.
int LibfabricFabric::State::register_on(Endpoint& endpoint, const DeviceMemory& memory, bool on_device, std::uint64_t key,
                                        fid_mr** registration) const {
  constexpr std::uint64_t kAccess = FI_RECV | FI_WRITE | FI_REMOTE_WRITE;
  if (!on_device) return fi_mr_reg(endpoint.domain.get(), memory.base, memory.bytes, kAccess, 0, key, 0, registration, nullptr);
  iovec whole{};
  whole.iov_base = memory.base;
  whole.iov_len = memory.bytes;
  // The library reads fields that these headers may not know, and wants zeroes there: fi_mr_attr grew in 1.20 and in 2.0.
  union Attributes {
    fi_mr_attr attr;
    char room[256];
  } attributes{};
  static_assert(sizeof(Attributes) == 256, "room for what later libraries read");
  std::memset(&attributes, 0, sizeof(attributes));
  attributes.attr.iov_count = 1;
  attributes.attr.access = kAccess;
  attributes.attr.requested_key = key;
  attributes.attr.iface = FI_HMEM_CUDA;
  attributes.attr.device.cuda = memory.device;
  if (memory.dmabuf >= 0 && library->version >= libfabric::version(1, 20)) {
    const Dmabuf dmabuf{memory.dmabuf, memory.dmabuf_offset, memory.bytes, memory.base};
    attributes.attr.mr_iov = reinterpret_cast<const iovec*>(&dmabuf);
    if (fi_mr_regattr(endpoint.domain.get(), &attributes.attr, kRegisterDmabuf, registration) == 0) return 0;
  }
  attributes.attr.mr_iov = &whole;
  return fi_mr_regattr(endpoint.domain.get(), &attributes.attr, 0, registration);
}

RegionDescription LibfabricFabric::State::register_everywhere(const DeviceMemory& memory, bool on_device, LocalRegion& out) {
  void* const base = memory.base;
  const std::size_t bytes = memory.bytes;
  Region region;
  RegionDescription description;
  description.base = offsets_are_addresses ? reinterpret_cast<std::uint64_t>(base) : 0;
  description.bytes = bytes;
  const std::uint64_t wanted_key = next_key++;
  for (Endpoint& endpoint : endpoints) {
    const std::string whose = on_device ? " bytes of GPU " + std::to_string(memory.device) : " bytes";
    const std::string object = std::to_string(bytes) + whose + " on " + endpoint.name;
    fid_mr* registration = nullptr;
    const int result = register_on(endpoint, memory, on_device, wanted_key, &registration);
    if (result == -FI_ENOMEM) fail("fi_mr_reg", object + " (is `ulimit -l`, the memory that may be locked, large enough?)", result);
    check(result, "fi_mr_reg", object);
    region.registrations.emplace_back(registration);
    if ((endpoint.info->domain_attr->mr_mode & FI_MR_ENDPOINT) != 0) {
      check(fi_mr_bind(registration, &endpoint.ep->fid, 0), "fi_mr_bind", object);
      check(fi_mr_enable(registration), "fi_mr_enable", object);
    }
    const std::uint64_t key = fi_mr_key(registration);
    if (key == FI_KEY_NOTAVAIL) throw FabricError("fi_mr_key " + object + ": the key is longer than 64 bits [" + full_name() + "]");
    description.keys.push_back(key);
  }
  region.local.id = static_cast<int>(regions.size());
  region.local.base = base;
  region.local.bytes = bytes;
  region.local.description = libfabric::encode(description);
  out = region.local;
  regions.push_back(std::move(region));
  return description;
}

const Peer& LibfabricFabric::State::peer_of(int peer, const char* what) const {
  if (peer < 0 || static_cast<std::size_t>(peer) >= peers.size() || !peers[static_cast<std::size_t>(peer)].alive)
    throw FabricError(std::string(what) + ": there is no peer " + std::to_string(peer) + " (never inserted, or removed) [" + full_name() + "]");
  return peers[static_cast<std::size_t>(peer)];
}

void LibfabricFabric::State::remember(const Completion& completion, std::string text) {
  if (errors.size() == kErrorsKept) errors.pop_front();
  errors.push_back({completion.endpoint, completion.has_context, completion.context, std::move(text)});
}

void LibfabricFabric::State::fail_write(int endpoint, std::uint64_t context, int error, std::string text) {
  Completion completion;
  completion.kind = Completion::Kind::Failed;
  completion.endpoint = endpoint;
  completion.context = context;
  completion.error = error;
  remember(completion, std::move(text));
  ready.push_back(completion);
}

// One completion of ours, or false when it is nobody's.
bool LibfabricFabric::State::take(int index, const fi_cq_data_entry& entry, Completion& out) {
  Endpoint& endpoint = endpoints[static_cast<std::size_t>(index)];
  out = Completion{};
  out.endpoint = index;
  // By FI_WRITE and not by FI_REMOTE_CQ_DATA or FI_RMA: sockets sets the former on both sides, rxm of 1.17 the latter on neither.
  if ((entry.flags & FI_WRITE) != 0) {
    auto* operation = static_cast<Operation*>(entry.op_context);
    const bool forgotten = operation->forgotten;
    out.kind = Completion::Kind::Sent;
    out.context = operation->context;
    if (!forgotten) --endpoint.under_way;
    endpoint.operations.give_back(operation);
    return !forgotten;
  }
  if (!endpoint.receives.empty() && entry.op_context >= endpoint.receives.data() && entry.op_context <= &endpoint.receives.back())
    post_receive(endpoint, entry.op_context);
  if ((entry.flags & FI_REMOTE_CQ_DATA) == 0) return false;   // nothing that a peer of ours sends
  out.kind = Completion::Kind::Arrived;
  out.has_context = false;
  out.immediate = static_cast<std::uint32_t>(entry.data);
  return true;
}

int LibfabricFabric::State::read_errors(int index, Completion* out, int capacity) {
  Endpoint& endpoint = endpoints[static_cast<std::size_t>(index)];
  int written = 0;
  while (written < capacity) {
    // The library fills in fields that these headers may not know: fi_cq_err_entry grew in 1.20.
    union {
      fi_cq_err_entry entry;
      char room[256];
    } error{};
    const ssize_t result = fi_cq_readerr(endpoint.cq.get(), &error.entry, 0);
    if (result == -FI_EAGAIN || result == 0) break;
    if (result < 0) fail("fi_cq_readerr", endpoint.name, result);
    char room[256] = {};
    const char* words = fi_cq_strerror(endpoint.cq.get(), error.entry.prov_errno, error.entry.err_data, room, sizeof(room));
    std::string text = std::string(library->strerror(error.entry.err)) + " (" + std::to_string(error.entry.err) + ")";
    if (words != nullptr && *words != '\0' && text.rfind(words, 0) != 0) text += std::string(", provider says '") + words + "'";
    text += " [" + endpoint.name + ", " + full_name() + "]";
    if (error.entry.err == FI_EOVERRUN) throw FabricError("completion queue of " + endpoint.name + " overran, completions are lost: " + text);

    Completion completion;
    completion.kind = Completion::Kind::Failed;
    completion.endpoint = index;
    completion.error = error.entry.err;
    Operation* operation = endpoint.operations.find(error.entry.op_context);
    completion.has_context = operation != nullptr;
    if (operation != nullptr) {
      const bool forgotten = operation->forgotten;
      completion.context = operation->context;
      text = "write to peer " + std::to_string(operation->peer) + ": " + text;
      if (!forgotten) --endpoint.under_way;
      endpoint.operations.give_back(operation);
      if (forgotten) continue;
    }
    remember(completion, std::move(text));
    out[written++] = completion;
  }
  return written;
}

LibfabricFabric::LibfabricFabric(const libfabric::Options& options) : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.library = &libfabric::library(options.wheels);
  libfabric::Choice choice = libfabric::choose(*state.library, options);
  state.provider = choice.provider;
  state.why = choice.why;
  state.cpu = choice.cpu;
  state.device_memory = options.device_memory;
  if (state.provider == "shm") libfabric::cleanup_dead_processes();
  for (libfabric::Nic& nic : choice.nics) {
    Endpoint& endpoint = state.endpoints.emplace_back();
    endpoint.name = nic.name;
    endpoint.info = std::move(nic.info);
    state.open_endpoint(endpoint, static_cast<int>(state.endpoints.size()) - 1);
  }
  state.offsets_are_addresses = (state.endpoints.front().info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0;
  state.scratch_description = state.register_everywhere({state.scratch, sizeof(state.scratch)}, false, state.scratch_region);
  for (std::size_t index = 0; index < state.endpoints.size(); ++index) {
    state.endpoints[index].scratch_descriptor = fi_mr_desc(state.regions.front().registrations[index].get());
    state.post_receives(state.endpoints[index]);
  }
}

LibfabricFabric::~LibfabricFabric() = default;

void LibfabricFabric::close() { state_.reset(); }

LibfabricFabric::State& LibfabricFabric::open() const {
  if (state_ == nullptr) throw FabricError("this fabric is closed");
  return *state_;
}

std::string LibfabricFabric::name() const { return open().full_name(); }
std::string LibfabricFabric::provider() const { return open().provider; }
std::string LibfabricFabric::why_these() const { return open().why; }
int LibfabricFabric::proxy_cpu() const { return open().cpu; }
int LibfabricFabric::endpoints() const { return static_cast<int>(open().endpoints.size()); }

std::string LibfabricFabric::endpoint_name(int endpoint) const {
  const State& state = open();
  if (endpoint < 0 || endpoint >= endpoints()) throw FabricError("endpoint_name: there is no endpoint " + std::to_string(endpoint));
  return state.endpoints[static_cast<std::size_t>(endpoint)].name;
}

std::size_t LibfabricFabric::max_write_bytes() const {
  std::size_t most = SIZE_MAX;
  for (const Endpoint& endpoint : open().endpoints) most = std::min(most, endpoint.info->ep_attr->max_msg_size);
  return most;
}

std::vector<std::string> LibfabricFabric::shm_names() const {
  std::vector<std::string> names;
  for (const Endpoint& endpoint : open().endpoints) {
    if (!endpoint.shm_name.empty()) names.push_back(endpoint.shm_name);
  }
  return names;
}

void LibfabricFabric::abandon() const { libfabric::remove_shm_files(shm_names()); }

Blob LibfabricFabric::address() const {
  const State& state = open();
  Address address;
  address.provider = state.provider;
  address.host = libfabric::host_id();
  address.pid_namespace = libfabric::pid_namespace();
  address.pid = static_cast<std::uint32_t>(getpid());
  address.start_time = libfabric::process_start_time(address.pid);
  for (const Endpoint& endpoint : state.endpoints) address.endpoints.push_back(state.endpoint_address(endpoint));
  address.shm_names = shm_names();
  address.scratch = state.scratch_description;
  return libfabric::encode(address);
}

void LibfabricFabric::insert_peer(int peer, const Blob& blob) {
  State& state = open();
  const std::string object = "peer " + std::to_string(peer);
  if (peer < 0) throw FabricError("insert_peer: " + object);
  Peer fresh;
  fresh.address = libfabric::decode_address(blob);
  const Address& address = fresh.address;
  if (address.provider != state.provider)
    throw FabricError("insert_peer: " + object + " uses provider " + address.provider + ", this process " + state.full_name());
  if (address.endpoints.empty() || address.scratch.keys.size() != address.endpoints.size())
    throw FabricError("insert_peer: the address of " + object + " is not complete");
  if (state.provider == "shm") {
    if (address.host != libfabric::host_id()) throw FabricError("insert_peer: " + object + " is on another host, which shm does not reach");
    for (const std::string& file : address.shm_names) {
      if (access(("/dev/shm/" + file).c_str(), F_OK) != 0)
        throw FabricError("insert_peer: /dev/shm/" + file + " of " + object + " is not visible here: it is gone, or in a container with its own /dev/shm");
    }
  }
  if (static_cast<std::size_t>(peer) < state.peers.size() && state.peers[static_cast<std::size_t>(peer)].alive)
    throw FabricError("insert_peer: there is a " + object + " already");

  // Our endpoint i writes to its endpoint i mod theirs. efa-direct drops a write whose initiator the target does not know, so every endpoint
  // of the peer that will write to ours is inserted too.
  const std::size_t ours = state.endpoints.size(), theirs = address.endpoints.size();
  for (std::size_t mine = 0; mine < ours; ++mine) {
    const Endpoint& endpoint = state.endpoints[mine];
    fi_addr_t target = FI_ADDR_UNSPEC;
    for (std::size_t other = 0; other < theirs; ++other) {
      if (other != mine % theirs && other % ours != mine) continue;
      fi_addr_t inserted = FI_ADDR_UNSPEC;
      const int result = fi_av_insert(endpoint.av.get(), address.endpoints[other].data(), 1, &inserted, 0, nullptr);
      if (result != 1) state.fail("fi_av_insert", object + " on " + endpoint.name, result < 0 ? result : FI_EADDRNOTAVAIL);
      if (other == mine % theirs) target = inserted;
    }
    fresh.addresses.push_back(target);
  }
  fresh.scratch = to_remote(address.scratch);
  fresh.alive = true;
  if (state.peers.size() <= static_cast<std::size_t>(peer)) state.peers.resize(static_cast<std::size_t>(peer) + 1);
  state.peers[static_cast<std::size_t>(peer)] = std::move(fresh);
}

void LibfabricFabric::remove_peer(int peer) {
  State& state = open();
  state.peer_of(peer, "remove_peer");
  state.peers[static_cast<std::size_t>(peer)].alive = false;
  for (std::size_t index = 0; index < state.endpoints.size(); ++index) {
    Endpoint& endpoint = state.endpoints[index];
    for (Operation& operation : endpoint.operations.all()) {
      if (!operation.under_way || operation.forgotten || operation.peer != peer) continue;
      operation.forgotten = true;
      --endpoint.under_way;
      state.fail_write(static_cast<int>(index), operation.context, FI_ECONNABORTED,
                       "write to peer " + std::to_string(peer) + ": the peer was removed [" + endpoint.name + ", " + state.full_name() + "]");
    }
  }
  if (state.provider == "shm") libfabric::cleanup_dead_peer(libfabric::encode(state.peers[static_cast<std::size_t>(peer)].address));
}

LocalRegion LibfabricFabric::register_memory(void* base, std::size_t bytes) {
  LocalRegion region;
  open().register_everywhere({base, bytes}, false, region);
  return region;
}

LocalRegion LibfabricFabric::register_device_memory(const DeviceMemory& memory) {
  if (!open().device_memory) return Fabric::register_device_memory(memory);
  LocalRegion region;
  open().register_everywhere(memory, true, region);
  return region;
}

void LibfabricFabric::unregister_memory(const LocalRegion& region) {
  State& state = open();
  if (region.id < 0 || static_cast<std::size_t>(region.id) >= state.regions.size() || state.regions[static_cast<std::size_t>(region.id)].registrations.empty())
    throw FabricError("unregister_memory: there is no region " + std::to_string(region.id));
  state.regions[static_cast<std::size_t>(region.id)].registrations.clear();
}

RemoteRegion LibfabricFabric::import_region(int peer, const Blob& description) const {
  const Peer& owner = open().peer_of(peer, "import_region");
  const RegionDescription decoded = libfabric::decode_region(description);
  if (decoded.keys.size() != owner.address.endpoints.size())
    throw FabricError("import_region: " + std::to_string(decoded.keys.size()) + " keys for " + std::to_string(owner.address.endpoints.size()) +
                      " endpoints of peer " + std::to_string(peer));
  return to_remote(decoded);
}

Post LibfabricFabric::write(const Write& write) {
  State& state = open();
  const Peer& peer = state.peer_of(write.peer, "write");
  if (write.endpoint < 0 || static_cast<std::size_t>(write.endpoint) >= state.endpoints.size())
    throw FabricError("write: there is no endpoint " + std::to_string(write.endpoint) + " [" + state.full_name() + "]");
  Endpoint& endpoint = state.endpoints[static_cast<std::size_t>(write.endpoint)];
  if (endpoint.under_way >= endpoint.most_under_way) return Post::Again;
  if (write.bytes != 0 && (write.source == nullptr || write.target == nullptr)) throw FabricError("write: bytes without a source or a target");
  if (write.bytes > endpoint.info->ep_attr->max_msg_size)
    throw FabricError("write to peer " + std::to_string(write.peer) + ": " + std::to_string(write.bytes) + " bytes, but the most in one write is " +
                      std::to_string(endpoint.info->ep_attr->max_msg_size) + " [" + endpoint.name + ", " + state.full_name() + "]");
  const LocalRegion& source = write.source != nullptr ? *write.source : state.scratch_region;
  const RemoteRegion& target = write.target != nullptr ? *write.target : peer.scratch;
  if (write.source_offset > source.bytes || write.bytes > source.bytes - write.source_offset || write.target_offset > target.bytes ||
      write.bytes > target.bytes - write.target_offset)
    throw FabricError("write to peer " + std::to_string(write.peer) + ": " + std::to_string(write.bytes) + " bytes from " +
                      std::to_string(write.source_offset) + " of " + std::to_string(source.bytes) + " to " + std::to_string(write.target_offset) + " of " +
                      std::to_string(target.bytes) + " are outside the region");
  if (static_cast<std::size_t>(source.id) >= state.regions.size() || state.regions[static_cast<std::size_t>(source.id)].registrations.empty())
    throw FabricError("write: the source region " + std::to_string(source.id) + " is not registered");

  Operation* operation = endpoint.operations.take();
  operation->context = write.context;
  operation->peer = write.peer;
  operation->under_way = true;
  operation->forgotten = false;

  iovec local{};
  local.iov_base = static_cast<std::uint8_t*>(source.base) + write.source_offset;
  local.iov_len = write.bytes;
  void* descriptor = fi_mr_desc(state.regions[static_cast<std::size_t>(source.id)].registrations[static_cast<std::size_t>(write.endpoint)].get());
  fi_rma_iov remote{};
  remote.addr = target.base + write.target_offset;
  remote.len = write.bytes;
  remote.key = target.key[static_cast<std::size_t>(write.endpoint) % peer.address.endpoints.size()];
  fi_msg_rma message{};
  message.msg_iov = &local;
  message.desc = &descriptor;
  message.iov_count = 1;
  message.addr = peer.addresses[static_cast<std::size_t>(write.endpoint)];
  message.rma_iov = &remote;
  message.rma_iov_count = 1;
  message.context = operation;
  message.data = write.immediate;
  // Only where the write that follows finds room too: a provider that refuses it rings no bell for this one.
  const bool more = write.more && endpoint.rings_doorbells && endpoint.under_way + 2 <= endpoint.most_under_way;
  const ssize_t result = fi_writemsg(endpoint.ep.get(), &message, endpoint.write_flags | (more ? FI_MORE : 0));
  if (result == 0) {
    ++endpoint.under_way;
    return Post::Accepted;
  }
  endpoint.operations.give_back(operation);
  if (result == -FI_EAGAIN) return Post::Again;
  const std::string object = "of " + std::to_string(write.bytes) + " bytes to peer " + std::to_string(write.peer) + " on " + endpoint.name;
  const int error = static_cast<int>(-result);
  if (is_a_mistake(error)) state.fail("fi_writemsg", object, result);
  state.fail_write(write.endpoint, write.context, error,
                   "write to peer " + std::to_string(write.peer) + ": " + state.library->strerror(error) + " [" + endpoint.name + ", " + state.full_name() + "]");
  return Post::Accepted;
}

int LibfabricFabric::poll(Completion* out, int capacity) {
  State& state = open();
  int written = 0;
  while (written < capacity && !state.ready.empty()) {
    out[written++] = state.ready.front();
    state.ready.pop_front();
  }
  const int count = static_cast<int>(state.endpoints.size());
  for (int turn = 0; turn < count && written < capacity; ++turn) {
    const int index = (state.next_endpoint + turn) % count;
    fi_cq_data_entry entries[kReadAtOnce];
    const auto room = static_cast<std::size_t>(std::min(kReadAtOnce, capacity - written));
    const ssize_t result = fi_cq_read(state.endpoints[static_cast<std::size_t>(index)].cq.get(), entries, room);
    if (result == -FI_EAGAIN) continue;
    if (result == -FI_EAVAIL) {
      written += state.read_errors(index, out + written, capacity - written);
      continue;
    }
    if (result < 0) state.fail("fi_cq_read", state.endpoints[static_cast<std::size_t>(index)].name, result);
    for (ssize_t entry = 0; entry < result; ++entry) written += state.take(index, entries[entry], out[written]);
  }
  if (count > 1) state.next_endpoint = (state.next_endpoint + 1) % count;
  return written;
}

std::string LibfabricFabric::describe_error(const Completion& failed) const {
  const State& state = open();
  for (auto error = state.errors.rbegin(); error != state.errors.rend(); ++error) {
    if (error->endpoint == failed.endpoint && error->has_context == failed.has_context && (!failed.has_context || error->context == failed.context))
      return error->text;
  }
  return std::string(state.library->strerror(failed.error)) + " (" + std::to_string(failed.error) + ") [" + endpoint_name(failed.endpoint) + ", " +
         state.full_name() + "]";
}

}  // namespace pplx

#else

namespace pplx {

struct LibfabricFabric::State {};

namespace {
[[noreturn]] void missing() { throw FabricError("built without libfabric headers: install libfabric-dev and rebuild"); }
}  // namespace

LibfabricFabric::LibfabricFabric(const libfabric::Options&) { missing(); }
LibfabricFabric::~LibfabricFabric() = default;
LibfabricFabric::State& LibfabricFabric::open() const { missing(); }
std::string LibfabricFabric::name() const { missing(); }
int LibfabricFabric::endpoints() const { missing(); }
std::string LibfabricFabric::endpoint_name(int) const { missing(); }
Blob LibfabricFabric::address() const { missing(); }
void LibfabricFabric::insert_peer(int, const Blob&) { missing(); }
void LibfabricFabric::remove_peer(int) { missing(); }
LocalRegion LibfabricFabric::register_memory(void*, std::size_t) { missing(); }
LocalRegion LibfabricFabric::register_device_memory(const DeviceMemory&) { missing(); }
void LibfabricFabric::unregister_memory(const LocalRegion&) { missing(); }
RemoteRegion LibfabricFabric::import_region(int, const Blob&) const { missing(); }
Post LibfabricFabric::write(const Write&) { missing(); }
int LibfabricFabric::poll(Completion*, int) { missing(); }
std::string LibfabricFabric::describe_error(const Completion&) const { missing(); }
std::string LibfabricFabric::provider() const { missing(); }
std::string LibfabricFabric::why_these() const { missing(); }
int LibfabricFabric::proxy_cpu() const { missing(); }
std::size_t LibfabricFabric::max_write_bytes() const { missing(); }
std::vector<std::string> LibfabricFabric::shm_names() const { missing(); }
void LibfabricFabric::close() {}
void LibfabricFabric::abandon() const {}

}  // namespace pplx

#endif
