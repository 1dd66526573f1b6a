// Processes on the software EFA device, for tests that call the verbs functions directly. A case forks its roles; each opens NICs,
// queue pairs and memory of its own, and they tell each other addresses on a board of shared memory.
#pragma once
extern "C" {
#include "../../../proxy/efasoft/abi.h"

ibv_device** ibv_get_device_list(int*);
void ibv_free_device_list(ibv_device**);
ibv_context* ibv_open_device(ibv_device*);
int ibv_close_device(ibv_context*);
int ibv_query_port(ibv_context*, uint8_t, ibv_port_attr*);
int ibv_query_gid(ibv_context*, uint8_t, int, ibv_gid*);
ibv_pd* ibv_alloc_pd(ibv_context*);
int ibv_dealloc_pd(ibv_pd*);
ibv_mr* ibv_reg_mr_iova2(ibv_pd*, void*, size_t, uint64_t, unsigned);
int ibv_dereg_mr(ibv_mr*);
ibv_ah* ibv_create_ah(ibv_pd*, ibv_ah_attr*);
int ibv_destroy_ah(ibv_ah*);
int ibv_destroy_cq(ibv_cq*);
int ibv_modify_qp(ibv_qp*, ibv_qp_attr*, int);
int ibv_destroy_qp(ibv_qp*);
ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp*);
int efadv_query_device(ibv_context*, efadv_device_attr*, uint32_t);
int efadv_query_ah(ibv_ah*, efadv_ah_attr*, uint32_t);
ibv_cq_ex* efadv_create_cq(ibv_context*, ibv_cq_init_attr_ex*, void*, uint32_t);
efadv_cq* efadv_cq_from_ibv_cq_ex(ibv_cq_ex*);
ibv_qp* efadv_create_qp_ex(ibv_context*, ibv_qp_init_attr_ex*, efadv_qp_init_attr*, uint32_t);
}

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#define REQUIRE(condition) \
  do { \
    if (!(condition)) throw std::runtime_error(std::string(__FILE__ ":") + std::to_string(__LINE__) + ": " #condition); \
  } while (0)

namespace efa {

using Clock = std::chrono::steady_clock;
inline double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Fails the case when it takes too long: a hang names itself.
template <class Done>
void until(const char* what, Done done, double seconds = 20) {
  for (auto start = Clock::now(); !done();) {
    if (seconds_since(start) > seconds) throw std::runtime_error(std::string("waited in vain: ") + what);
    sched_yield();
  }
}

struct Address {
  ibv_gid gid;
  uint32_t qpn, qkey;
};
struct Remote {
  uint64_t address;
  uint32_t key;
};

// Shared by the processes of one case.
struct Board {
  std::atomic<uint32_t> met[64];
  std::atomic<uint64_t> word[256];
  Address address[8][4];
  Remote memory[8][4];
  pid_t pid[8];
};

struct Completion {
  uint64_t wr_id;
  ibv_wc_status status;
  uint32_t vendor, bytes, immediate, source_qpn, qpn;
  ibv_wc_opcode opcode;
  bool has_immediate, unsolicited, known_sender;
};

struct Options {
  int nic = 0;
  uint32_t sends = 256, receives = 256, completions = 1024, qkey = 0x1234;
  bool unsolicited = false;
  int rnr_retry = 7;
};

// One queue pair with a completion queue of its own, ready to send.
class Endpoint {
 public:
  explicit Endpoint(Options options = {});
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  Address address() const;
  // Knows the peer from now on: sends go there, and its RDMA is answered.
  ibv_ah* meet(const Address& peer);

  struct Post {
    enum Kind { send, write, read } kind = write;
    Address to{};
    Remote remote{};
    const void* data = nullptr;
    uint32_t bytes = 0, key = 0;
    std::optional<uint32_t> immediate;
    uint64_t wr_id = 0;
    ibv_ah* ah = nullptr;  // default: that of `to`
  };
  // All with one doorbell; what wr_complete says.
  int post(const std::vector<Post>& posts);
  int receive(void* data, uint32_t bytes, uint32_t key, uint64_t wr_id = 0);

  std::optional<Completion> poll();
  Completion wait(const char* what = "a completion", double seconds = 20);
  void modify(int state);

  ibv_context* context = nullptr;
  ibv_pd* pd = nullptr;
  ibv_cq_ex* cq = nullptr;
  ibv_qp* qp = nullptr;

 private:
  struct Closed {};
  Endpoint(Options options, Closed) : options_(options) {}

  Options options_;
  std::map<std::string, ibv_ah*> handles_;
};

constexpr unsigned ALL_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

// Registered memory, of whole pages.
class Memory {
 public:
  Memory(Endpoint& endpoint, size_t bytes, unsigned access = ALL_ACCESS);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  uint32_t key() const { return region_->lkey; }
  Remote remote(size_t offset = 0) const { return {reinterpret_cast<uint64_t>(data_) + offset, region_->rkey}; }
  void fill(uint8_t seed);
  bool is(uint8_t seed, size_t from = 0, size_t bytes = ~size_t{0}) const;

 private:
  uint8_t* data_;
  size_t size_;
  ibv_mr* region_;
};

struct Member {
  int role;
  Board& board;
  // All roles of the case wait here for each other, each time at the next number.
  void meet();
  // Publishes its endpoint and memory, waits for all, and knows the others.
  void join(Endpoint& endpoint, const Memory* memory = nullptr);
  int roles = 0;
  uint32_t next_meeting = 0;
};

struct Environment {
  std::map<std::string, std::string> all;            // variables of every role
  std::map<int, std::map<std::string, std::string>> of;  // variables of one role
  int nics = 2;
};
using Role = std::function<void(Member&)>;

// Runs the roles, each in a process; throws when one fails. Those that the case kills are named in `killed`.
// Afterwards `after` may look at the board and at the folder.
void run(const std::vector<Role>& roles, const Environment& environment = {}, const std::vector<int>& killed = {},
         const std::function<void(Board&, const std::string& folder)>& after = {});

// A counter, over all processes and NICs of the folder that EFA_SOFT_DIR names, or of one NIC.
uint64_t counted(const std::string& folder, const std::string& name, int nic = -1);
std::string folder();
void set_control(const ibv_gid& gid, size_t offset, uint32_t value);
constexpr size_t PORT_DOWN = 48;
std::vector<std::string> files(const std::string& folder, const std::string& prefix);

struct Case {
  const char* name;
  void (*run)();
};
std::vector<Case>& cases();
struct Register {
  Register(const char* name, void (*run)()) { cases().push_back({name, run}); }
};
#define CASE(name) \
  static void name(); \
  static const efa::Register register_##name(#name, name); \
  static void name()

}  // namespace efa
