// The libfabric back end over every provider that works on this machine: processes that write to each other, peers that are killed,
// and the files that they leave behind.
//
//   test_libfabric                     all tests, with the library that a user would get and with each of
//                                      $PPLX_TEST_LIBFABRIC (colons between)
//   test_libfabric --times             half round trip times instead
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "bench/native/bare_writes.h"
#include "proxy/libfabric/blobs.h"
#include "proxy/libfabric/libfabric_fabric.h"
#include "proxy/libfabric/loader.h"

namespace {

using namespace pplx;
using Clock = std::chrono::steady_clock;
using std::chrono::duration_cast;
using std::chrono::milliseconds;

constexpr std::uint8_t kPoison = 0xa5;
constexpr std::size_t kMiB = std::size_t{1} << 20;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Runs `step` until it returns true. A wait that does not end fails with its own name.
template <class Step>
void until(const std::string& what, Step step, double limit = 30) {
  const Clock::time_point start = Clock::now();
  while (!step()) {
    if (seconds_since(start) > limit) check::fail(__FILE__, __LINE__, "waited " + std::to_string(limit) + " s for " + what);
    sched_yield();
  }
}

libfabric::Options options(const std::string& provider, int endpoints = 1) {
  libfabric::Options options;
  options.provider = provider;
  options.endpoints = endpoints;
  return options;
}

// ---- messages that both sides know

struct Message {
  std::uint32_t immediate;
  std::size_t bytes;
  std::size_t source;
  std::size_t target;
  std::uint64_t payload_seed;
};

struct Traffic {
  std::vector<Message> messages;
  std::size_t source_bytes = 0;
  std::size_t target_bytes = 0;
};

// Eight bytes a step: debug builds under valgrind or a sanitizer run this too.
void fill(std::uint8_t* out, std::size_t bytes, std::uint64_t seed) {
  for (std::size_t at = 0; at < bytes; at += 8) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    const std::uint64_t word = seed ^ (seed >> 29);
    std::memcpy(out + at, &word, std::min<std::size_t>(8, bytes - at));
  }
}

bool holds(const std::uint8_t* place, std::size_t bytes, std::uint64_t seed) {
  std::vector<std::uint8_t> expected(bytes);
  fill(expected.data(), bytes, seed);
  return std::equal(expected.begin(), expected.end(), place);
}

Traffic make_traffic(std::uint64_t seed, int count, std::size_t largest) {
  check::Random random(seed);
  Traffic traffic;
  std::set<std::uint32_t> used;
  const std::size_t edges[] = {0, 1, 7, 8, 9, 63, 64, 65, 192, 4095, 4096, 4097, 7168, 16384, 65536, kMiB};
  for (int i = 0; i < count; ++i) {
    Message message{};
    message.bytes = static_cast<std::size_t>(i) < std::size(edges) ? std::min(edges[i], largest)
                    : random.integer(0, 1) == 0 ? static_cast<std::size_t>(random.integer(0, 300))
                          : static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(largest)));
    // Every single bit, none, all, then anything: no immediate twice.
    message.immediate = i < 32    ? std::uint32_t{1} << i
                        : i == 32 ? 0
                        : i == 33 ? 0xffffffffu
                                  : static_cast<std::uint32_t>(random.integer(0, 0xffffffff));
    while (!used.insert(message.immediate).second) ++message.immediate;
    message.source = traffic.source_bytes + static_cast<std::size_t>(random.integer(0, 20));
    message.target = traffic.target_bytes + static_cast<std::size_t>(random.integer(0, 70));
    message.payload_seed = static_cast<std::uint64_t>(random.integer(1, 1 << 30));
    traffic.source_bytes = message.source + message.bytes;
    traffic.target_bytes = message.target + message.bytes;
    traffic.messages.push_back(message);
  }
  traffic.source_bytes += 64;
  traffic.target_bytes += 64;
  return traffic;
}

// ---- one process's end of a fabric

class Side {
 public:
  Side(const libfabric::Options& options, std::size_t source_bytes, std::size_t target_bytes)
      : source_(source_bytes, kPoison), target_(target_bytes, kPoison), fabric_(std::make_unique<LibfabricFabric>(options)) {
    source_region_ = fabric_->register_memory(source_.data(), source_.size(), 0);
    target_region_ = fabric_->register_memory(target_.data(), target_.size(), target_.size());
  }
  void meet(int peer, const Blob& address, const Blob& description) {
    fabric_->insert_peer(peer, address);
    if (remote_.size() <= static_cast<std::size_t>(peer)) remote_.resize(static_cast<std::size_t>(peer) + 1);
    remote_[static_cast<std::size_t>(peer)] = fabric_->import_region(peer, description);
  }
  Post write(int peer, std::size_t bytes, std::size_t source, std::size_t target, std::uint32_t immediate, std::uint64_t context,
             int endpoint = 0) {
    Write write;
    write.endpoint = endpoint;
    write.peer = peer;
    write.source = &source_region_;
    write.source_offset = source;
    write.bytes = bytes;
    write.target = &remote_[static_cast<std::size_t>(peer)];
    write.target_offset = target;
    write.immediate = immediate;
    write.context = context;
    return fabric_->write(write);
  }
  LibfabricFabric& fabric() { return *fabric_; }
  std::vector<std::uint8_t>& source() { return source_; }
  std::vector<std::uint8_t>& target() { return target_; }
  const LocalRegion& source_region() const { return source_region_; }
  const LocalRegion& target_region() const { return target_region_; }
  const RemoteRegion& remote(int peer) const { return remote_[static_cast<std::size_t>(peer)]; }
  void close() { fabric_->close(); }

