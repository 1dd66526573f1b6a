// Chooses a process's NICs, and the CPU of its proxy, from sysfs: where NICs, GPUs and CPUs are.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "loader.h"

namespace pplx::libfabric {

// The GPU and CPUs of one process of this host.
struct Locality {
  std::string gpu;          // PCI address of its GPU, "0000:53:00.0"; empty: it computes on the CPU
  std::vector<int> cpus;    // that it may run on, ascending
};

// A device's place in the machine. Parts that are unknown (a container may hide them) are empty.
struct Location {
  std::string pci_path;     // the bridges on the way to it: "pci0000:50/0000:50:01.0/.../0000:53:00.0"
  int numa = -1;
  std::vector<int> cpus;    // that are near
};

class Topology {
 public:
  explicit Topology(std::string sysfs = sysfs_root()) : sysfs_(std::move(sysfs)) {}

  Location of_pci(const std::string& bus_id) const;                 // as CUDA and libfabric write it
  // An RDMA device or libfabric's domain on it, or a network interface
  Location of_nic(const std::string& name) const;
  std::vector<int> nodes_of(const std::vector<int>& cpus) const;    // NUMA nodes

 private:
  Location of_device(const std::string& folder) const;

  std::string sysfs_;
};

enum class Nearness { Switch, RootComplex, Numa, Far };

struct Picked {
  std::vector<std::size_t> nics;      // indices
  std::string why;                    // text for doctor and logs: "behind one PCIe switch with GPU 0000:53:00.0"
};

struct NamedLocation {
  std::string name;
  Location location;
};

// Returns the NICs nearest to the process `localities[self]`. Processes with the same nearest NICs share them as evenly as
// possible. If distances are unknown, or all equal, all processes share all NICs.
Picked pick_nics(const Topology& topology, const std::vector<NamedLocation>& nics, const std::vector<Locality>& localities,
                 std::size_t self);

// A CPU for each process's proxy, -1 for none: one of its own, near its NICs where it may run there. Only where there are two for
// each process that could want them: a proxy that is tied to a CPU that others need is slower than one that is not tied. With
// several proxies in each process the first ones' CPUs come first.
std::vector<int> pick_cpus(const std::vector<Locality>& localities, const std::vector<std::vector<int>>& near,
                           std::size_t proxies = 1);

// "0-3,8" and back, as sysfs writes it.
std::vector<int> parse_cpus(const std::string& text);
std::string format_cpus(const std::vector<int>& cpus);

}  // namespace pplx::libfabric
