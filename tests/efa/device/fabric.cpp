#include "fabric.h"

#include <cerrno>
#include <csignal>
#include <dirent.h>
#include <fcntl.h>
#include <filesystem>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

namespace efa {

// ---- verbs ----

static ibv_context* open_nic(int nic) {
  int n = 0;
  ibv_device** list = ibv_get_device_list(&n);
  REQUIRE(list && nic < n);
  ibv_context* context = ibv_open_device(list[nic]);
  ibv_free_device_list(list);
  REQUIRE(context);
  return context;
}

// Delegates to another constructor, so that open objects are closed when a later one is refused.
Endpoint::Endpoint(Options options) : Endpoint(options, Closed{}) {
  context = open_nic(options.nic);
  REQUIRE(pd = ibv_alloc_pd(context));
  ibv_cq_init_attr_ex queue{};
  queue.cqe = options.completions;
  REQUIRE(cq = efadv_create_cq(context, &queue, nullptr, 0));
  ibv_qp_init_attr_ex init{};
  init.send_cq = init.recv_cq = reinterpret_cast<ibv_cq*>(cq);
  init.cap = {options.sends, options.receives, 2, 1, 0};
  init.qp_type = IBV_QPT_DRIVER;
  init.sq_sig_all = 1;
  init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  init.pd = pd;
  init.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_WRITE |
                        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ;
  efadv_qp_init_attr own{};
  own.flags = options.unsolicited ? EFADV_QP_UNSOLICITED_WRITE_RECV : 0;
  REQUIRE(qp = efadv_create_qp_ex(context, &init, &own, sizeof own));
  modify(IBV_QPS_INIT);
  modify(IBV_QPS_RTR);
  modify(IBV_QPS_RTS);
}

void Endpoint::modify(int state) {
  ibv_qp_attr attributes{};
  attributes.qp_state = state;
  attributes.qkey = options_.qkey;
  attributes.rnr_retry = static_cast<uint8_t>(options_.rnr_retry);
  int mask = IBV_QP_STATE;
  if (state == IBV_QPS_INIT) mask |= IBV_QP_QKEY;
  if (state == IBV_QPS_RTS) mask |= IBV_QP_RNR_RETRY;
  REQUIRE(ibv_modify_qp(qp, &attributes, mask) == 0);
}

Endpoint::~Endpoint() {
  for (auto& [gid, ah] : handles_) ibv_destroy_ah(ah);
  if (qp) ibv_destroy_qp(qp);
  if (cq) ibv_destroy_cq(reinterpret_cast<ibv_cq*>(cq));
  if (pd) ibv_dealloc_pd(pd);
  if (context) ibv_close_device(context);
}

Address Endpoint::address() const {
  Address address{};
  REQUIRE(ibv_query_gid(context, 1, 0, &address.gid) == 0);
  address.qpn = qp->qp_num;
  address.qkey = options_.qkey;
  return address;
}

ibv_ah* Endpoint::meet(const Address& peer) {
  ibv_ah*& handle = handles_[std::string(reinterpret_cast<const char*>(peer.gid.raw), 16)];
  if (handle) return handle;
  ibv_ah_attr attributes{};
  attributes.dgid = peer.gid;
  attributes.is_global = 1;
  attributes.port_num = 1;
  REQUIRE(handle = ibv_create_ah(pd, &attributes));
  return handle;
}

static void stage(ibv_qp_ex* ex, const Endpoint::Post& post) {
  uint32_t immediate = post.immediate.value_or(0);
  ex->wr_id = post.wr_id;
  ex->wr_flags = IBV_SEND_SIGNALED;
  switch (post.kind) {
    case Endpoint::Post::send: return post.immediate ? ex->wr_send_imm(ex, immediate) : ex->wr_send(ex);
    case Endpoint::Post::read: return ex->wr_rdma_read(ex, post.remote.key, post.remote.address);
    case Endpoint::Post::write:
      if (post.immediate) return ex->wr_rdma_write_imm(ex, post.remote.key, post.remote.address, immediate);
      return ex->wr_rdma_write(ex, post.remote.key, post.remote.address);
  }
}

int Endpoint::post(const std::vector<Post>& posts) {
  ibv_qp_ex* ex = ibv_qp_to_qp_ex(qp);
  std::vector<ibv_ah*> handles;
  for (const Post& post : posts) handles.push_back(post.ah ? post.ah : meet(post.to));
  ex->wr_start(ex);
  for (size_t i = 0; i < posts.size(); i++) {
    stage(ex, posts[i]);
    ex->wr_set_sge(ex, posts[i].key, reinterpret_cast<uint64_t>(posts[i].data), posts[i].bytes);
    ex->wr_set_ud_addr(ex, handles[i], posts[i].to.qpn, posts[i].to.qkey);
  }
  return ex->wr_complete(ex);
}

int Endpoint::receive(void* data, uint32_t bytes, uint32_t key, uint64_t wr_id) {
  ibv_sge sge{reinterpret_cast<uint64_t>(data), bytes, key};
  ibv_recv_wr wr{wr_id, nullptr, &sge, data ? 1 : 0}, *bad = nullptr;
  return context->ops.post_recv(qp, &wr, &bad);
}

std::optional<Completion> Endpoint::poll() {
  ibv_poll_cq_attr attributes{};
  if (cq->start_poll(cq, &attributes)) return {};
  efadv_cq* own = efadv_cq_from_ibv_cq_ex(cq);
  ibv_gid gid;
  Completion done{cq->wr_id, cq->status, cq->read_vendor_err(cq), cq->read_byte_len(cq), cq->read_imm_data(cq),
                  cq->read_src_qp(cq), cq->read_qp_num(cq), cq->read_opcode(cq), (cq->read_wc_flags(cq) & IBV_WC_WITH_IMM) != 0,
                  own->wc_is_unsolicited(own), own->wc_read_sgid(own, &gid) < 0};
  cq->end_poll(cq);
  return done;
}

Completion Endpoint::wait(const char* what, double seconds) {
  std::optional<Completion> done;
  until(what, [&] { return (done = poll()).has_value(); }, seconds);
  return *done;
}

Memory::Memory(Endpoint& endpoint, size_t bytes, unsigned access) : size_((bytes + 4095) / 4096 * 4096) {
  void* memory = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  data_ = static_cast<uint8_t*>(memory);
  REQUIRE(region_ = ibv_reg_mr_iova2(endpoint.pd, data_, size_, reinterpret_cast<uint64_t>(data_), access));
}
Memory::~Memory() {
  ibv_dereg_mr(region_);
  munmap(data_, size_);
}
static uint8_t byte_at(uint8_t seed, size_t i) { return static_cast<uint8_t>(seed + i * 7 + (i >> 8) * 13); }
void Memory::fill(uint8_t seed) {
  for (size_t i = 0; i < size_; i++) data_[i] = byte_at(seed, i);
}
bool Memory::is(uint8_t seed, size_t from, size_t bytes) const {
  for (size_t i = from; i < size_ && i - from < bytes; i++)
    if (data_[i] != byte_at(seed, i)) return false;
  return true;
}

// ---- processes ----

void Member::meet() {
  std::atomic<uint32_t>& met = board.met[next_meeting++];
  met++;
  until("the other roles", [&] { return met >= static_cast<uint32_t>(roles); }, 60);
}

void Member::join(Endpoint& endpoint, const Memory* memory) {
  board.address[role][0] = endpoint.address();
  if (memory) board.memory[role][0] = memory->remote();
  meet();
  for (int other = 0; other < roles; other++)
    if (other != role) endpoint.meet(board.address[other][0]);
  meet();
}

struct Folder {
  std::string path;
  explicit Folder(int nics) {
    char name[] = "/dev/shm/efa-soft-test-XXXXXX";
    REQUIRE(mkdtemp(name));
    path = name;
    for (int i = 0; i < nics; i++) add_nic(i);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  void add_nic(int i) {
    std::string at = path + "/sys/class/infiniband/rdmap" + std::to_string(16 + i) + "s6/ports/1/gids";
    std::filesystem::create_directories(at);
    FILE* file = fopen((at + "/0").c_str(), "w");
    REQUIRE(file);
    fprintf(file, "fe80:0000:0000:0000:0efa:0000:0000:%04x\n", i + 1);
    fclose(file);
  }
};

static void become(const Role& role, Member member, const Environment& environment, const std::string& folder) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  member.board.pid[member.role] = getpid();  // before any meeting: a kill of 0 would reach the whole process group
  mkdir((folder + "/fabric").c_str(), 0755);
  setenv("SYSFS_PATH", (folder + "/sys").c_str(), 1);
  setenv("EFA_SOFT_DIR", (folder + "/fabric").c_str(), 1);
  for (auto& [name, value] : environment.all) setenv(name.c_str(), value.c_str(), 1);
  if (auto own = environment.of.find(member.role); own != environment.of.end())
    for (auto& [name, value] : own->second) setenv(name.c_str(), value.c_str(), 1);
  int code = 0;
  try {
    role(member);
  } catch (const std::exception& error) {
    fprintf(stderr, "role %d: %s\n", member.role, error.what());
    code = 1;
  }
  exit(code);
}

static Board* new_board() {
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  return new (memory) Board;
}

// The first process that fails ends the others, which would only wait for it.
static std::string wait_for(std::vector<pid_t> pids, const std::vector<int>& killed) {
  std::string failure;
  for (size_t left = pids.size(); left; left--) {
    int status = 0;
    pid_t pid = waitpid(-1, &status, 0);
    for (size_t role = 0; role < pids.size(); role++) {
      if (pids[role] != pid) continue;
      bool to_die = false;
      for (int one : killed) to_die |= one == static_cast<int>(role);
      bool right = to_die ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 0;
      pids[role] = -1;
      if (right || !failure.empty()) continue;
      failure = "role " + std::to_string(role) + " ended with status " + std::to_string(status);
      for (pid_t other : pids)
        if (other > 0) kill(other, SIGKILL);
    }
  }
  return failure;
}

void run(const std::vector<Role>& roles, const Environment& environment, const std::vector<int>& killed,
         const std::function<void(Board&, const std::string&)>& after) {
  Folder folder(environment.nics);
  Board* board = new_board();
  std::vector<pid_t> pids;
  fflush(nullptr);
  for (size_t i = 0; i < roles.size(); i++) {
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) become(roles[i], {static_cast<int>(i), *board, static_cast<int>(roles.size())}, environment, folder.path);
    pids.push_back(pid);
  }
  std::string failure = wait_for(pids, killed);
  if (failure.empty() && after) after(*board, folder.path + "/fabric");
  munmap(board, sizeof(Board));
  if (!failure.empty()) throw std::runtime_error(failure);
}

