// What the efa provider is asked for, on a host without one: a libfabric that writes down how it is used (fake/libfabric.cpp).
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "../../proxy/libfabric/libfabric_fabric.h"
#include "../../proxy/libfabric/loader.h"
#include "check.h"

using namespace pplx;

namespace {

constexpr unsigned long long kHighRate = 1ull << 60;

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
  const LocalRegion region = fabric.register_memory(memory, sizeof memory);
  CHECK(!was("regattr"));       // host memory, pinned or not, is registered as it always was
  const RemoteRegion target = fabric.import_region(7, region.description);
  const unsigned long long alone = flags_of(fabric, region, target, false), followed = flags_of(fabric, region, target, true);
  CHECK_EQ(alone & kHighRate, recent ? kHighRate : 0);
  CHECK_EQ(followed & kHighRate, recent ? kHighRate : 0);
  CHECK(followed != alone);
  CHECK_EQ(followed & alone, alone);
  try {
    fabric.register_device_memory({memory, sizeof memory});
    check::fail(__FILE__, __LINE__, "a fabric that was not opened for GPU memory took some");
  } catch (const FabricError& error) {
    CHECK(std::string(error.what()).find("not opened for GPU memory") != std::string::npos);
  }
}

void device_memory(const std::string& provider, bool knows_dmabufs) {
  char memory[64];   // no GPU here: addresses are only passed on
  const auto address = std::to_string(reinterpret_cast<unsigned long long>(memory));
  const DeviceMemory by_dmabuf{memory, sizeof memory, 3, 42, 4096}, by_pointer{memory, sizeof memory, 3};
  const std::string dmabuf = "regattr dmabuf 42 4096 64", pointer = "regattr pointer " + address + " 64 3";
  forget();
  LibfabricFabric fabric(options(provider, true));
  CHECK(was("setopt 10 0"));
  forget();
  const LocalRegion region = fabric.register_device_memory(by_dmabuf);
  CHECK_EQ(was(dmabuf), knows_dmabufs);
  CHECK_EQ(was(pointer), !knows_dmabufs);
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

// Without an argument: each version in a process of its own, for a process has one libfabric.
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
    device_memory(provider, version != "1.18");
  }
}
