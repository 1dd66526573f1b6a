// Chooses this machine's addresses for the socket providers (tcp, net, sockets).
#pragma once

#include <string>
#include <vector>

namespace pplx::libfabric {

struct Interface {
  std::string name;      // "eth0"
  std::string address;   // "192.0.2.2"
};

// `wanted` is an interface name or an address of this machine; throws FabricError when this machine has no such thing.
Interface find_interface(const std::string& wanted);

// The one that other hosts can most likely reach: that of the default route, else the first that is up, else loopback.
Interface default_interface();

}  // namespace pplx::libfabric
