#include "topology.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <memory>

namespace pplx::libfabric {

std::string pci_path(const std::string& bus_id) {
  std::string name = bus_id;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  // CUDA writes the domain with eight digits, sysfs with four.
  if (const std::size_t colon = name.find(':'); colon != std::string::npos && colon > 4) name.erase(0, colon - 4);
  const std::unique_ptr<char, void (*)(void*)> real(realpath(("/sys/bus/pci/devices/" + name).c_str(), nullptr), std::free);
  if (real == nullptr) return {};
  const std::string path = real.get();
  constexpr const char* kRoot = "/sys/devices/";
  return path.rfind(kRoot, 0) == 0 ? path.substr(std::string(kRoot).size()) : path;
}

std::size_t shared_bridges(const std::string& a, const std::string& b) {
  std::size_t shared = 0;
  for (std::size_t at = 0; at < a.size() && at < b.size();) {
    const std::size_t end_a = std::min(a.find('/', at), a.size()), end_b = std::min(b.find('/', at), b.size());
    if (end_a != end_b || a.compare(at, end_a - at, b, at, end_b - at) != 0) break;
    ++shared;
    at = end_a + 1;
  }
  return shared;
}

std::vector<std::size_t> pick_nics(const std::vector<std::string>& nics, const std::string& near, std::size_t slot, std::size_t slots) {
  std::size_t closest = 0;
  for (const std::string& nic : nics) closest = std::max(closest, shared_bridges(nic, near));
  std::vector<std::size_t> picked;
  for (std::size_t i = 0; i < nics.size(); ++i) {
    const bool mine = closest > 0 ? shared_bridges(nics[i], near) == closest : nics.size() < slots ? i == slot % nics.size() : i * slots / nics.size() == slot;
    if (mine) picked.push_back(i);
  }
  return picked;
}

}  // namespace pplx::libfabric