 private:
  std::vector<std::uint8_t> source_, target_;   // outlive the fabric
  std::unique_ptr<LibfabricFabric> fabric_;
  LocalRegion source_region_, target_region_;
  std::vector<RemoteRegion> remote_;
};

void introduce(Side& a, int a_is, Side& b, int b_is) {
  a.meet(b_is, b.fabric().address(), b.target_region().description);
  b.meet(a_is, a.fabric().address(), a.target_region().description);
}

// Sends `out` to one peer and expects `in` from it; step() by step, so that one process can run several.
class Exchange {
 public:
  Exchange(Side& side, int peer, const Traffic& out, const Traffic& in)
      : side_(side), peer_(peer), out_(out), in_(in), sent_(out.messages.size()), arrived_(in.messages.size()) {
    for (const Message& message : out_.messages) fill(side_.source().data() + message.source, message.bytes, message.payload_seed);
  }
  bool done() const { return posted_ == out_.messages.size() && sent_count_ == posted_ && arrived_count_ == in_.messages.size(); }
  bool step() {
    while (posted_ < out_.messages.size()) {
      const Message& message = out_.messages[posted_];
      const int endpoint = static_cast<int>(posted_) % side_.fabric().endpoints();
      if (side_.write(peer_, message.bytes, message.source, message.target, message.immediate, posted_ << 40 | 7,
                      endpoint) == Post::Again) {
        ++again_;
        break;
      }
      ++posted_;
    }
    Completion completions[16];
    const int count = side_.fabric().poll(completions, 16);
    for (int i = 0; i < count; ++i) handle(completions[i]);
    return done();
  }
  // All of it, payloads and the poison between them; and nothing more came.
  void compare() {
    Completion completion;
    for (int i = 0; i < 50; ++i) CHECK_EQ(side_.fabric().poll(&completion, 1), 0);
    std::vector<std::uint8_t> expected(side_.target().size(), kPoison);
    for (const Message& message : in_.messages) fill(expected.data() + message.target, message.bytes, message.payload_seed);
    for (std::size_t at = 0; at < expected.size(); ++at) {
      if (expected[at] != side_.target()[at])
        check::fail(__FILE__, __LINE__, "byte " + std::to_string(at) + " of the target is wrong");
    }
    for (const Message& message : out_.messages)
      CHECK(holds(side_.source().data() + message.source, message.bytes, message.payload_seed));
  }
  std::size_t again() const { return again_; }

 private:
  void handle(const Completion& completion) {
    if (completion.kind == Completion::Kind::Failed) check::fail(__FILE__, __LINE__, side_.fabric().describe_error(completion));
    if (completion.kind == Completion::Kind::Sent) {
      CHECK(completion.has_context);
      CHECK_EQ(completion.context & 0xffffffffffu, 7u);
      const std::size_t index = completion.context >> 40;
      CHECK(index < sent_.size());
      CHECK(!sent_[index]);
      sent_[index] = true;
      ++sent_count_;
      return;
    }
    for (std::size_t index = 0; index < in_.messages.size(); ++index) {
      const Message& message = in_.messages[index];
      if (message.immediate != completion.immediate) continue;
      CHECK(!arrived_[index]);
      arrived_[index] = true;
      ++arrived_count_;
      // Already when the completion is there
      CHECK(holds(side_.target().data() + message.target, message.bytes, message.payload_seed));
      return;
    }
    check::fail(__FILE__, __LINE__, "an immediate that was never sent: " + std::to_string(completion.immediate));
  }
  Side& side_;
  int peer_;
  const Traffic& out_;
  const Traffic& in_;
  std::vector<bool> sent_, arrived_;
  std::size_t posted_ = 0, sent_count_ = 0, arrived_count_ = 0, again_ = 0;
};

// ---- a second process: this program again, talking over a socket

