#include "libfabric_fabric.h"

#ifdef PPLX_HAVE_LIBFABRIC_HEADERS

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>

#include "blobs.h"
#include "completions.h"
#include "endpoint.h"
#include "registration.h"

namespace pplx {
namespace {

using libfabric::Address;
using libfabric::Completions;
using libfabric::Endpoint;
using libfabric::Operation;
using libfabric::Provider;
using libfabric::Region;
using libfabric::RegionDescription;

struct Peer {
  bool alive = false;
  Address address;
  RemoteRegion scratch;
  std::vector<fi_addr_t> addresses;            // indexed by our endpoint
};

// True if the call itself was wrong, with any peer. Other errors are about the connection: each provider has its own code for a
// peer that is gone (ENOTCONN, ECONNREFUSED, EIO, and ENOENT with sockets).
bool is_a_mistake(int error) {
  switch (error) {
    case FI_EINVAL: case FI_EMSGSIZE: case FI_ETOOSMALL: case FI_ENOSYS: case FI_EOPNOTSUPP: case FI_EBADFLAGS: case FI_EACCES:
    case FI_ENOKEY: case FI_EKEYREJECTED: case FI_EOPBADSTATE: case FI_ENOMEM: case EFAULT: case EPERM:
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
  Provider provider;
  std::string why;
  int cpu = -1;
  bool device_memory = false;
  libfabric::Scratch scratch;
  std::deque<Endpoint> endpoints;
  std::vector<Region> regions;                 // indexed by id; after the endpoints, so that they close before the domains
  std::vector<Peer> peers;
  Completions completions{provider, scratch};
  int next_endpoint = 0;                       // the one whose queue is read first
  LocalRegion scratch_region;

  ~State() {
    // Endpoints first: registered memory must not go while one may still use it. MR_ENDPOINT registrations belong to theirs and go
    // before.
    for (Endpoint& endpoint : endpoints) {
      if ((endpoint.info->domain_attr->mr_mode & FI_MR_ENDPOINT) == 0) endpoint.ep.reset();
    }
    regions.clear();
  }

  LocalRegion keep(Region region) {
    region.local.id = static_cast<int>(regions.size());
    regions.push_back(std::move(region));
    return regions.back().local;
  }
  const Peer& peer_of(int peer, const char* what) const;
  void check(const Write& write, const Endpoint& endpoint, const LocalRegion& source, const RemoteRegion& target) const;
  bool is_endpoint_address(const Blob& blob) const;
};

const Peer& LibfabricFabric::State::peer_of(int peer, const char* what) const {
  if (peer < 0 || static_cast<std::size_t>(peer) >= peers.size() || !peers[static_cast<std::size_t>(peer)].alive)
    throw FabricError(std::string(what) + ": there is no peer " + std::to_string(peer) + " (never inserted, or removed) [" +
                      provider.full_name() + "]");
  return peers[static_cast<std::size_t>(peer)];
}

// The provider is told no length: it reads the length of its own addresses, shm up to a zero.
bool LibfabricFabric::State::is_endpoint_address(const Blob& blob) const {
  if (provider.name == "shm") return !blob.empty() && blob.back() == 0;
  return blob.size() == libfabric::address_of(endpoints.front(), provider).size();
}

LibfabricFabric::LibfabricFabric(const libfabric::Options& options) : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.provider.library = &libfabric::library(options.wheels);
  libfabric::Choice choice = libfabric::choose(*state.provider.library, options);
  state.provider.name = choice.provider;
  state.why = choice.why;
  state.cpu = choice.cpu;
  state.device_memory = options.device_memory;
  if (state.provider.name == "shm") libfabric::cleanup_dead_processes();
  for (libfabric::Nic& nic : choice.nics) {
    Endpoint& endpoint = state.endpoints.emplace_back();
    endpoint.name = nic.name;
    endpoint.info = std::move(nic.info);
    libfabric::open_endpoint(endpoint, state.provider, static_cast<int>(state.endpoints.size()) - 1, state.device_memory);
  }
  const DeviceMemory scratch{state.scratch.bytes, sizeof(state.scratch.bytes), sizeof(state.scratch.bytes)};
  state.scratch_region = state.keep(libfabric::register_everywhere(state.provider, state.endpoints, scratch, false));
  for (std::size_t index = 0; index < state.endpoints.size(); ++index) {
    state.endpoints[index].scratch_descriptor = state.regions.front().descriptor(0, index);
    libfabric::post_receives(state.endpoints[index], state.provider, state.scratch);
  }
}

LibfabricFabric::~LibfabricFabric() { close(); }

void LibfabricFabric::close() {
  if (fork_.in_child())
    static_cast<void>(state_.release());
  else
    state_.reset();
}

LibfabricFabric::State& LibfabricFabric::open() const {
  if (state_ == nullptr) throw FabricError("this fabric is closed");
  return *state_;
}

std::string LibfabricFabric::name() const { return open().provider.full_name(); }
std::string LibfabricFabric::provider() const { return open().provider.name; }
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

void LibfabricFabric::abandon() const {
  if (!fork_.in_child()) libfabric::remove_shm_files(shm_names());
}

Blob LibfabricFabric::address() const {
  const State& state = open();
  Address address;
  address.provider = state.provider.name;
  address.host = libfabric::host_id();
  address.pid_namespace = libfabric::pid_namespace();
  address.pid = static_cast<std::uint32_t>(getpid());
  address.start_time = libfabric::process_start_time(address.pid);
  for (const Endpoint& endpoint : state.endpoints) address.endpoints.push_back(libfabric::address_of(endpoint, state.provider));
  address.shm_names = shm_names();
  address.scratch = state.regions.front().description;
  return libfabric::encode(address);
}

void LibfabricFabric::insert_peer(int peer, const Blob& blob) {
  State& state = open();
  const std::string object = "peer " + std::to_string(peer);
  if (peer < 0) throw FabricError("insert_peer: " + object);
  Peer fresh;
  fresh.address = libfabric::decode_address(blob);
  const Address& address = fresh.address;
  if (address.provider != state.provider.name)
    throw FabricError("insert_peer: " + object + " uses provider " + address.provider + ", this process " +
                      state.provider.full_name());
  if (address.endpoints.empty() || address.scratch.keys.size() != address.endpoints.size())
    throw FabricError("insert_peer: the address of " + object + " is not complete");
  for (const Blob& endpoint : address.endpoints) {
    if (!state.is_endpoint_address(endpoint))
      throw FabricError("insert_peer: an endpoint address of " + object + " has " + std::to_string(endpoint.size()) +
                        " bytes, which is none of " + state.provider.full_name());
  }
  if (state.provider.name == "shm") {
    if (address.host != libfabric::host_id())
      throw FabricError("insert_peer: " + object + " is on another host, which shm does not reach");
    for (const std::string& file : address.shm_names) {
      if (access(("/dev/shm/" + file).c_str(), F_OK) != 0)
        throw FabricError("insert_peer: /dev/shm/" + file + " of " + object +
                          " is not visible here: it is gone, or in a container with its own /dev/shm");
    }
  }
  if (static_cast<std::size_t>(peer) < state.peers.size() && state.peers[static_cast<std::size_t>(peer)].alive)
    throw FabricError("insert_peer: there is a " + object + " already");

  // Our endpoint i writes to its endpoint i mod theirs. efa-direct drops a write whose initiator the target does not know, so every
  // endpoint of the peer that will write to ours is inserted too.
  const std::size_t ours = state.endpoints.size(), theirs = address.endpoints.size();
  for (std::size_t mine = 0; mine < ours; ++mine) {
    const Endpoint& endpoint = state.endpoints[mine];
    fi_addr_t target = FI_ADDR_UNSPEC;
    for (std::size_t other = 0; other < theirs; ++other) {
      if (other != mine % theirs && other % ours != mine) continue;
      fi_addr_t inserted = FI_ADDR_UNSPEC;
      const int result = fi_av_insert(endpoint.av.get(), address.endpoints[other].data(), 1, &inserted, 0, nullptr);
      if (result != 1) state.provider.fail("fi_av_insert", object + " on " + endpoint.name, result < 0 ? result : FI_EADDRNOTAVAIL);
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
      state.completions.fail_write(static_cast<int>(index), operation.context, FI_ECONNABORTED,
                       "write to peer " + std::to_string(peer) + ": the peer was removed [" + endpoint.name + ", " +
                       state.provider.full_name() + "]");
    }
  }
  if (state.provider.name == "shm")
    libfabric::cleanup_dead_peer(libfabric::encode(state.peers[static_cast<std::size_t>(peer)].address));
}

LocalRegion LibfabricFabric::register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) {
  State& state = open();
  return state.keep(libfabric::register_everywhere(state.provider, state.endpoints, {base, bytes, shared_bytes}, false));
}

LocalRegion LibfabricFabric::register_device_memory(const DeviceMemory& memory) {
  State& state = open();
  if (!state.device_memory) return Fabric::register_device_memory(memory);
  return state.keep(libfabric::register_everywhere(state.provider, state.endpoints, memory, true));
}

void LibfabricFabric::unregister_memory(const LocalRegion& region) {
  State& state = open();
  if (region.id < 0 || static_cast<std::size_t>(region.id) >= state.regions.size() ||
      !state.regions[static_cast<std::size_t>(region.id)].registered())
    throw FabricError("unregister_memory: there is no region " + std::to_string(region.id));
  state.regions[static_cast<std::size_t>(region.id)].unregister();
}

RemoteRegion LibfabricFabric::import_region(int peer, const Blob& description) const {
  const Peer& owner = open().peer_of(peer, "import_region");
  const RegionDescription decoded = libfabric::decode_region(description);
  if (decoded.keys.size() != owner.address.endpoints.size())
    throw FabricError("import_region: " + std::to_string(decoded.keys.size()) + " keys for " +
                      std::to_string(owner.address.endpoints.size()) + " endpoints of peer " + std::to_string(peer));
  return to_remote(decoded);
}

// Throws where the caller is wrong: not all providers notice.
void LibfabricFabric::State::check(const Write& write, const Endpoint& endpoint, const LocalRegion& source,
                                   const RemoteRegion& target) const {
  if (write.bytes != 0 && (write.source == nullptr || write.target == nullptr))
    throw FabricError("write: bytes without a source or a target");
  if (write.bytes > endpoint.info->ep_attr->max_msg_size)
    throw FabricError("write to peer " + std::to_string(write.peer) + ": " + std::to_string(write.bytes) +
                      " bytes, but the most in one write is " + std::to_string(endpoint.info->ep_attr->max_msg_size) + " [" +
                      endpoint.name + ", " + provider.full_name() + "]");
  if (write.source_offset > source.bytes || write.bytes > source.bytes - write.source_offset ||
      write.target_offset > target.bytes || write.bytes > target.bytes - write.target_offset)
    throw FabricError("write to peer " + std::to_string(write.peer) + ": " + std::to_string(write.bytes) + " bytes from " +
                      std::to_string(write.source_offset) + " of " + std::to_string(source.bytes) + " to " +
                      std::to_string(write.target_offset) + " of " + std::to_string(target.bytes) + " are outside the region");
  if (write.source_offset < source.shared_bytes && write.source_offset + write.bytes > source.shared_bytes)
    throw FabricError("write: a source that is in part shared, at " + std::to_string(write.source_offset));
  if (static_cast<std::size_t>(source.id) >= regions.size() || !regions[static_cast<std::size_t>(source.id)].registered())
    throw FabricError("write: the source region " + std::to_string(source.id) + " is not registered");
}

Post LibfabricFabric::write(const Write& write) {
  State& state = open();
  const Peer& peer = state.peer_of(write.peer, "write");
  if (write.endpoint < 0 || static_cast<std::size_t>(write.endpoint) >= state.endpoints.size())
    throw FabricError("write: there is no endpoint " + std::to_string(write.endpoint) + " [" + state.provider.full_name() + "]");
  Endpoint& endpoint = state.endpoints[static_cast<std::size_t>(write.endpoint)];
  if (endpoint.under_way >= endpoint.most_under_way) return Post::Again;
  const LocalRegion& source = write.source != nullptr ? *write.source : state.scratch_region;
  const RemoteRegion& target = write.target != nullptr ? *write.target : peer.scratch;
  state.check(write, endpoint, source, target);

  Operation* operation = endpoint.operations.take();
  operation->context = write.context;
  operation->peer = write.peer;
  operation->under_way = true;
  operation->forgotten = false;

  iovec local{};
  local.iov_base = static_cast<std::uint8_t*>(source.base) + write.source_offset;
  local.iov_len = write.bytes;
  const Region& region = state.regions[static_cast<std::size_t>(source.id)];
  void* descriptor = region.descriptor(write.source_offset, static_cast<std::size_t>(write.endpoint));
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
  const std::string object = "of " + std::to_string(write.bytes) + " bytes to peer " + std::to_string(write.peer) + " on " +
      endpoint.name;
  const int error = static_cast<int>(-result);
  if (is_a_mistake(error)) state.provider.fail("fi_writemsg", object, result);
  state.completions.fail_write(write.endpoint, write.context, error,
                   "write to peer " + std::to_string(write.peer) + ": " + state.provider.library->strerror(error) + " [" +
                   endpoint.name + ", " + state.provider.full_name() + "]");
  return Post::Accepted;
}

int LibfabricFabric::poll(Completion* out, int capacity) {
  State& state = open();
  int written = state.completions.failed_before(out, capacity);
  const int count = static_cast<int>(state.endpoints.size());
  for (int turn = 0; turn < count && written < capacity; ++turn) {
    const int index = (state.next_endpoint + turn) % count;
    written += state.completions.read(state.endpoints[static_cast<std::size_t>(index)], index, out + written, capacity - written);
  }
  if (count > 1) state.next_endpoint = (state.next_endpoint + 1) % count;
  return written;
}

std::string LibfabricFabric::describe_error(const Completion& failed) const {
  const State& state = open();
  if (std::string text = state.completions.text_of(failed); !text.empty()) return text;
  return std::string(state.provider.library->strerror(failed.error)) + " (" + std::to_string(failed.error) + ") [" +
         endpoint_name(failed.endpoint) + ", " + state.provider.full_name() + "]";
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
LocalRegion LibfabricFabric::register_memory(void*, std::size_t, std::size_t) { missing(); }
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
