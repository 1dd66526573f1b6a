#include "providers.h"

#ifdef PPLX_HAVE_LIBFABRIC_HEADERS

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>

#include "../fabric.h"
#include "interfaces.h"
#include "shm_files.h"

namespace pplx::libfabric {
namespace {

bool is_socket_provider(const std::string& provider) {
  return provider == "tcp" || provider == "tcp;ofi_rxm" || provider == "net" || provider == "sockets";
}

// shm of 1.17 guards a process's queue in shared memory with a spin lock, which writers and the reader take: a peer killed while it
// holds one hangs its next taker for good (measured: a survivor's poll within 60 kills of a peer that writes, each of four times;
// its write within 430 kills of a peer that only polls). A user that asks for shm by name gets it all the same.
bool shm_survives_dead_peers(const Library& library) { return library.version >= version(1, 18); }

std::string text(const char* pointer) { return pointer == nullptr ? std::string() : std::string(pointer); }

// Empty when this library may be asked for `provider`.
std::string refusal(const Library& library, const std::string& provider) {
  if (provider == "tcp" && library.version < version(1, 18))
    return "libfabric " + version_text(library.version) + " has no tcp for this: there it is called tcp;ofi_rxm, and net";
  // rxm of 2.5.1 looks for a state behind the null context of a write that a dying peer left half done, and crashes the process.
  if (provider == "tcp;ofi_rxm" && library.version >= version(1, 18))
    return "libfabric " + version_text(library.version) +
           " has a tcp of its own: use that, rxm over it crashes when a peer is killed";
  const std::string have = "libfabric " + version_text(library.version) + " (" + library.path + ") is too old for " + provider;
  if (provider == "efa" && library.version < version(1, 18))
    return have + ": its RDMA writes need 1.18 or newer (the EFA installer has it)";
  if (provider == "efa-direct" && library.version < version(2, 1)) return have + ": needs 2.1 or newer (the EFA installer has it)";
  if (library.from_wheel && !is_socket_provider(provider) && provider != "shm")
    return "the libfabric of an MPI wheel (" + library.path +
           ") is good for tcp and shm only: set PPLX_LIBFABRIC or install the NIC's own";
  return {};
}

Info make_hints(const Library& library, const std::string& provider) {
  Info hints(library.dupinfo(nullptr), FreeInfo{&library});
  if (hints == nullptr) throw FabricError("fi_dupinfo: out of memory");
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_LOCAL | FI_MR_ENDPOINT;
  hints->domain_attr->cq_data_size = 4;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->fabric_attr->prov_name = strdup(provider == "efa-direct" ? "efa" : provider.c_str());   // freeinfo frees it
  return hints;
}

bool matches(const fi_info& info, const std::string& provider) {
  const std::string name = text(info.fabric_attr->prov_name);
  if (provider == "efa" || provider == "efa-direct")
    return name == "efa" && (text(info.fabric_attr->name) == "efa-direct") == (provider == "efa-direct");
  return name == provider;   // asking 1.17 for "tcp" answers "tcp;ofi_rxm"
}

struct Answer {
  int error = 0;              // positive; 0 with no infos: everything was another provider
  std::vector<Info> infos;    // only those of the provider asked for
};

Answer ask(const Library& library, const std::string& provider, const char* address, bool device_memory = false) {
  const std::uint64_t flags = address == nullptr ? 0 : FI_SOURCE | FI_NUMERICHOST;
  Answer answer;
  struct Attempt {
    fi_progress progress;
    std::uint64_t mode;
  };
  // Manual progress where offered: no thread of its own. FI_RX_CQ_DATA (an arriving immediate uses up a posted receive) only where
  // it must be:
  // offering it makes efa-direct want it.
  constexpr Attempt kAttempts[] = {{FI_PROGRESS_MANUAL, 0}, {FI_PROGRESS_UNSPEC, 0}, {FI_PROGRESS_MANUAL, FI_RX_CQ_DATA},
                                   {FI_PROGRESS_UNSPEC, FI_RX_CQ_DATA}};
  for (const Attempt& attempt : kAttempts) {
    Info hints = make_hints(library, provider);
    hints->mode |= attempt.mode;
    if (device_memory) {
      hints->caps |= FI_HMEM;
      hints->domain_attr->mr_mode |= FI_MR_HMEM;
    }
    hints->domain_attr->control_progress = attempt.progress;
    hints->domain_attr->data_progress = attempt.progress;
    fi_info* list = nullptr;
    answer.error = -library.getinfo(library.api_version, address, nullptr, flags, hints.get(), &list);
    if (answer.error != 0) continue;
    const Info owner(list, FreeInfo{&library});
    for (const fi_info* info = list; info != nullptr; info = info->next) {
      if (matches(*info, provider)) answer.infos.emplace_back(library.dupinfo(info), FreeInfo{&library});
    }
    if (!answer.infos.empty()) break;
  }
  return answer;
}

std::string why_not(const Library& library, const std::string& provider, const Answer& answer) {
  if (const std::string refused = refusal(library, provider); !refused.empty()) return refused;
  std::string why = answer.error != 0 ? library.strerror(answer.error) : "the library has no such provider";
  if (answer.error == FI_ENODATA && (provider.rfind("efa", 0) == 0 || provider.rfind("verbs", 0) == 0)) {
    const std::string devices = sysfs_root() + "/class/infiniband";
    if (access(devices.c_str(), F_OK) != 0) why = "no RDMA device on this machine (" + devices + " does not exist)";
    else why += ": libfabric sees no device of this kind that it can use";
  } else if (const std::string no_room = no_room_for_shm(); provider == "shm" && !no_room.empty()) {
    why = no_room;
  } else if (answer.error == FI_ENODATA) {
    why += ": not in this library, or without one-sided writes";
  }
  return why;
}

std::string domain_of(const Info& info) { return text(info->domain_attr->name); }

// Finds the NIC by its address where libfabric knows that, else by its name.
Location location_of(const Topology& topology, const Nic& nic) {
  const fi_info& info = *nic.info;
  if (info.nic != nullptr && info.nic->bus_attr != nullptr && info.nic->bus_attr->bus_type == FI_BUS_PCI) {
    const fi_pci_attr& pci = info.nic->bus_attr->attr.pci;
    char bus_id[32];
    std::snprintf(bus_id, sizeof(bus_id), "%04x:%02x:%02x.%x", pci.domain_id, pci.bus_id, pci.device_id, pci.function_id);
    if (Location location = topology.of_pci(bus_id); !location.pci_path.empty()) return location;
  }
  return topology.of_nic(nic.name.substr(0, nic.name.find(' ')));   // a socket's name has its address too
}

// "rdmap16s27" names the same NIC as "rdmap16s27-rdm".
bool names_domain(const std::string& wanted, const std::string& domain) {
  return domain == wanted || domain.rfind(wanted + "-", 0) == 0;
}

// CPUs near any of `nics`.
std::vector<int> cpus_near(const Topology& topology, const std::vector<Nic>& nics) {
  std::vector<int> cpus;
  for (const Nic& nic : nics)
    for (const int cpu : location_of(topology, nic).cpus) cpus.push_back(cpu);
  std::sort(cpus.begin(), cpus.end());
  return cpus;
}

int cpu_of(const Options& options, const std::vector<std::vector<int>>& near) {
  if (options.locality >= options.localities.size()) return -1;
  return pick_cpus(options.localities, near, options.proxies)[options.proxy * options.localities.size() + options.locality];
}

// Both fill in all but the provider. A socket's interface serves all processes of the host.
void choose_sockets(const Library& library, const std::string& provider, const Options& options, Choice& choice) {
  if (options.device_memory) throw FabricError("provider " + provider + " does not reach GPU memory");
  std::vector<std::string> wanted = options.nics;
  choice.why = "asked for by name";
  if (wanted.empty()) {
    if (!options.address.empty()) wanted = {options.address};
    else choice.why = "the interface of the default route, or the first that is up";
  }
  std::vector<Interface> interfaces;
  for (const std::string& one : wanted) interfaces.push_back(find_interface(one));
  if (interfaces.empty()) interfaces.push_back(default_interface());
  for (const Interface& interface : interfaces) {
    Answer answer = ask(library, provider, interface.address.c_str());
    if (answer.infos.empty())
      throw FabricError("provider " + provider + " on " + interface.name + " (" + interface.address + "): " +
                        why_not(library, provider, answer));
    choice.nics.push_back({interface.name + " " + interface.address, std::move(answer.infos.front())});
  }
  choice.cpu = cpu_of(options, std::vector<std::vector<int>>(options.localities.size(), cpus_near(Topology(), choice.nics)));
}

void choose_devices(const Library& library, const std::string& provider, const Options& options, Choice& choice) {
  Answer answer = ask(library, provider, nullptr, options.device_memory);
  if (answer.infos.empty() && options.device_memory && !ask(library, provider, nullptr).infos.empty())
    throw FabricError("provider " + provider + " does not reach GPU memory: libfabric " + version_text(library.version) + " (" +
                      library.path + ") was built without CUDA, or sees no GPU");
  if (answer.infos.empty()) throw FabricError("provider " + provider + ": " + why_not(library, provider, answer));
  std::vector<Nic> all;
  for (Info& info : answer.infos) {
    const std::string domain = domain_of(info);
    const bool known = std::any_of(all.begin(), all.end(), [&](const Nic& nic) { return nic.name == domain; });
    if (!known) all.push_back({domain, std::move(info)});
  }
  const auto copy = [&](const Nic& nic) { return Nic{nic.name, Info(library.dupinfo(nic.info.get()), FreeInfo{&library})}; };
  const Topology topology;
  std::vector<std::vector<int>> near(options.localities.size());
  if (options.nics.empty()) {
    const std::vector<Locality> alone(1);
    const std::vector<Locality>& localities = options.localities.empty() ? alone : options.localities;
    if (options.locality >= localities.size())
      throw FabricError("locality " + std::to_string(options.locality) + " of " + std::to_string(localities.size()) +
                        " processes on this host");
    std::vector<NamedLocation> locations;
    for (const Nic& nic : all) locations.push_back({nic.name, location_of(topology, nic)});
    for (std::size_t locality = 0; locality < localities.size(); ++locality) {
      const Picked picked = pick_nics(topology, locations, localities, locality);
      std::vector<Nic> nics;
      for (const std::size_t index : picked.nics) nics.push_back(copy(all[index]));
      if (locality < near.size()) near[locality] = cpus_near(topology, nics);
      if (locality != options.locality) continue;
      choice.why = picked.why;
      choice.nics = std::move(nics);
    }
  } else {
    choice.why = "asked for by name";
    for (const std::string& wanted : options.nics) {
      const auto found = std::find_if(all.begin(), all.end(), [&](const Nic& nic) { return names_domain(wanted, nic.name); });
      if (found == all.end()) {
        std::string have;
        for (const Nic& nic : all) have += (have.empty() ? "" : ", ") + nic.name;
        throw FabricError("provider " + provider + " has no NIC '" + wanted + "'; it has " + have);
      }
      choice.nics.push_back(copy(*found));
    }
    for (std::vector<int>& cpus : near) cpus = cpus_near(topology, choice.nics);
  }
  choice.cpu = cpu_of(options, near);
}

Choice open_choice(const Library& library, const std::string& provider, const Options& options) {
  if (const std::string refused = refusal(library, provider); !refused.empty()) throw FabricError(refused);
  Choice choice;
  choice.provider = provider;
  (is_socket_provider(provider) ? choose_sockets : choose_devices)(library, provider, options, choice);
  const std::size_t endpoints = options.endpoints > 0 ? static_cast<std::size_t>(options.endpoints)
                                : options.nics.empty()  ? std::min<std::size_t>(choice.nics.size(), kMaxEndpoints)
                                                        : choice.nics.size();
  if (endpoints > kMaxEndpoints)
    throw FabricError(std::to_string(endpoints) + " endpoints wanted, the most is " + std::to_string(kMaxEndpoints));
  const std::size_t distinct = choice.nics.size();
  while (choice.nics.size() < endpoints) {
    const Nic& again = choice.nics[choice.nics.size() % distinct];
    Info copy(library.dupinfo(again.info.get()), FreeInfo{&library});
    choice.nics.push_back({again.name, std::move(copy)});
  }
  choice.nics.resize(endpoints);
  return choice;
}

std::vector<std::string> preference(const Library& library, const Options& options) {
  std::vector<std::string> order;
  if (options.peers_on_this_host && shm_survives_dead_peers(library)) order.push_back("shm");
  for (const char* provider : kProviders) {
    if (std::strcmp(provider, "shm") != 0) order.push_back(provider);
  }
  return order;
}

}  // namespace

Choice choose(const Library& library, const Options& options) {
  std::string provider = options.provider;
  if (provider == "verbs") provider = "verbs;ofi_rxm";
  if (!provider.empty() && provider != "auto") {
    if (std::find_if(std::begin(kProviders), std::end(kProviders),
                     [&](const char* name) { return provider == name; }) == std::end(kProviders)) {
      std::string known;
      for (const char* name : kProviders) known += std::string(known.empty() ? "" : ", ") + name;
      throw FabricError("unknown provider '" + provider + "'; known are " + known);
    }
    // libfabric before 1.18 has no tcp that can do this by itself, the name then means what its own `fi_info -p tcp` shows.
    if (provider == "tcp" && library.version < version(1, 18)) provider = "tcp;ofi_rxm";
    return open_choice(library, provider, options);
  }
  std::string reasons;
  for (const std::string& candidate : preference(library, options)) {
    try {
      return open_choice(library, candidate, options);
    } catch (const FabricError& error) {
      reasons += std::string("\n  ") + error.what();
    }
  }
  throw FabricError("libfabric " + version_text(library.version) + " (" + library.path + ") offers no usable provider:" + reasons);
}

std::vector<ProviderStatus> provider_status(const Library& library) {
  std::vector<ProviderStatus> all;
  for (const char* provider : kProviders) {
    ProviderStatus status;
    status.name = provider;
    const Answer answer = ask(library, provider, nullptr);
    status.why_not = refusal(library, provider);
    status.available = status.why_not.empty() && !answer.infos.empty();
    if (status.available) {
      for (const Info& info : answer.infos) {
        if (std::find(status.nics.begin(), status.nics.end(), domain_of(info)) == status.nics.end())
          status.nics.push_back(domain_of(info));
      }
      // shm says yes to device memory also where it has no CUDA.
      status.device_memory = status.name != "shm" && !ask(library, provider, nullptr, true).infos.empty();
    } else {
      status.why_not = why_not(library, provider, answer);
    }
    all.push_back(std::move(status));
  }
  return all;
}

}  // namespace pplx::libfabric

#else


namespace pplx::libfabric {

Choice choose(const Library&, const Options&) {
  throw FabricError("built without libfabric headers: install libfabric-dev and rebuild");
}
std::vector<ProviderStatus> provider_status(const Library&) { return {}; }

}  // namespace pplx::libfabric

#endif