class Pipe {
 public:
  explicit Pipe(int fd) : fd_(fd) {}
  ~Pipe() {
    if (fd_ >= 0) ::close(fd_);
  }
  Pipe(Pipe&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Pipe& operator=(Pipe&&) = delete;
  void send(const Blob& blob) {
    const auto size = static_cast<std::uint32_t>(blob.size());
    CHECK_EQ(::write(fd_, &size, sizeof(size)), static_cast<ssize_t>(sizeof(size)));
    CHECK_EQ(::write(fd_, blob.data(), blob.size()), static_cast<ssize_t>(blob.size()));
  }
  bool ready() const {
    pollfd entry{fd_, POLLIN, 0};
    return ::poll(&entry, 1, 0) == 1;
  }
  Blob receive() {
    std::uint32_t size = 0;
    read_all(&size, sizeof(size));
    Blob blob(size);
    read_all(blob.data(), size);
    return blob;
  }

 private:
  void read_all(void* out, std::size_t bytes) {
    auto* at = static_cast<std::uint8_t*>(out);
    while (bytes > 0) {
      const ssize_t got = ::read(fd_, at, bytes);
      if (got <= 0) check::fail(__FILE__, __LINE__, "the other process ended early");
      at += got;
      bytes -= static_cast<std::size_t>(got);
    }
  }
  int fd_;
};

std::set<std::string> started;   // the pids of all children so far

struct Child {
  pid_t pid;
  Pipe pipe;
  int wait() {
    int status = 0;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    return status;
  }
};

Child spawn(std::vector<std::string> arguments) {
  int fds[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  CHECK_EQ(fcntl(fds[0], F_SETFD, FD_CLOEXEC), 0);
  arguments.insert(arguments.begin(), {"/proc/self/exe", "--child", std::to_string(fds[1])});
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    execv("/proc/self/exe", argv.data());
    _exit(127);
  }
  ::close(fds[1]);
  started.insert(std::to_string(pid));
  return {pid, Pipe(fds[0])};
}

void introduce(Side& side, int peer, Pipe& pipe) {
  pipe.send(side.fabric().address());
  pipe.send(side.target_region().description);
  const Blob address = pipe.receive();
  side.meet(peer, address, pipe.receive());
  pipe.send({1});   // no side writes before both know each other
  pipe.receive();
}

// Both sides poll until both are done: the other's last writes may need it.
void finish(Side& side, Pipe& pipe) {
  pipe.send({1});
  Completion completion;
  until("the other process to be done", [&] {
    CHECK_EQ(side.fabric().poll(&completion, 1), 0);
    return pipe.ready();
  });
  pipe.receive();
}

void exchange_with_process(Side& side, Pipe& pipe, const Traffic& out, const Traffic& in) {
  introduce(side, 3, pipe);
  Exchange exchange(side, 3, out, in);
  until("an exchange between two processes", [&] { return exchange.step(); });
  finish(side, pipe);
  exchange.compare();
}

int child_exchange(Pipe& pipe, const std::string& provider, int endpoints, std::uint64_t seed) {
  const Traffic out = make_traffic(seed + 1, 80, kMiB), in = make_traffic(seed, 80, kMiB);
  Side side(options(provider, endpoints), out.source_bytes, in.target_bytes);
  exchange_with_process(side, pipe, out, in);
  return 0;
}

// A peer that is killed does one of these at that moment.
enum class Victim {
  Polls,
  // And polls: one write more for each of the parent's, since shm of 2.5.1 does not return from fi_cq_read while a peer keeps its
  // queue filled
  Writes,
  Still      // it has polled, and then makes no call of the provider's
};

std::string name_of(Victim victim) {
  return victim == Victim::Polls ? "victim" : victim == Victim::Writes ? "busy-victim" : "still-victim";
}

int child_victim(Pipe& pipe, const std::string& provider, Victim victim) {
  Side side(options(provider), kMiB, kMiB);
  introduce(side, 0, pipe);
  Completion completions[16];
  bool said = false;
  std::uint64_t posted = 0, arrived = 0;
  const bool busy = victim == Victim::Writes;
  for (;;) {
    if (victim == Victim::Still && pipe.ready()) {
      pipe.receive();
      pipe.send({1});
      for (;;) pause();
    }
    if (busy && posted < 64 + arrived &&
        side.write(0, posted % 3 == 0 ? 65536 : 1000, 0, 0, static_cast<std::uint32_t>(posted), posted) == Post::Accepted) ++posted;
    if (!said && (!busy || posted >= 50)) {
      pipe.send({1});
      said = true;
    }
    const int count = side.fabric().poll(completions, 16);
    for (int i = 0; i < count; ++i) arrived += completions[i].kind == Completion::Kind::Arrived ? 1 : 0;
    if (count == 0) sched_yield();
  }
}

// Both processes do this; the blocks land in reverse.
void bare_writes_with_process(Pipe& pipe, const std::string& provider) {
  constexpr std::size_t kBlocks = 64, kBytes = 1024;
  Side side(options(provider, 2), kBlocks * kBytes, kBlocks * kBytes);
  introduce(side, 0, pipe);
  fill(side.source().data(), kBlocks * kBytes, 5);
  const RemoteRegion there = side.remote(0);
  std::vector<BareWrite> writes;
  for (std::size_t i = 0; i < kBlocks; ++i) writes.push_back({0, &there, kBytes, i * kBytes, (kBlocks - 1 - i) * kBytes});
  std::size_t early = 0;
  for (int round = 0; round < 3; ++round)
    run_bare_writes(side.fabric(), side.source_region(), writes, kBlocks, early, std::chrono::seconds(20));
  finish(side, pipe);
  CHECK_EQ(early, 0u);
  for (std::size_t i = 0; i < kBlocks; ++i)
    CHECK(std::memcmp(side.target().data() + (kBlocks - 1 - i) * kBytes, side.source().data() + i * kBytes, kBytes) == 0);
}

// Answers every write with one of the same size.
int child_echo(Pipe& pipe, const std::string& provider) {
  Side side(options(provider), kMiB, kMiB);
  introduce(side, 0, pipe);
  Completion completions[16];
  std::size_t owed = 0, bytes = 0;
  while (!pipe.ready()) {
    const int count = side.fabric().poll(completions, 16);
    for (int i = 0; i < count; ++i) {
      if (completions[i].kind != Completion::Kind::Arrived) continue;
      ++owed;
      bytes = completions[i].immediate;
    }
    while (owed > 0 && side.write(0, bytes, 0, 0, static_cast<std::uint32_t>(bytes), 0) == Post::Accepted) --owed;
    if (count == 0) sched_yield();
  }
  return 0;
}

// ---- what a process leaves behind

// Files of this process and of those it started; others may run beside us.
std::set<std::string> shm_files() {
  std::set<std::string> files;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/dev/shm"), closedir);
  while (const dirent* entry = readdir(folder.get())) {
    std::istringstream name(entry->d_name);
    std::string prefix, pid_namespace, pid;
    std::getline(std::getline(std::getline(name, prefix, '.'), pid_namespace, '.'), pid, '.');
    if (prefix == "pplx-fi" && (pid == std::to_string(getpid()) || started.count(pid) != 0)) files.insert(entry->d_name);
  }
  return files;
}

int entries(const char* path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(path), closedir);
  int count = 0;
  while (readdir(folder.get()) != nullptr) ++count;
  return count;
}

// ---- tests

