#include "topology.h"

#include <dirent.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <set>

namespace pplx::libfabric {
namespace {

std::string real_path(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> real(realpath(path.c_str(), nullptr), std::free);
  return real == nullptr ? std::string() : std::string(real.get());
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::vector<std::string> parts_of(const std::string& path) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at < path.size();) {
    const std::size_t end = std::min(path.find('/', at), path.size());
    parts.push_back(path.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

// "0000:53:00.0"
bool is_pci_address(const std::string& part) {
  const auto hex = [&](std::size_t from, std::size_t to) {
    return std::all_of(part.begin() + static_cast<std::ptrdiff_t>(from), part.begin() + static_cast<std::ptrdiff_t>(to),
                       [](unsigned char c) { return std::isxdigit(c) != 0; });
  };
  return part.size() >= 12 && part[part.size() - 8] == ':' && part[part.size() - 5] == ':' && part[part.size() - 2] == '.' &&
         hex(0, part.size() - 8) && hex(part.size() - 7, part.size() - 5) && hex(part.size() - 4, part.size() - 2) &&
         hex(part.size() - 1, part.size());
}

std::size_t shared_parts(const std::string& a, const std::string& b) {
  const std::vector<std::string> x = parts_of(a), y = parts_of(b);
  std::size_t shared = 0;
  while (shared < x.size() && shared < y.size() && x[shared] == y[shared]) ++shared;
  return shared;
}

// Nearest first. Behind a common switch, the more bridges in common the nearer.
struct Distance {
  Nearness nearness = Nearness::Far;
  std::size_t bridges = 0;

  bool operator<(const Distance& other) const {
    return nearness != other.nearness ? nearness < other.nearness : bridges > other.bridges;
  }
  bool operator==(const Distance& other) const { return nearness == other.nearness && bridges == other.bridges; }
};

// As a process sees its host.
struct View {
  Location location;   // its GPU's; of a process without one, the NUMA node that all its CPUs are of

  Distance distance(const Location& nic) const {
    if (const std::size_t shared = shared_parts(location.pci_path, nic.pci_path); shared > 1) return {Nearness::Switch, shared};
    else if (shared == 1) return {Nearness::RootComplex, 0};
    if (location.numa >= 0 && location.numa == nic.numa) return {Nearness::Numa, 0};
    return {};
  }
};

View view_of(const Topology& topology, const Locality& locality) {
  View view;
  if (!locality.gpu.empty()) view.location = topology.of_pci(locality.gpu);
  if (!view.location.pci_path.empty()) return view;
  if (const std::vector<int> nodes = topology.nodes_of(locality.cpus); nodes.size() == 1) view.location.numa = nodes.front();
  return view;
}

// Numbers by value: mlx5_2 before mlx5_10, and rdmap79s0 before rdmap113s0.
bool natural_less(const std::string& a, const std::string& b) {
  std::size_t i = 0, j = 0;
  const auto number = [](const std::string& text, std::size_t& at) {
    unsigned long long value = 0;
    for (; at < text.size() && std::isdigit(static_cast<unsigned char>(text[at])) != 0; ++at)
      value = value * 10 + static_cast<unsigned>(text[at] - '0');
    return value;
  };
  while (i < a.size() && j < b.size()) {
    if (std::isdigit(static_cast<unsigned char>(a[i])) != 0 && std::isdigit(static_cast<unsigned char>(b[j])) != 0) {
      const unsigned long long x = number(a, i), y = number(b, j);
      if (x != y) return x < y;
    } else {
      if (a[i] != b[j]) return a[i] < b[j];
      ++i;
      ++j;
    }
  }
  return a.size() - i < b.size() - j;
}

struct Candidates {
  Distance distance;
  std::vector<std::size_t> nics;
};

Candidates nearest(const View& view, const std::vector<NamedLocation>& nics) {
  Candidates nearest;
  for (std::size_t i = 0; i < nics.size(); ++i) {
    const Distance distance = view.distance(nics[i].location);
    if (distance < nearest.distance) nearest = {distance, {}};
    if (distance == nearest.distance) nearest.nics.push_back(i);
  }
  return nearest;
}

std::string describe(const Candidates& nearest, const View& view, const Locality& locality, std::size_t all) {
  const bool by_gpu = !locality.gpu.empty() && !view.location.pci_path.empty();
  const std::string who = by_gpu ? "GPU " + locality.gpu : "CPUs " + format_cpus(locality.cpus);
  switch (nearest.distance.nearness) {
    case Nearness::Switch: return "behind one PCIe switch with " + who;
    case Nearness::RootComplex: return "on one PCIe root complex with " + who;
    case Nearness::Numa: return "on NUMA node " + std::to_string(view.location.numa) + " with " + who;
    case Nearness::Far: break;
  }
  if (all == 1) return "the only one";
  if (by_gpu || view.location.numa >= 0) return "none is nearer to " + who + " than the rest";
  return locality.gpu.empty() ? "no NUMA node is this process's own" : "this host does not say where GPU " + locality.gpu + " is";
}

}  // namespace

std::vector<int> parse_cpus(const std::string& text) {
  std::vector<int> cpus;
  const char* at = text.c_str();
  while (std::isdigit(static_cast<unsigned char>(*at)) != 0) {
    char* end = nullptr;
    const long first = std::strtol(at, &end, 10);
    const long last = *end == '-' ? std::strtol(end + 1, &end, 10) : first;
    for (long cpu = first; cpu <= last; ++cpu) cpus.push_back(static_cast<int>(cpu));
    at = *end == ',' ? end + 1 : end;
  }
  return cpus;
}

std::string format_cpus(const std::vector<int>& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(cpus[i]) + (last > i ? "-" + std::to_string(cpus[last]) : "");
    i = last + 1;
  }
  return text;
}

// The device itself may be one that a driver made (virtio2, net/eth0): where it is, says the PCI device that it hangs on.
Location Topology::of_device(const std::string& folder) const {
  Location location;
  const std::string real = real_path(folder), devices = real_path(sysfs_) + "/devices/";
  if (real.rfind(devices, 0) != 0) return location;
  const std::vector<std::string> parts = parts_of(real.substr(devices.size()));
  std::size_t kept = 0;
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (is_pci_address(parts[i])) kept = i + 1;
  for (std::size_t i = 0; i < kept; ++i) location.pci_path += (i == 0 ? "" : "/") + parts[i];
  if (kept == 0) return location;
  const std::string device = devices + location.pci_path;
  if (const std::string numa = first_line(device + "/numa_node"); !numa.empty()) location.numa = std::atoi(numa.c_str());
  location.cpus = parse_cpus(first_line(device + "/local_cpulist"));
  return location;
}

Location Topology::of_pci(const std::string& bus_id) const {
  std::string name = bus_id;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  // CUDA writes the domain with eight digits, sysfs with four.
  if (const std::size_t colon = name.find(':'); colon != std::string::npos && colon > 4) name.erase(0, colon - 4);
  return is_pci_address(name) ? of_device(sysfs_ + "/bus/pci/devices/" + name) : Location{};
}

Location Topology::of_nic(const std::string& name) const {
  if (name.empty() || name.find('/') != std::string::npos) return {};
  // libfabric appends the kind of endpoint: "rdmap16s27-rdm".
  for (const std::string& device : {name, name.substr(0, name.rfind('-'))})
    for (const char* kind : {"/class/infiniband/", "/class/net/"})
      if (Location location = of_device(sysfs_ + kind + device); !location.pci_path.empty()) return location;
  return {};
}

std::vector<int> Topology::nodes_of(const std::vector<int>& cpus) const {
  std::vector<int> nodes;
  const std::string folder = sysfs_ + "/devices/system/node";
  const std::unique_ptr<DIR, int (*)(DIR*)> listing(opendir(folder.c_str()), closedir);
  if (listing == nullptr) return nodes;
  while (const dirent* entry = readdir(listing.get())) {
    const std::string name = entry->d_name;
    if (name.rfind("node", 0) != 0 || name.size() == 4 || std::isdigit(static_cast<unsigned char>(name[4])) == 0) continue;
    const std::vector<int> here = parse_cpus(first_line(folder + "/" + name + "/cpulist"));
    const bool ours = std::any_of(cpus.begin(), cpus.end(),
                                  [&](int cpu) { return std::binary_search(here.begin(), here.end(), cpu); });
    if (ours) nodes.push_back(std::atoi(name.c_str() + 4));
  }
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

Picked pick_nics(const Topology& topology, const std::vector<NamedLocation>& nics, const std::vector<Locality>& localities,
                 std::size_t self) {
  const View view = view_of(topology, localities.at(self));
  Candidates mine = nearest(view, nics);
  std::size_t before = 0, sharing = 0;
  for (std::size_t i = 0; i < localities.size(); ++i) {
    if (i != self && nearest(view_of(topology, localities[i]), nics).nics != mine.nics) continue;
    before += i < self;
    ++sharing;
  }
  Picked picked;
  picked.why = describe(mine, view, localities[self], nics.size());
  std::sort(mine.nics.begin(), mine.nics.end(),
            [&](std::size_t a, std::size_t b) { return natural_less(nics[a].name, nics[b].name); });
  const std::size_t count = mine.nics.size();
  for (std::size_t i = 0; i < count; ++i)
    if (count < sharing ? i == before % count : i * sharing / count == before) picked.nics.push_back(mine.nics[i]);
  if (sharing > 1 && count > 1)
    picked.why += "; " + std::to_string(picked.nics.size()) + " of these " + std::to_string(count) + ", which " +
        std::to_string(sharing) + " processes share";
  return picked;
}

std::vector<int> pick_cpus(const std::vector<Locality>& localities, const std::vector<std::vector<int>>& near,
                           std::size_t proxies) {
  std::vector<int> picked;
  std::set<int> taken;
  for (std::size_t i = 0; i < localities.size() * proxies; ++i) {
    const std::size_t self = i % localities.size();
    const std::vector<int>& allowed = localities[self].cpus;
    const auto wanted = static_cast<std::size_t>(std::count_if(localities.begin(), localities.end(), [&](const Locality& other) {
      return std::any_of(allowed.begin(), allowed.end(),
                         [&](int cpu) { return std::binary_search(other.cpus.begin(), other.cpus.end(), cpu); });
    }));
    int best = -1;
    if (allowed.size() >= 2 * wanted * proxies) {
      // From the end: there are the second threads of cores, and not what others take first.
      const auto free = [&](int cpu) { return taken.count(cpu) == 0; };
      const auto is_near = [&](int cpu) { return std::binary_search(near[self].begin(), near[self].end(), cpu); };
      auto found = std::find_if(allowed.rbegin(), allowed.rend(), [&](int cpu) { return free(cpu) && is_near(cpu); });
      if (found == allowed.rend()) found = std::find_if(allowed.rbegin(), allowed.rend(), free);
      if (found != allowed.rend()) best = *found;
    }
    if (best >= 0) taken.insert(best);
    picked.push_back(best);
  }
  return picked;
}

}  // namespace pplx::libfabric
