// libfabric at run time. It is opened by absolute path, never linked: MPI and NVSHMEM bring libraries with the same SONAME, and the
// first one loaded under that name would win for the whole process.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct fi_info;
struct fi_fabric_attr;
struct fid_fabric;

namespace pplx::libfabric {

constexpr std::uint32_t version(std::uint32_t major, std::uint32_t minor) { return (major << 16) | minor; }   // as FI_VERSION
std::string version_text(std::uint32_t version);                                                              // "1.17"

struct Library {
  std::string path;
  std::uint32_t version = 0;        // version of the library
  std::uint32_t api_version = 0;    // the version asked for: the smaller of `version` and 2.0 (more than it has is -ENOSYS)
  // An MPI wheel's copy: its efa and verbs providers bind to whichever libfabric came first, so tcp and shm only
  bool from_wheel = false;

  // The only entry points that are symbols; everything else goes through the objects' own tables.
  int (*getinfo)(std::uint32_t, const char*, const char*, std::uint64_t, const fi_info*, fi_info**) = nullptr;
  void (*freeinfo)(fi_info*) = nullptr;
  fi_info* (*dupinfo)(const fi_info*) = nullptr;
  int (*fabric)(fi_fabric_attr*, fid_fabric**, void*) = nullptr;
  const char* (*strerror)(int) = nullptr;
  std::uint32_t (*library_version)() = nullptr;
  char* (*tostr)(const void*, int) = nullptr;
};

// /sys, or SYSFS_PATH, by which the verbs libraries find their devices too: the software EFA device has a tree of its own.
std::string sysfs_root();

// True when this program was compiled with libfabric's headers. Without them every function below reports how to get them.
bool compiled_in();

// The process's libfabric, opened by the first call and kept for good. Searched in this order: $PPLX_LIBFABRIC (and nothing else
// when that is set), /opt/amazon/efa, the system's libfabric.so.1, then `wheels`. Throws FabricError that lists what was tried.
const Library& library(const std::vector<std::string>& wheels = {});

}  // namespace pplx::libfabric