void test_two_in_one_process(const std::string& provider, int a_endpoints, int b_endpoints, std::uint64_t seed) {
  const Traffic forth = make_traffic(seed, 120, kMiB), back = make_traffic(seed + 1, 120, kMiB);
  Side a(options(provider, a_endpoints), forth.source_bytes, back.target_bytes);
  Side b(options(provider, b_endpoints), back.source_bytes, forth.target_bytes);
  introduce(a, 0, b, 1);
  Exchange from_a(a, 1, forth, back), from_b(b, 0, back, forth);
  until("both ends of an exchange in one process", [&] {
    const bool one = from_a.step(), other = from_b.step();
    return one && other;
  });
  from_a.compare();
  from_b.compare();
}

void test_three_in_one_process(const std::string& provider, std::uint64_t seed) {
  // A ring: each side writes to the next and hears from the one before.
  const Traffic traffic = make_traffic(seed, 60, 100000);
  std::vector<std::unique_ptr<Side>> sides;
  for (int rank = 0; rank < 3; ++rank)
    sides.push_back(std::make_unique<Side>(options(provider), traffic.source_bytes, traffic.target_bytes));
  for (int rank = 0; rank < 3; ++rank) {
    for (int peer = 0; peer < 3; ++peer) {
      Side& other = *sides[static_cast<std::size_t>(peer)];
      if (peer != rank)
        sides[static_cast<std::size_t>(rank)]->meet(peer, other.fabric().address(), other.target_region().description);
    }
  }
  std::vector<Exchange> exchanges;
  for (int rank = 0; rank < 3; ++rank)
    exchanges.emplace_back(*sides[static_cast<std::size_t>(rank)], (rank + 1) % 3, traffic, traffic);
  until("a ring of three", [&] {
    bool all = true;
    for (Exchange& exchange : exchanges) all = exchange.step() && all;
    return all;
  });
  for (Exchange& exchange : exchanges) exchange.compare();
  sides[1].reset();   // any order of closing, also with peers that still know each other
  Completion completion;
  CHECK_EQ(sides[0]->fabric().poll(&completion, 0), 0);
}

void test_two_processes(const std::string& provider, int endpoints, std::uint64_t seed) {
  Child child = spawn({"exchange", provider, std::to_string(endpoints), std::to_string(seed)});
  const Traffic out = make_traffic(seed, 80, kMiB), in = make_traffic(seed + 1, 80, kMiB);
  Side side(options(provider, endpoints), out.source_bytes, in.target_bytes);
  exchange_with_process(side, child.pipe, out, in);
  CHECK_EQ(child.wait(), 0);
}

// Posts and never polls, until the fabric says Again; then everything arrives all the same.
void test_again(const std::string& provider) {
  constexpr std::size_t kMost = 200000;
  Side a(options(provider), 4096, 4096), b(options(provider), 4096, 4096);
  introduce(a, 0, b, 1);
  std::size_t posted = 0, sent = 0, arrived = 0;
  Completion completions[64];
  const auto drain = [&] {
    int count = a.fabric().poll(completions, 64);
    for (int i = 0; i < count; ++i) {
      CHECK(completions[i].kind == Completion::Kind::Sent);
      ++sent;
    }
    count = b.fabric().poll(completions, 64);
    for (int i = 0; i < count; ++i) {
      CHECK(completions[i].kind == Completion::Kind::Arrived);
      ++arrived;
    }
  };
  until("the first write to be taken", [&] {
    if (a.write(1, 8, 0, 0, 0, 0) == Post::Accepted) return true;
    drain();
    return false;
  });
  for (posted = 1; posted < kMost && a.write(1, 8, 0, 8, static_cast<std::uint32_t>(posted), posted) == Post::Accepted;) ++posted;
  CHECK(posted < kMost);
  until("all of them to arrive", [&] {
    drain();
    return sent == posted && arrived == posted;
  });
  CHECK(a.write(1, 8, 0, 8, 1, 1) == Post::Accepted);   // and it goes on
  ++posted;
  until("one more", [&] {
    drain();
    return sent == posted && arrived == posted;
  });
}

template <class Call>
void must_throw(const std::string& word, Call call) {
  try {
    call();
  } catch (const FabricError& error) {
    if (std::string(error.what()).find(word) == std::string::npos)
      check::fail(__FILE__, __LINE__, "'" + word + "' is not in: " + error.what());
    return;
  }
  check::fail(__FILE__, __LINE__, "no FabricError with '" + word + "'");
}

void test_misuse(const std::string& provider) {
  Side a(options(provider), 4096, 4096), b(options(provider), 4096, 4096);
  must_throw("no peer 1", [&] { a.fabric().import_region(1, b.target_region().description); });
  introduce(a, 0, b, 1);
  must_throw("already", [&] { a.fabric().insert_peer(1, b.fabric().address()); });
  must_throw("not an endpoint address", [&] { a.fabric().insert_peer(2, {1, 2, 3}); });
  must_throw("not the description", [&] { a.fabric().import_region(1, b.fabric().address()); });
  Blob cut = b.fabric().address();
  cut.pop_back();
  must_throw("not an endpoint address", [&] { a.fabric().insert_peer(2, cut); });
  libfabric::Address address = libfabric::decode_address(b.fabric().address());
  address.endpoints.front().pop_back();   // the provider would read behind it
  must_throw("which is none of", [&] { a.fabric().insert_peer(2, libfabric::encode(address)); });
  address.endpoints.front().clear();
  must_throw("which is none of", [&] { a.fabric().insert_peer(2, libfabric::encode(address)); });
  must_throw("outside the region", [&] { a.write(1, 4097, 0, 0, 0, 0); });
  must_throw("outside the region", [&] { a.write(1, 1, 4096, 0, 0, 0); });
  must_throw("outside the region", [&] { a.write(1, 8, 0, 4089, 0, 0); });
  must_throw("outside the region", [&] { a.write(1, 8, 0, SIZE_MAX - 3, 0, 0); });
  must_throw("no endpoint 1", [&] { a.write(1, 8, 0, 0, 0, 0, 1); });
  a.fabric().remove_peer(1);
  must_throw("no peer 1", [&] { a.write(1, 8, 0, 0, 0, 0); });
  must_throw("no peer 1", [&] { a.fabric().remove_peer(1); });
  must_throw("unknown provider", [&] { LibfabricFabric wrong(options("carrier-pigeon")); });
  must_throw("17 endpoints", [&] { LibfabricFabric wrong(options(provider, 17)); });
  if (provider != "shm") {
    libfabric::Options elsewhere = options(provider);
    elsewhere.address = "no-such-interface0";
    must_throw("no-such-interface0", [&] { LibfabricFabric wrong(elsewhere); });
  }
  a.close();
  a.close();
  must_throw("closed", [&] { a.fabric().endpoints(); });
}

