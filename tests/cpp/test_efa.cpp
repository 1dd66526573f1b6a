// How the efa provider is used, on a host without one: fake/libfabric.cpp records its calls.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>

#include "../../proxy/libfabric/libfabric_fabric.h"
#include "../../proxy/libfabric/loader.h"
#include "check.h"

using namespace pplx;

namespace {

constexpr unsigned long long kHighRate = 1ull << 60, kMore = 1ull << 18;   // kEfaHighRate and FI_MORE
// FI_WRITE, FI_RECV, FI_REMOTE_WRITE
constexpr unsigned long long kWrite = 1ull << 9, kReceive = 1ull << 10, kRemoteWrite = 1ull << 13;

const char* (*calls)() = nullptr;
void (*forget)() = nullptr;

bool was(const std::string& call) { return std::string(calls()).find(call) != std::string::npos; }

libfabric::Options options(const std::string& provider, bool device_memory) {
  libfabric::Options o;
  o.provider = provider;
  o.device_memory = device_memory;
  return o;
}

std::string refused(const libfabric::Options& o) {
  try {
    const LibfabricFabric fabric(o);
  } catch (const FabricError& error) {
    return error.what();
  }
  return "";
}

// The flags of a write of `bytes`.
unsigned long long flags_of(LibfabricFabric& fabric, const LocalRegion& source, const RemoteRegion& target, bool more) {
  Write w;
  w.peer = 7;
  w.source = &source;
  w.target = &target;
  w.bytes = 16;
  w.more = more;
  forget();
  CHECK(fabric.write(w) == Post::Accepted);
  unsigned long long flags = 0, bytes = 0, key = 0;
  CHECK_EQ(std::sscanf(calls(), "write %llu %llu %llu", &flags, &bytes, &key), 3);
  CHECK_EQ(bytes, 16u);
  return flags;
}

void writes(const std::string& provider, bool recent) {
  forget();
  LibfabricFabric fabric(options(provider, false));
  CHECK(was("setopt 11 0"));    // no shared memory between ranks of a host
  CHECK(!was("setopt 10"));
  fabric.insert_peer(7, fabric.address());
  CHECK(was("insert"));         // both directions: a target that does not know its initiator drops the write
  char memory[64];
  const LocalRegion region = fabric.register_memory(memory, sizeof memory, sizeof memory);
  CHECK(!was("regattr"));       // host memory, pinned or not, is registered as it always was
  const RemoteRegion target = fabric.import_region(7, region.description);
  const unsigned long long alone = flags_of(fabric, region, target, false), followed = flags_of(fabric, region, target, true);
  CHECK_EQ(alone & kHighRate, recent ? kHighRate : 0);
  CHECK_EQ(followed & kHighRate, recent ? kHighRate : 0);
  // Writes that efa queues before its handshake with a peer keep FI_MORE, and may be posted after the one that rings: no bell rings
  // for them. efa-direct has no such queue.
  CHECK_EQ(alone & kMore, 0u);
  CHECK_EQ(followed, provider == "efa" ? alone : alone | kMore);
  try {
    fabric.register_device_memory({memory, sizeof memory});
    check::fail(__FILE__, __LINE__, "a fabric that was not opened for GPU memory took some");
  } catch (const FabricError& error) {
    CHECK(std::string(error.what()).find("not opened for GPU memory") != std::string::npos);
  }
}

// Peers may write where they must, and nowhere else.
void shared_part(const std::string& provider) {
  char memory[64];
  LibfabricFabric fabric(options(provider, false));
  fabric.insert_peer(7, fabric.address());
  forget();
  const LocalRegion region = fabric.register_memory(memory, sizeof memory, 16);
  CHECK(was("reg 16 " + std::to_string(kRemoteWrite | kWrite | kReceive)));
  CHECK(was("reg 48 " + std::to_string(kWrite) + " "));
  RemoteRegion target = fabric.import_region(7, region.description);
  CHECK_EQ(target.bytes, 16u);
  forget();
  const LocalRegion sources = fabric.register_memory(memory, sizeof memory, 0);
  CHECK(was("reg 64 " + std::to_string(kWrite) + " "));
  CHECK_EQ(fabric.import_region(7, sources.description).bytes, 0u);
  Write w;
  w.peer = 7;
  w.source = &region;
  w.target = &target;
  w.source_offset = 8;
  w.bytes = 16;
  try {
    fabric.write(w);
    check::fail(__FILE__, __LINE__, "a source in two registrations was taken");
  } catch (const FabricError& error) {
    CHECK(std::string(error.what()).find("in part shared") != std::string::npos);
  }
}

// Keys that are ours to choose are random, and as long as the provider takes them.
void keys(const std::string& provider) {
  for (const int bytes : {2, 4, 8}) {
    setenv("FAKE_KEY_BYTES", std::to_string(bytes).c_str(), 1);
    char memory[64];
    LibfabricFabric fabric(options(provider, false));
    unsigned long long all = 0;
    std::set<unsigned long long> seen;
    for (int i = 0; i < 64; ++i) {
      forget();
      fabric.register_memory(memory, sizeof memory, sizeof memory);
      unsigned long long size = 0, access = 0, key = 0;
      CHECK_EQ(std::sscanf(calls(), "reg %llu %llu %llu", &size, &access, &key), 3);
      all |= key;
      seen.insert(key);
    }
    CHECK(seen.size() >= 60);   // among 2^16, two of 64 are the same once in 30 runs
    CHECK_EQ(all, bytes == 8 ? ~0ull : (1ull << 8 * bytes) - 1);   // each bit was set once: it was not with odds of 2^-58
    unsetenv("FAKE_KEY_BYTES");
  }
}

void device_memory(const std::string& provider, bool knows_dmabufs) {
  char memory[64];   // no GPU here: addresses are only passed on
  const auto address = std::to_string(reinterpret_cast<unsigned long long>(memory));
  const DeviceMemory by_dmabuf{memory, sizeof memory, sizeof memory, 3, 42, 4096},
      by_pointer{memory, sizeof memory, sizeof memory, 3};
  const std::string dmabuf = "regattr dmabuf 42 4096 64", pointer = "regattr pointer " + address + " 64 3";
  forget();
  LibfabricFabric fabric(options(provider, true));
  CHECK(was("setopt 10 0"));
  forget();
  LocalRegion region = fabric.register_device_memory(by_dmabuf);
  CHECK_EQ(was(dmabuf), knows_dmabufs);
  CHECK_EQ(was(pointer), !knows_dmabufs);
  fabric.unregister_memory(region);
  forget();
  region = fabric.register_device_memory({memory, sizeof memory, 16, 3, 42, 4096});
  if (knows_dmabufs) {
    CHECK(was("regattr dmabuf 42 4096 16\naccess " + std::to_string(kRemoteWrite | kWrite | kReceive)));
    CHECK(was("regattr dmabuf 42 4112 48\naccess " + std::to_string(kWrite)));
  } else {
    CHECK(was("regattr pointer " + address + " 16 3"));
  }
  fabric.unregister_memory(region);
  forget();
  fabric.register_device_memory(by_pointer);
  CHECK(!was("dmabuf"));
  CHECK(was(pointer));
  setenv("FAKE_DMABUF", "no", 1);
  forget();
  fabric.register_device_memory(by_dmabuf);
  CHECK_EQ(was(dmabuf), knows_dmabufs);
  CHECK(was(pointer));
  unsetenv("FAKE_DMABUF");

  setenv("FAKE_CUDA", "calls", 1);
  CHECK(refused(options(provider, true)).find("GPU memory is not reached without calling CUDA") != std::string::npos);
  setenv("FAKE_CUDA", "none", 1);
  CHECK(refused(options(provider, true)).find("built without CUDA") != std::string::npos);
  unsetenv("FAKE_CUDA");
  CHECK(refused(options("tcp", true)).find("does not reach GPU memory") != std::string::npos);
}

}  // namespace

