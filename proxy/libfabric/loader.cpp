#include "loader.h"

#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>

#include "../fabric.h"

namespace pplx::libfabric {
namespace {

const char* const kSystemFolders[] = {
    "/usr/local/lib", "/usr/local/lib64",
#if defined(__x86_64__)
    "/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu",
#elif defined(__aarch64__)
    "/usr/lib/aarch64-linux-gnu", "/lib/aarch64-linux-gnu",
#endif
    "/usr/lib64", "/lib64", "/usr/lib", "/lib"};

struct Candidate {
  std::string path;
  bool wheel = false;
};

// Debian's libfabric brings libpsm_infinipath along, whose constructor takes SIGINT, SIGTERM and four more and ends the process
// with exit(1): Ctrl-C would not reach Python any more. What a library does when it is loaded leaves the handlers as they were.
class SignalHandlers {
 public:
  SignalHandlers() {
    for (int number = 1; number < NSIG; ++number) known_[number] = sigaction(number, nullptr, &before_[number]) == 0;
  }
  ~SignalHandlers() {
    for (int number = 1; number < NSIG; ++number) {
      struct sigaction now {};
      if (!known_[number] || sigaction(number, nullptr, &now) != 0 || same(now, before_[number])) continue;
      sigaction(number, &before_[number], nullptr);
    }
  }
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;

 private:
  static bool same(const struct sigaction& a, const struct sigaction& b) {
    return a.sa_handler == b.sa_handler && a.sa_flags == b.sa_flags;   // sa_sigaction shares its place with sa_handler
  }