// Writes `bytes` bytes at that place of a peer. Returns false when no answer comes: provider net does not answer a writer that the
// other side has not inserted. Counts arrivals.
bool write_and_wait(Side& writer, LibfabricFabric& reader, const RemoteRegion& target, std::size_t offset, std::size_t bytes,
                    double limit, int& arrivals) {
  Write write;
  write.immediate = 0x1234;
  write.source = &writer.source_region();
  write.target = &target;
  write.target_offset = offset;
  write.bytes = bytes;
  bool posted = false, over = false;
  const Clock::time_point start = Clock::now();
  for (int after = 0; after < 20 && seconds_since(start) < limit; after += over) {
    Completion completion;
    if (reader.poll(&completion, 1) == 1 && completion.kind == Completion::Kind::Arrived) ++arrivals;
    if (!posted) posted = writer.fabric().write(write) == Post::Accepted;
    else if (writer.fabric().poll(&completion, 1) == 1) over = true;
    sched_yield();
  }
  return over;
}

// Any process that can connect to an endpoint may try to write: endpoints take no secret. This stranger knows where the memory
// starts. What it cannot guess is the key; and what no peer writes into has none.
void test_a_stranger(const std::string& provider) {
  constexpr std::size_t kShared = 4096, kBytes = 4 * kShared;
  constexpr int kMostSilent = 4;
  const double limit = provider == "net" ? 0.2 : 5;
  std::vector<std::uint8_t> memory(kBytes, kPoison);
  LibfabricFabric victim(options(provider));
  const LocalRegion region = victim.register_memory(memory.data(), memory.size(), kShared);
  const auto landed = [&] {
    const bool untouched = std::all_of(memory.begin(), memory.end(), [](std::uint8_t byte) { return byte == kPoison; });
    std::fill(memory.begin(), memory.end(), kPoison);
    return !untouched;
  };
  std::unique_ptr<Side> stranger;
  int arrivals = 0;
  RemoteRegion target;
  const auto come = [&] {
    stranger = std::make_unique<Side>(options(provider), 64, 64);
    std::fill(stranger->source().begin(), stranger->source().end(), kPoison ^ 0xff);
    stranger->fabric().insert_peer(0, victim.address());
    target = stranger->fabric().import_region(0, region.description);
    target.bytes = kBytes;
  };
  for (const std::size_t offset : {std::size_t{0}, kShared, kBytes - 8}) {
    come();
    write_and_wait(*stranger, victim, target, offset, 8, limit, arrivals);
    const auto arrives = [&] {
      Completion completion;
      victim.poll(&completion, 1);
      stranger->fabric().poll(&completion, 1);
      return landed();
    };
    if (offset == 0 && provider != "net") until("a write that is allowed", arrives);
    else CHECK(!landed());   // with the key it is a peer, and no more than that
  }
  come();
  arrivals = 0;
  int silent = 0;
  for (std::uint64_t guess = 0; guess <= 1050 && silent < kMostSilent; ++guess) {
    const std::uint64_t key = guess % 1001;
    const std::uint64_t right = target.key[0];
    target.key[0] = key;
    const std::size_t bytes = guess <= 1000 ? 8 : 0;   // an immediate alone would be a forged arrival
    const bool heard = write_and_wait(*stranger, victim, target, 0, bytes, limit, arrivals);
    if (arrivals != 0)
      check::fail(__FILE__, __LINE__,
                  provider + ": a stranger's immediate came with " + std::to_string(bytes) + " bytes and key " +
                  std::to_string(key));
    if (landed()) check::fail(__FILE__, __LINE__, provider + ": a stranger wrote with key " + std::to_string(key));
    target.key[0] = right;
    if (heard) continue;
    ++silent;
    come();
  }
}

void test_zero_bytes_without_regions(const std::string& provider) {
  Side a(options(provider), 4096, 4096), b(options(provider), 4096, 4096);
  introduce(a, 0, b, 1);
  Write write;
  write.peer = 1;
  write.immediate = 0xdeadbeef;
  write.context = 99;
  bool accepted = false, sent = false, arrived = false;
  until("an immediate alone", [&] {
    if (!accepted) accepted = a.fabric().write(write) == Post::Accepted;
    Completion completion;
    if (a.fabric().poll(&completion, 1) == 1) {
      CHECK(completion.kind == Completion::Kind::Sent);
      CHECK_EQ(completion.context, 99u);
      sent = true;
    }
    if (b.fabric().poll(&completion, 1) == 1) {
      CHECK(completion.kind == Completion::Kind::Arrived);
      CHECK_EQ(completion.immediate, 0xdeadbeefu);
      arrived = true;
    }
    return sent && arrived;
  });
}

