#include "shm_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>

#include "../fabric.h"

namespace pplx::libfabric {
namespace {

constexpr const char* kFolder = "/dev/shm";
constexpr const char* kPrefix = "pplx-fi.";
constexpr std::uint64_t kRoom = 32ull << 20;   // an endpoint's file has 16 MiB with 1.17, which asks for nearly as much again

struct Owner {
  unsigned long long pid_namespace = 0;
  unsigned pid = 0;
  unsigned long long start_time = 0;
};

bool parse(const std::string& name, Owner& owner) {
  int end = 0;
  return std::sscanf(name.c_str(), "pplx-fi.%llu.%u.%llu.%n", &owner.pid_namespace, &owner.pid, &owner.start_time, &end) == 3 &&
         end > 0;
}

bool is_gone(const Owner& owner) {
  if (owner.pid_namespace != pid_namespace()) return false;
  return process_start_time(owner.pid) != owner.start_time;
}

template <class Wanted>
int remove_files(const Wanted& wanted) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(kFolder), closedir);
  if (folder == nullptr) return 0;
  int removed = 0;
  while (const dirent* entry = readdir(folder.get())) {
    const std::string name = entry->d_name;
    Owner owner;
    if (name.rfind(kPrefix, 0) == 0 && parse(name, owner) && wanted(name, owner))
      removed += unlink((std::string(kFolder) + "/" + name).c_str()) == 0;
  }
  return removed;
}

// `file` is the endpoint's own file, or "<name>_<digits>".
bool belongs_to(const std::string& file, const std::string& name) {
  if (file.rfind(name, 0) != 0) return false;
  if (file.size() == name.size()) return true;
  return file.size() > name.size() + 1 && file[name.size()] == '_' &&
         std::all_of(file.begin() + static_cast<std::ptrdiff_t>(name.size()) + 1, file.end(),
                     [](unsigned char c) { return std::isdigit(c) != 0; });
}

bool belongs_to_any(const std::string& file, const std::vector<std::string>& names) {
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) { return belongs_to(file, name); });
}

}  // namespace

std::string host_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

std::uint64_t pid_namespace() {
  struct stat status {};
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

std::uint64_t process_start_time(std::uint32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return 0;
  const std::size_t end_of_name = line.rfind(')');
  if (end_of_name == std::string::npos) return 0;
  std::istringstream fields(line.substr(end_of_name + 1));
  std::string state, skipped;
  fields >> state;
  if (state == "Z" || state == "X") return 0;   // killed, only its parent has not looked yet
  std::uint64_t flags = 0, start_time = 0, pending = 0;   // the 9th, 22nd and 31st of proc(5)
  for (int field = 4; field <= 8; ++field) fields >> skipped;
  fields >> flags;
  for (int field = 10; field <= 21; ++field) fields >> skipped;
  fields >> start_time;
  for (int field = 23; field <= 30; ++field) fields >> skipped;
  fields >> pending;
  constexpr std::uint64_t kExiting = 4, kKilled = 1u << (SIGKILL - 1);
  return (flags & kExiting) != 0 || (pending & kKilled) != 0 ? 0 : start_time;   // no line of it runs any more
}

std::string new_shm_name(int endpoint) {
  std::random_device random;
  char name[160];
  std::snprintf(name, sizeof(name), "%s%llu.%u.%llu.%08x%08x.%d", kPrefix, static_cast<unsigned long long>(pid_namespace()),
                static_cast<unsigned>(getpid()),
                static_cast<unsigned long long>(process_start_time(static_cast<std::uint32_t>(getpid()))), random(), random(),
                endpoint);
  return name;
}

std::string no_room_for_shm() {
  struct statvfs status {};
  const bool there = statvfs(kFolder, &status) == 0;
  const std::uint64_t left = std::uint64_t{status.f_bavail} * status.f_frsize;
  if (there && (left >= kRoom || status.f_blocks == 0)) return "";   // no blocks: a tmpfs without a limit
  return std::string(kFolder) + " has " + std::to_string(left >> 20) + " MiB left, an endpoint of shm needs " +
         std::to_string(kRoom >> 20) + ": free some, mount a larger one (docker run --shm-size=1g), or take provider='tcp'";
}

ShmTurn::ShmTurn() : folder_(open(kFolder, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  for (int tries = 0; tries < 500 && flock(folder_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; ++tries) usleep(10000);
  const std::string problem = no_room_for_shm();
  if (problem.empty()) return;
  close(folder_);
  throw FabricError("provider shm: " + problem);
}

ShmTurn::~ShmTurn() { close(folder_); }

void ShmTurn::reserve(const std::string& name) const {
  const int file = openat(folder_, name.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  struct stat status {};
  const int problem = file < 0 || fstat(file, &status) != 0 ? errno : posix_fallocate(file, 0, status.st_size);
  if (file >= 0) close(file);
  if (problem != 0)
    throw FabricError("provider shm: cannot reserve " + std::string(kFolder) + "/" + name + ": " + std::strerror(problem));
}

int cleanup_dead_peer(const Blob& blob) {
  const Address address = decode_address(blob);
  if (address.host != host_id() || address.shm_names.empty()) return 0;
  return remove_files(
      [&](const std::string& file, const Owner& owner) { return belongs_to_any(file, address.shm_names) && is_gone(owner); });
}

int cleanup_dead_processes() {
  return remove_files([](const std::string&, const Owner& owner) { return is_gone(owner); });
}

int remove_shm_files(const std::vector<std::string>& names) {
  return remove_files([&](const std::string& file, const Owner&) { return belongs_to_any(file, names); });
}

}  // namespace pplx::libfabric