  struct sigaction before_[NSIG] = {};
  bool known_[NSIG] = {};
};

void* load(const std::string& path) {
  const SignalHandlers kept;
  return dlopen(path.c_str(), RTLD_LOCAL | RTLD_NOW);
}

// dlopen by name follows LD_LIBRARY_PATH and the loader's cache, but also returns any library of that SONAME that is already
// loaded, be it MPI's. So it serves only to learn a path, and only when nothing was found in the usual folders.
std::string path_by_name() {
  void* handle = load("libfabric.so.1");
  if (handle == nullptr) return {};
  Dl_info where{};
  void* symbol = dlsym(handle, "fi_getinfo");
  std::string path;
  if (symbol != nullptr && dladdr(symbol, &where) != 0 && where.dli_fname != nullptr) path = where.dli_fname;
  dlclose(handle);
  return path;
}

std::vector<Candidate> search_order(const std::vector<std::string>& wheels) {
  std::vector<Candidate> order;
  for (const char* folder : {"/opt/amazon/efa/lib64", "/opt/amazon/efa/lib"})
    order.push_back({std::string(folder) + "/libfabric.so.1"});
  for (const char* folder : kSystemFolders) order.push_back({std::string(folder) + "/libfabric.so.1"});
  order.push_back({"libfabric.so.1"});
  for (const std::string& path : wheels) order.push_back({path, true});
  return order;
}

template <class Function>
void resolve(void* handle, const char* symbol, const std::string& path, Function& out) {
  out = reinterpret_cast<Function>(dlsym(handle, symbol));
  if (out == nullptr) throw FabricError(path + " has no symbol " + symbol + ": it is not a libfabric");
}

Library open(const Candidate& candidate) {
  void* handle = load(candidate.path);
  if (handle == nullptr) throw FabricError(dlerror());
  Library library;
  library.path = candidate.path;
  library.from_wheel = candidate.wheel;
  resolve(handle, "fi_getinfo", candidate.path, library.getinfo);
  resolve(handle, "fi_freeinfo", candidate.path, library.freeinfo);
  resolve(handle, "fi_dupinfo", candidate.path, library.dupinfo);
  resolve(handle, "fi_fabric", candidate.path, library.fabric);
  resolve(handle, "fi_strerror", candidate.path, library.strerror);
  resolve(handle, "fi_version", candidate.path, library.library_version);
  resolve(handle, "fi_tostr", candidate.path, library.tostr);
  library.version = library.library_version();
  library.api_version = std::min(library.version, libfabric::version(2, 0));
  return library;   // `handle` is never closed: providers leave signal handlers and threads behind
}

Library find(const std::vector<std::string>& wheels) {
  if (const char* wanted = std::getenv("PPLX_LIBFABRIC"); wanted != nullptr && *wanted != '\0') {
    if (*wanted != '/') throw FabricError(std::string("PPLX_LIBFABRIC must be an absolute path, it is '") + wanted + "'");
    try {
      return open({wanted});
    } catch (const FabricError& error) {
      throw FabricError(std::string("PPLX_LIBFABRIC=") + wanted + " cannot be loaded: " + error.what());
    }
  }
  std::string tried;
  for (Candidate candidate : search_order(wheels)) {
    if (candidate.path == "libfabric.so.1") {
      candidate.path = path_by_name();
      if (candidate.path.empty()) continue;
    } else if (access(candidate.path.c_str(), R_OK) != 0) {
      continue;
    }
    try {
      return open(candidate);
    } catch (const FabricError& error) {
      tried += std::string("; ") + error.what();
    }
  }
  throw FabricError("no libfabric found (looked at /opt/amazon/efa, the system's folders and " + std::to_string(wheels.size()) +
                    " wheel(s)" + tried + "): install libfabric1, or set PPLX_LIBFABRIC to the path of libfabric.so.1");
}

// Variables that providers read once, at the first call. They are set for that moment only: MPI's own libfabric reads the same
// variables. The user's own values stand.
struct Setting {
  const char* name;
  const char* value;
};
constexpr Setting kSettings[] = {
    // Two ranks of one host must use the NIC like any others: efa's shared-memory path has other completion rules.
    {"FI_EFA_ENABLE_SHM_TRANSFER", "0"},
    // Buffers that rxm copies short messages through, thousands for each endpoint and hundreds for each connection. Ours are
    // writes, which it hands on as they are. At its default of 16 KiB a tcp fabric of two endpoints took 137 MB and 60 ms of CPU to
    // open, and each connection 6 MB and 4 ms in a call of the proxy's, which moves nothing else meanwhile; now 11 MB and 6 ms, 0.4
    // MB and 0.4 ms.
    {"FI_OFI_RXM_BUFFER_SIZE", "256"},
};

void initialise_providers(const Library& library) {
  std::vector<const char*> ours;
  for (const Setting& setting : kSettings) {
    if (std::getenv(setting.name) != nullptr) continue;
    setenv(setting.name, setting.value, 0);
    ours.push_back(setting.name);
  }
  fi_info* all = nullptr;
  if (library.getinfo(library.api_version, nullptr, nullptr, 0, nullptr, &all) == 0) library.freeinfo(all);
  for (const char* name : ours) unsetenv(name);
}

}  // namespace

std::string version_text(std::uint32_t version) { return std::to_string(version >> 16) + "." + std::to_string(version & 0xffff); }

std::string sysfs_root() {
  const char* path = std::getenv("SYSFS_PATH");
  return path != nullptr && *path == '/' ? path : "/sys";
}

bool compiled_in() {
#ifdef PPLX_HAVE_LIBFABRIC_HEADERS
  return true;
#else
  return false;
#endif
}

const Library& library(const std::vector<std::string>& wheels) {
  if (!compiled_in()) throw FabricError("built without libfabric headers: install libfabric-dev and rebuild");
  static std::mutex mutex;
  static std::unique_ptr<Library> opened;
  const std::lock_guard<std::mutex> lock(mutex);
  if (opened == nullptr) {
    auto found = std::make_unique<Library>(find(wheels));
    initialise_providers(*found);
    opened = std::move(found);
  }
  return *opened;
}

}  // namespace pplx::libfabric
