// Which of a host's NICs one process should use: those next to its GPU, or its share.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace pplx::libfabric {

// "0000:53:00.0" -> "pci0000:50/0000:50:01.0/.../0000:53:00.0", the bridges on the way to it; empty when there is no such device.
std::string pci_path(const std::string& bus_id);

// How many leading parts two paths share: the more, the fewer bridges a transfer crosses.
std::size_t shared_bridges(const std::string& a, const std::string& b);

// Indices into `nics` (their PCI paths, empty where unknown). With `near`, all that share the most bridges with it. Otherwise the `slot`th of
// `slots` equal shares; with fewer NICs than slots, one that others use too.
std::vector<std::size_t> pick_nics(const std::vector<std::string>& nics, const std::string& near, std::size_t slot, std::size_t slots);

}  // namespace pplx::libfabric