// Without an argument it runs each version in a process of its own, because a process has one libfabric.
int main(int argc, char** argv) {
  if (!libfabric::compiled_in()) {
    std::printf("skipped: built without libfabric headers\n");
    return 0;
  }
  if (argc == 1) {
    for (const char* version : {"1.18", "2.1", "2.6"}) CHECK_EQ(std::system((std::string(argv[0]) + " " + version).c_str()), 0);
    return 0;
  }
  setenv("FAKE_VERSION", argv[1], 1);
  setenv("PPLX_LIBFABRIC", PPLX_FAKE_LIBFABRIC, 1);
  libfabric::library();
  void* fake = dlopen(PPLX_FAKE_LIBFABRIC, RTLD_NOW | RTLD_NOLOAD);
  CHECK(fake != nullptr);
  calls = reinterpret_cast<const char* (*)()>(dlsym(fake, "fake_log"));
  forget = reinterpret_cast<void (*)()>(dlsym(fake, "fake_forget"));
  const std::string version = argv[1];
  for (const char* provider : {"efa", "efa-direct"}) {
    if (version == "1.18" && provider == std::string("efa-direct")) continue;
    writes(provider, version == "2.6");
    shared_part(provider);
    keys(provider);
    device_memory(provider, version != "1.18");
  }
}