// Writes in flight to a removed peer fail once. Their later outcome does not matter, although the peer lives.
void test_removed_peer_that_lives(const std::string& provider) {
  Side a(options(provider), kMiB, kMiB), b(options(provider), kMiB, kMiB);
  introduce(a, 0, b, 1);
  Completion completions[64];
  std::uint64_t posted = 0, sent = 0, arrived = 0, failed = 0;
  until("a first write to be sent, and to arrive", [&] {
    if (posted == 0 && a.write(1, 8, 0, 0, 0, 0) == Post::Accepted) posted = 1;
    arrived += static_cast<std::uint64_t>(b.fabric().poll(completions, 64));
    sent += static_cast<std::uint64_t>(a.fabric().poll(completions, 64));
    return sent == 1 && arrived == 1;
  });
  const std::uint64_t first = posted;
  while (posted < first + 16 && a.write(1, 300000, 0, 0, 1, posted) == Post::Accepted) ++posted;
  CHECK(posted > first);
  a.fabric().remove_peer(1);
  const Clock::time_point start = Clock::now();
  until("the peer to have seen what it will see", [&] {
    b.fabric().poll(completions, 64);
    const int count = a.fabric().poll(completions, 64);
    for (int i = 0; i < count; ++i) {
      CHECK(completions[i].kind == Completion::Kind::Failed);
      CHECK_EQ(completions[i].context, first + failed);
      CHECK(a.fabric().describe_error(completions[i]).find("peer 1") != std::string::npos);
      ++failed;
    }
    return seconds_since(start) > 0.1;
  });
  CHECK_EQ(failed, posted - first);
}

// The peer is killed while this side writes to it.
void test_killed_peer(const std::string& provider, Victim victim) {
  const std::set<std::string> before = shm_files();
  Child child = spawn({name_of(victim), provider});
  double closing = 0;
  std::string error, stray;
  int failed = 0, strays = 0;   // writes of ours; failures of the connection, or of the peer's writes
  {
    Side side(options(provider), kMiB, kMiB);
    introduce(side, 0, child.pipe);
    Completion completions[16];
    std::size_t posted = 0, ended = 0;
    const auto step = [&] {
      if (posted - ended < 64 && side.write(0, posted % 5 == 0 ? 300000 : 7168, 0, 0, 5, posted) == Post::Accepted) ++posted;
      const int count = side.fabric().poll(completions, 16);
      for (int i = 0; i < count; ++i) {
        if (completions[i].kind == Completion::Kind::Arrived) continue;
        ended += completions[i].has_context ? 1 : 0;
        if (completions[i].kind != Completion::Kind::Failed) continue;
        ++(completions[i].has_context ? failed : strays);
        (completions[i].has_context ? error : stray) = side.fabric().describe_error(completions[i]);
      }
    };
    until("traffic with the peer that will die", [&] {
      step();
      return posted >= 100 && child.pipe.ready();
    });
    if (victim == Victim::Still) {
      child.pipe.receive();
      child.pipe.send({1});
      until("the peer that will die to be still", [&] {
        step();
        return child.pipe.ready();
      });
    }
    CHECK_EQ(kill(child.pid, SIGKILL), 0);
    CHECK_EQ(child.wait(), SIGKILL);
    const Clock::time_point death = Clock::now();
    // Shared memory completes nothing more; tcp and net fail what is in flight, and when nothing was they connect again for ever.
    const bool notices = provider == "tcp;ofi_rxm" || provider == "sockets";
    until("the death to be seen", [&] {
      step();
      return failed + strays > 0 || (!notices && seconds_since(death) > 0.2);
    });
    if (failed + strays > 0) std::printf("    %s: first failure after %.1f ms; ", provider.c_str(), seconds_since(death) * 1e3);
    else std::printf("    %s: no failure seen; ", provider.c_str());
    side.fabric().remove_peer(0);
    until("every write to come back", [&] {
      const int count = side.fabric().poll(completions, 16);
      for (int i = 0; i < count; ++i) {
        if (completions[i].kind == Completion::Kind::Arrived || !completions[i].has_context) continue;
        ++ended;
        if (completions[i].kind != Completion::Kind::Failed) continue;
        ++failed;
        error = side.fabric().describe_error(completions[i]);
      }
      return ended == posted;
    });
    for (int i = 0; i < 100; ++i) {
      const int count = side.fabric().poll(completions, 16);
      for (int entry = 0; entry < count; ++entry)
        CHECK(completions[entry].kind == Completion::Kind::Arrived || !completions[entry].has_context);
    }
    CHECK(failed + strays > 0 || !notices);
    CHECK(failed > 0 || provider != "shm");
    CHECK(failed == 0 || error.find("peer 0") != std::string::npos);
    const Clock::time_point start = Clock::now();
    side.close();
    closing = seconds_since(start);
  }
  std::printf("%d writes failed, closed in %.2f ms: %s%s%s\n", failed, closing * 1e3, error.c_str(),
              strays > 0 ? "; without a write: " : "", stray.c_str());
  CHECK(closing < 1.0);
  CHECK(shm_files() == before);
}

// Killed at any moment of its writing, many times: the survivor's poll and close must always return.
void test_killed_at_any_moment(const std::string& provider, std::uint64_t seed) {
  check::Random random(seed);
  const std::set<std::string> before = shm_files();
  for (int round = 0; round < (provider == "shm" ? 30 : 5); ++round) {
    Child child = spawn({name_of(Victim::Writes), provider});
    Side side(options(provider), kMiB, kMiB);
    introduce(side, 0, child.pipe);
    Completion completions[16];
    std::size_t owed = 0;
    const auto step = [&] {
      const int count = side.fabric().poll(completions, 16);
      for (int i = 0; i < count; ++i) owed += completions[i].kind == Completion::Kind::Arrived ? 1 : 0;
      while (owed > 0 && side.write(0, 100, 0, 0, 6, 6) == Post::Accepted) --owed;
    };
    until("traffic from the peer that will die", [&] {
      step();
      return child.pipe.ready();
    });
    const Clock::time_point start = Clock::now();
    const double delay = random.real(0.0f, 0.004f);
    while (seconds_since(start) < delay) step();
    CHECK_EQ(kill(child.pid, SIGKILL), 0);
    CHECK_EQ(child.wait(), SIGKILL);
    for (int i = 0; i < 200; ++i) step();
    side.fabric().remove_peer(0);
    for (int i = 0; i < 200; ++i) side.fabric().poll(completions, 16);
  }
  CHECK(shm_files() == before);
}