// ---- what is in the folder ----

std::string folder() { return getenv("EFA_SOFT_DIR"); }

std::vector<std::string> files(const std::string& where, const std::string& prefix) {
  std::vector<std::string> found;
  DIR* all = opendir(where.c_str());
  REQUIRE(all);
  for (dirent* entry; (entry = readdir(all));)
    if (!strncmp(entry->d_name, prefix.c_str(), prefix.size())) found.push_back(entry->d_name);
  closedir(all);
  return found;
}

static uint64_t counted_in(const std::string& path, const std::string& name, int nic) {
  FILE* file = fopen(path.c_str(), "r");
  REQUIRE(file);
  std::vector<char> page(1 << 20);
  page.resize(fread(page.data(), 1, page.size(), file));
  fclose(file);
  const auto* word = reinterpret_cast<const uint32_t*>(page.data());
  REQUIRE(page.size() > 32 && word[0] == 0x43414645);
  uint64_t sum = 0;
  for (uint32_t i = 0; i < word[3]; i++) {
    if (name != page.data() + word[5] + 32 * i) continue;
    for (uint32_t n = 0; n < word[4]; n++)
      if (nic < 0 || nic == static_cast<int>(n))
        sum += *reinterpret_cast<const uint64_t*>(page.data() + word[6] + n * word[7] + 48 + 8 * i);
    return sum;
  }
  throw std::runtime_error("no counter " + name);
}

