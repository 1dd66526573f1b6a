// The files that libfabric's shm provider keeps in /dev/shm, and what to do about those of a process that was killed.
//
// The provider removes them on close and on SIGTERM, SIGINT, SIGSEGV and SIGBUS, but not after SIGKILL. It makes one file per
// endpoint, named as we say, and (1.17, large writes without CMA) "<name>_<number>" per write in flight.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "blobs.h"

namespace pplx::libfabric {

std::string host_id();
std::uint64_t pid_namespace();
std::uint64_t process_start_time(std::uint32_t pid);   // 0: there is no such process, or it was killed and is about to be gone

// "pplx-fi.<pid namespace>.<pid>.<start time>.<random>.<endpoint>": unique, even when a pid is used again.
std::string new_shm_name(int endpoint);

// Empty if /dev/shm has room for an endpoint's file; else what it has, and what to do.
std::string no_room_for_shm();

// Held while an endpoint makes its file. The provider looks at the room, and touches pages that it has not reserved: ranks that did
// so at once, or a /dev/shm that filled up later, ended in SIGBUS.
class ShmTurn {
 public:
  ShmTurn();   // waits for other processes' turns, for a while; throws FabricError if there is no room then
  ~ShmTurn();
  ShmTurn(const ShmTurn&) = delete;
  ShmTurn& operator=(const ShmTurn&) = delete;
  void reserve(const std::string& name) const;   // all pages of the file; throws FabricError

 private:
  int folder_;
};

// Removes the files of that address if its process is of this host and gone; how many. A process that lives, or whose pid we cannot
// see because it is of another pid namespace, keeps its files.
int cleanup_dead_peer(const Blob& address);

// Does that for every process that ever named files as above.
int cleanup_dead_processes();

// Removes this process's own files, by the names of its endpoints; how many. Memory that is mapped stays mapped.
int remove_shm_files(const std::vector<std::string>& names);

}  // namespace pplx::libfabric