// Files of a killed process that had no connection go when the next process opens shm; those of the living stay.
void test_files_of_the_dead() {
  const std::set<std::string> before = shm_files();
  Child victim = spawn({name_of(Victim::Polls), "shm"}), alive = spawn({name_of(Victim::Polls), "shm"});
  const Blob address = victim.pipe.receive(), alive_address = alive.pipe.receive();
  const std::size_t both = shm_files().size();
  CHECK_EQ(both, before.size() + 2);
  CHECK_EQ(libfabric::cleanup_dead_peer(address), 0);   // it lives
  CHECK_EQ(kill(victim.pid, SIGKILL), 0);
  CHECK_EQ(victim.wait(), SIGKILL);
  CHECK_EQ(shm_files().size(), both);                   // this is the mess
  CHECK_EQ(libfabric::cleanup_dead_peer(alive_address), 0);
  CHECK_EQ(libfabric::cleanup_dead_peer(address), 1);
  CHECK_EQ(shm_files().size(), both - 1);
  CHECK_EQ(kill(alive.pid, SIGKILL), 0);
  CHECK_EQ(alive.wait(), SIGKILL);
  CHECK_EQ(shm_files().size(), both - 1);
  {
    LibfabricFabric next(options("shm"));
    CHECK_EQ(shm_files().size(), before.size() + 1);
    CHECK_EQ(next.shm_names().size(), 1u);
    CHECK_EQ(shm_files().count(next.shm_names()[0]), 1u);
  }
  CHECK(shm_files() == before);
}

void test_open_and_close(const std::string& provider) {
  const std::set<std::string> before = shm_files();
  const auto cycle = [&](bool talk) {
    Side a(options(provider), 4096, 4096), b(options(provider), 4096, 4096);
    introduce(a, 0, b, 1);
    if (!talk) return;
    Completion completions[4];
    bool accepted = false;
    int seen = 0;
    until("a first write", [&] {
      if (!accepted) accepted = a.write(1, 100, 0, 0, 1, 1) == Post::Accepted;
      seen += a.fabric().poll(completions, 4) + b.fabric().poll(completions, 4);
      return seen == 2;
    });
  };
  cycle(true);
  const int fds = entries("/proc/self/fd");
  int threads = entries("/proc/self/task");
  until("threads that were joined to leave /proc", [&] {
    const int before = threads;
    std::this_thread::sleep_for(milliseconds(10));
    threads = entries("/proc/self/task");
    return threads == before;
  });
  for (int i = 0; i < 50; ++i) cycle(i % 5 == 0);
  CHECK_EQ(entries("/proc/self/fd"), fds);
  until("no more threads than before", [&] { return entries("/proc/self/task") <= threads; });
  CHECK(shm_files() == before);
}

void test_bare_writes(const std::string& provider) {
  Child child = spawn({"bare", provider});
  bare_writes_with_process(child.pipe, provider);
  CHECK_EQ(child.wait(), 0);
  Side alone(options(provider), 4096, 4096);
  std::size_t early = 0;
  must_throw("arrived 0 of 1", [&] { run_bare_writes(alone.fabric(), alone.source_region(), {}, 1, early, milliseconds(20)); });
}

// ---- times

void print_times(const std::string& provider) {
  Child child = spawn({"echo", provider});
  {
    Side side(options(provider), kMiB, kMiB);
    introduce(side, 0, child.pipe);
    std::printf("  %-12s", provider.c_str());
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{8}, std::size_t{7168}, std::size_t{65536}, kMiB}) {
      const int rounds = bytes > 100000 ? 300 : 4000;
      std::vector<double> halves;
      for (int round = 0; round < rounds; ++round) {
        const Clock::time_point start = Clock::now();
        bool accepted = false, sent = false, arrived = false;
        while (!sent || !arrived) {
          if (!accepted) accepted = side.write(0, bytes, 0, 0, static_cast<std::uint32_t>(bytes), 1) == Post::Accepted;
          Completion completions[4];
          const int count = side.fabric().poll(completions, 4);
          for (int i = 0; i < count; ++i) (completions[i].kind == Completion::Kind::Arrived ? arrived : sent) = true;
          if (count == 0) sched_yield();
        }
        halves.push_back(seconds_since(start) / 2 * 1e6);
      }
      std::nth_element(halves.begin(), halves.begin() + rounds / 2, halves.end());
      std::printf("  %zu B %.2f us", bytes, halves[static_cast<std::size_t>(rounds / 2)]);
    }
    std::printf("\n");
    child.pipe.send({1});
  }
  CHECK_EQ(child.wait(), 0);
}

// ---- which

std::vector<std::string> providers_here() {
  std::vector<std::string> names;
  for (const libfabric::ProviderStatus& status : libfabric::provider_status(libfabric::library())) {
    std::printf("  %-14s %s%s\n", status.name.c_str(), status.available ? "available:" : status.why_not.c_str(),
                status.device_memory ? " (device memory)" : "");
    for (const std::string& nic : status.nics) std::printf("                   %s\n", nic.c_str());
#ifdef __SANITIZE_ADDRESS__
    if (status.name == "net") continue;   // its fi_endpoint leaks an fi_info in 1.17
#endif
    if (status.available) names.push_back(status.name);
  }
  return names;
}

