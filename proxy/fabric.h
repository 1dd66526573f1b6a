// A network, as far as the proxy needs it: one-sided writes that carry a 32-bit immediate, and nothing else.
// Small enough to write on a card: open (constructor), address, insert_peer, register, write, poll, close (destructor).
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../src/host/device_memory.h"

namespace pplx {

using Blob = std::vector<std::uint8_t>;

inline constexpr int kMaxEndpoints = 16;  // one shard bit each, see Immediate

// A failure of the fabric itself. what() has the call, the object and the provider's own words.
struct FabricError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Memory of this process that the fabric may read from. Peers may write into the first `shared_bytes` of it.
struct LocalRegion {
  int id = -1;                 // the fabric's own number for it
  void* base = nullptr;
  std::size_t bytes = 0;
  std::size_t shared_bytes = 0;
  Blob description;            // send it to the peer, which calls import_region to be able to write here
};

// The part of a peer's registered memory that others may write into, as write() needs it.
struct RemoteRegion {
  std::uint64_t base = 0;                    // added to every offset: the region's address, or 0 where the provider counts from 0
  std::uint64_t bytes = 0;
  std::uint64_t key[kMaxEndpoints] = {};     // indexed by the peer's endpoint
};

struct Write {
  int endpoint = 0;            // the local endpoint that posts it
  int peer = 0;                // as given to insert_peer
  const LocalRegion* source = nullptr;
  std::size_t source_offset = 0;
  std::size_t bytes = 0;       // 0 is allowed: only the immediate travels
  const RemoteRegion* target = nullptr;
  std::size_t target_offset = 0;
  std::uint32_t immediate = 0;
  std::uint64_t context = 0;   // comes back in the Sent or Failed completion
  bool more = false;           // a hint: another write on this endpoint follows at once, so one doorbell is enough for both
};

enum class Post { Accepted, Again };   // Again: nothing was queued, poll and try later

struct Completion {
  enum class Kind : std::uint8_t {
    Sent,      // `context`: the source may be overwritten
    Arrived,   // `immediate`: a peer's write landed in our memory
    Failed,    // `context` (when has_context): that write will not complete; `error` and describe_error() say why
  };
  Kind kind = Kind::Sent;
  bool has_context = true;
  std::uint32_t immediate = 0;
  int endpoint = 0;
  int error = 0;               // Failed: a positive errno-like code
  std::uint64_t context = 0;
};

// One thread uses a Fabric at a time (the proxy thread, once it runs). Nothing promises any order between writes,
// between shards of one block, or between completions: the proxy must not rely on one.
class Fabric {
 public:
  virtual ~Fabric() = default;

  virtual std::string name() const = 0;                 // name in logs and errors: "tcp;ofi_rxm (libfabric 1.17)"
  virtual int endpoints() const = 0;                    // 1..kMaxEndpoints
  virtual std::string endpoint_name(int endpoint) const = 0;   // the NIC, for errors: "rdmap16s27-rdm"
  virtual Blob address() const = 0;                     // covers all endpoints; the other side passes it to insert_peer
  virtual void insert_peer(int peer, const Blob& address) = 0;   // before any write from or to that peer
  virtual void remove_peer(int peer) = 0;               // a dead one; never talks to it
  virtual LocalRegion register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) = 0;
  virtual LocalRegion register_device_memory(const DeviceMemory&) { throw FabricError(name() + " was not opened for GPU memory"); }
  virtual void unregister_memory(const LocalRegion& region) = 0;
  virtual RemoteRegion import_region(int peer, const Blob& description) const = 0;
  virtual Post write(const Write& write) = 0;           // never blocks; throws FabricError on what will never succeed
  virtual int poll(Completion* out, int capacity) = 0;  // drives progress; returns how many completions it wrote to `out`
  virtual std::string describe_error(const Completion& failed) const = 0;
};

}  // namespace pplx