uint64_t counted(const std::string& where, const std::string& name, int nic) {
  uint64_t sum = 0;
  for (const std::string& file : files(where, "counters-")) sum += counted_in(where + "/" + file, name, nic);
  return sum;
}

void set_control(const ibv_gid& gid, size_t offset, uint32_t value) {
  int fd = open((folder() + "/control").c_str(), O_RDWR);
  REQUIRE(fd >= 0);
  auto* page = static_cast<char*>(mmap(nullptr, 1 << 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  close(fd);
  REQUIRE(page != MAP_FAILED);
  const auto* word = reinterpret_cast<const uint32_t*>(page);
  bool found = false;
  for (uint32_t i = 0; i < word[2]; i++) {
    char* nic = page + word[4] + i * word[3];
    if (memcmp(nic, gid.raw, 16) != 0) continue;
    reinterpret_cast<std::atomic<uint32_t>*>(nic + offset)->store(value);
    found = true;
  }
  munmap(page, 1 << 16);
  REQUIRE(found);
}

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

}  // namespace efa

// A child of a process with threads starts threads of its own: that is what a_fork is about.
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }

// All cases, or those that are named; --list names them.
int main(int count, char** arguments) {
  bool list = count == 2 && std::string(arguments[1]) == "--list";
  int failed = 0;
  for (const efa::Case& one : efa::cases()) {
    if (list) {
      puts(one.name);
      continue;
    }
    bool wanted = count == 1;
    for (int i = 1; i < count; i++) wanted |= arguments[i] == std::string(one.name);
    if (!wanted) continue;
    try {
      auto start = efa::Clock::now();
      one.run();
      printf("%s: %.2f s\n", one.name, efa::seconds_since(start));
    } catch (const std::exception& error) {
      fprintf(stderr, "%s FAILED: %s\n", one.name, error.what());
      failed++;
    }
    fflush(stdout);
  }
  return failed != 0;
}