// A forked child that closes a fabric leaves it open for its parent.
void test_forked(const std::string& provider) {
  const std::set<std::string> before = shm_files();
  {
    Side a(options(provider), 4096, 4096), b(options(provider), 4096, 4096);
    introduce(a, 0, b, 1);
    const std::set<std::string> opened = shm_files();
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      a.fabric().abandon();
      a.close();
      b.close();
      _exit(0);
    }
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK(shm_files() == opened);
    const Traffic traffic = make_traffic(3, 8, 256), none;
    Exchange there(a, 1, traffic, none), back(b, 0, none, traffic);
    until("traffic after a fork", [&] {
      there.step();
      back.step();
      return there.done() && back.done();
    });
  }
  CHECK(shm_files() == before);
}

void run_provider(const std::string& provider, std::uint64_t seed) {
  const Clock::time_point start = Clock::now();
  std::printf("  %s\n", provider.c_str());
  test_two_in_one_process(provider, 1, 1, seed);
  test_two_in_one_process(provider, 2, 2, seed + 10);
  test_two_in_one_process(provider, 3, 2, seed + 20);
  test_three_in_one_process(provider, seed + 30);
  test_two_processes(provider, 1, seed + 40);
  test_two_processes(provider, 2, seed + 50);
  test_a_stranger(provider);
  test_zero_bytes_without_regions(provider);
  test_again(provider);
  test_misuse(provider);
  test_forked(provider);
  test_removed_peer_that_lives(provider);
  test_bare_writes(provider);
  test_open_and_close(provider);
  // Its spin lock, see providers.cpp: one of some 400 victims that poll dies with it.
  const bool may_hang = provider == "shm" && libfabric::library().version < libfabric::version(1, 18);
  test_killed_peer(provider, may_hang ? Victim::Still : Victim::Polls);
  if (!may_hang) test_killed_peer(provider, Victim::Writes);
  if (!may_hang) test_killed_at_any_moment(provider, seed + 60);
  if (provider == "shm") test_files_of_the_dead();
  std::printf("  %s: ok, %.1f s\n", provider.c_str(), seconds_since(start));
}

pid_t start(const std::vector<std::string>& arguments, int output) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid != 0) return pid;
  std::vector<const char*> words = {"/proc/self/exe"};
  for (const std::string& argument : arguments) words.push_back(argument.c_str());
  words.push_back(nullptr);
  if (output >= 0) dup2(output, STDOUT_FILENO);
  execv(words[0], const_cast<char**>(words.data()));
  _exit(127);
}

int ended(pid_t pid) {
  int status = 0;
  CHECK_EQ(waitpid(pid, &status, 0), pid);
  return status;
}

// The providers side by side, since their tests mostly wait.
int run_all(bool times) {
  const libfabric::Library& library = libfabric::library();
  std::printf("%s: libfabric %s\n", library.path.c_str(), libfabric::version_text(library.version).c_str());
  const std::vector<std::string> providers = providers_here();
  CHECK(!providers.empty());
  if (times) {
    for (const std::string& provider : providers) print_times(provider);
    return 0;
  }
  const std::string seed = std::to_string(check::seed(20261121));
  struct Run {
    pid_t pid;
    int output;
  };
  std::vector<Run> runs;
  for (const std::string& provider : providers) {
    const int output = memfd_create("output", MFD_CLOEXEC);
    CHECK(output >= 0);
    runs.push_back({start({"--provider", provider, seed}, output), output});
  }
  int failed = 0;
  for (const Run& run : runs) {
    failed |= ended(run.pid);
    CHECK(lseek(run.output, 0, SEEK_SET) == 0);
    char text[4096];
    while (const ssize_t count = read(run.output, text, sizeof(text))) {
      CHECK(count > 0);
      std::fwrite(text, 1, static_cast<std::size_t>(count), stdout);
    }
    std::fflush(stdout);
    close(run.output);
  }
  return failed == 0 ? 0 : 1;
}

int run_child(const std::vector<std::string>& arguments) {
  Pipe pipe(std::stoi(arguments[0]));
  const std::string& what = arguments[1];
  const std::string& provider = arguments[2];
  if (what == "exchange") return child_exchange(pipe, provider, std::stoi(arguments[3]), std::stoull(arguments[4]));
  for (const Victim victim : {Victim::Polls, Victim::Writes, Victim::Still})
    if (what == name_of(victim)) return child_victim(pipe, provider, victim);
  if (what == "echo") return child_echo(pipe, provider);
  if (what == "bare") {
    bare_writes_with_process(pipe, provider);
    return 0;
  }
  return 2;
}

// A process has one libfabric, so each gets its own.
int run_with(const std::string& path, bool times) {
  if (!path.empty()) setenv("PPLX_LIBFABRIC", path.c_str(), 1);
  return ended(start({times ? "--times-of-one" : "--one"}, -1));
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const std::string mode = arguments.empty() ? "" : arguments[0];
  if (mode == "--child") return run_child({arguments.begin() + 1, arguments.end()});
  if (mode == "--provider") {
    run_provider(arguments.at(1), std::stoull(arguments.at(2)));
    return 0;
  }
  if (mode == "--one" || mode == "--times-of-one") return run_all(mode == "--times-of-one");
  try {
    libfabric::library();
  } catch (const FabricError& error) {
    std::printf("skipped: %s\n", error.what());
    return 0;
  }
  std::vector<std::string> libraries = {""};
  if (const char* more = std::getenv("PPLX_TEST_LIBFABRIC")) {
    std::istringstream list(more);
    for (std::string path; std::getline(list, path, ':');) libraries.push_back(path);
  }
  for (const std::string& library : libraries) {
    if (run_with(library, mode == "--times") != 0) return 1;
  }
  return 0;
}
