// Chooses the provider, and the NICs of it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "loader.h"
#include "topology.h"

namespace pplx::libfabric {

struct Options {
  std::string provider;                 // a name of kProviders, "verbs", or "" and "auto" for the best there is
  // efa, verbs: domain names ("rdmap16s27-rdm"); tcp, net, sockets: interfaces or addresses. Empty: chosen
  std::vector<std::string> nics;
  int endpoints = 0;                    // 0: one per NIC that is named or picked. More than there are NICs: they share them
  // efa, verbs without `nics`: of all processes of this host that share its NICs; empty: it is alone
  std::vector<Locality> localities;
  std::size_t locality = 0;             // index of this process among them
  std::size_t proxies = 1, proxy = 0;   // proxies of each process, and this fabric's: each proxy gets a CPU of its own
  std::string address;                  // tcp, net, sockets: interface or address; empty: the interface of the default route
  bool device_memory = false;           // GPU memory will be registered: only providers that can, without calling CUDA on their own
  bool peers_on_this_host = false;      // no peer lives elsewhere: shm may be chosen
  std::vector<std::string> wheels;      // further places to look for libfabric.so.1
};

struct FreeInfo {
  const Library* library;
  void operator()(fi_info* info) const { library->freeinfo(info); }
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

// One endpoint to be opened.
struct Nic {
  std::string name;
  Info info;
};

struct Choice {
  std::string provider;     // the name of kProviders
  std::vector<Nic> nics;    // one per endpoint
  std::string why;          // these NICs and no others
  int cpu = -1;             // where its proxy should run, see pick_cpus
};

// In order of preference when peers are on other hosts.
inline constexpr const char* kProviders[] = {"efa", "efa-direct", "verbs;ofi_rxm", "tcp", "tcp;ofi_rxm", "shm", "sockets", "net"};

// Throws FabricError that says why the provider cannot be used here.
Choice choose(const Library& library, const Options& options);

struct ProviderStatus {
  std::string name;
  bool available = false;
  bool device_memory = false;           // can register GPU memory
  std::vector<std::string> nics;        // domain names, or interfaces
  std::string why_not;                  // when not available
};

std::vector<ProviderStatus> provider_status(const Library& library);

}  // namespace pplx::libfabric
