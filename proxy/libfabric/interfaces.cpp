#include "interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <algorithm>
#include <fstream>
#include <memory>
#include <sstream>
#include <tuple>

#include "../fabric.h"

namespace pplx::libfabric {
namespace {

struct Found {
  Interface interface;
  bool loopback = false;
  bool v6 = false;
};

std::vector<Found> usable_interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return {};
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, freeifaddrs);
  std::vector<Found> found;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    char text[INET6_ADDRSTRLEN] = {};
    const int family = entry->ifa_addr->sa_family;
    if (family == AF_INET) {
      inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr, text, sizeof(text));
    } else if (family == AF_INET6) {
      const in6_addr& address = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr)->sin6_addr;
      if (IN6_IS_ADDR_LINKLOCAL(&address)) continue;   // means nothing without a scope on the other side
      inet_ntop(AF_INET6, &address, text, sizeof(text));
    } else {
      continue;
    }
    found.push_back({{entry->ifa_name, text}, (entry->ifa_flags & IFF_LOOPBACK) != 0, family == AF_INET6});
  }
  return found;
}

std::string default_route_interface() {
  std::ifstream routes("/proc/net/route");
  std::string line;
  while (std::getline(routes, line)) {
    std::istringstream fields(line);
    std::string name, destination;
    if (fields >> name >> destination && destination == "00000000") return name;
  }
  return {};
}

}  // namespace

Interface find_interface(const std::string& wanted) {
  const std::vector<Found> all = usable_interfaces();
  for (const bool v6 : {false, true}) {
    for (const Found& found : all) {
      if (found.v6 == v6 && (found.interface.name == wanted || found.interface.address == wanted)) return found.interface;
    }
  }
  std::string have;
  for (const Found& found : all) have += (have.empty() ? "" : ", ") + found.interface.name + " (" + found.interface.address + ")";
  throw FabricError("no interface or address '" + wanted + "' on this machine; it has " + have);
}

Interface default_interface() {
  const std::vector<Found> all = usable_interfaces();
  if (all.empty()) throw FabricError("this machine has no interface that is up, not even loopback: `ip link set lo up`");
  const std::string routed = default_route_interface();
  const auto order = [&](const Found& f) { return std::tuple(f.loopback || f.interface.name != routed, f.loopback, f.v6); };
  return std::min_element(all.begin(), all.end(), [&](const Found& a, const Found& b) { return order(a) < order(b); })->interface;
}

}  // namespace pplx::libfabric
