// From a mailbox word to the last post the proxy allocates nothing, takes no lock and makes no system call. This is counted, not
// read from the code: this program replaces malloc and its kin and every pthread lock, and a seccomp filter traps the system calls
// of the thread under test. Each counter is first shown to count.
#include <dlfcn.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "../../bench/native/proxy_cost.h"
#include "../../proxy/proxy_thread.h"
#include "check.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

int main() {
  std::puts("skipped: a sanitizer has its own malloc and locks, and makes system calls");
  return 0;
}

#else

namespace {

// The thread under test; other threads are not counted.
thread_local bool counting = false;
thread_local std::uint64_t allocations = 0, locks = 0;

void note(std::uint64_t& counter) {
  if (counting) ++counter;
}

}  // namespace

// glibc's own names of the functions that this program replaces.
extern "C" {
void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);
void __libc_free(void*);

void* malloc(std::size_t bytes) {
  note(allocations);
  return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) {
  note(allocations);
  return __libc_calloc(count, bytes);
}
void* realloc(void* old, std::size_t bytes) {
  note(allocations);
  return __libc_realloc(old, bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) {
  note(allocations);
  return __libc_memalign(alignment, bytes);
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) {
  note(allocations);
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** out, std::size_t alignment, std::size_t bytes) {
  note(allocations);
  *out = __libc_memalign(alignment, bytes);
  return *out == nullptr ? ENOMEM : 0;
}
void free(void* memory) {
  if (memory != nullptr) note(allocations);
  __libc_free(memory);
}
}

#define COUNT_LOCK(name, Object)                                                                   \
  extern "C" int name(Object* object) noexcept {                                                   \
    static const auto real = reinterpret_cast<int (*)(Object*)>(dlsym(RTLD_NEXT, #name));          \
    note(locks);                                                                                   \
    return real(object);                                                                           \
  }
COUNT_LOCK(pthread_mutex_lock, pthread_mutex_t)
COUNT_LOCK(pthread_mutex_trylock, pthread_mutex_t)
COUNT_LOCK(pthread_rwlock_rdlock, pthread_rwlock_t)
COUNT_LOCK(pthread_rwlock_wrlock, pthread_rwlock_t)
COUNT_LOCK(pthread_spin_lock, pthread_spinlock_t)
COUNT_LOCK(pthread_cond_signal, pthread_cond_t)
COUNT_LOCK(pthread_cond_broadcast, pthread_cond_t)

namespace {

using namespace pplx;

// A child's findings, in memory that its parent reads.
struct Report {
  std::uint64_t allocations, locks, calls;
  int last_call;
  bool done;
};
Report* report = nullptr;

void on_call(int, siginfo_t* info, void* context) {
  ++report->calls;
  report->last_call = info->si_syscall;
#if defined(__x86_64__)
  static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RAX] = 0;   // it succeeded, as far as the caller can tell
#elif defined(__aarch64__)
  static_cast<ucontext_t*>(context)->uc_mcontext.regs[0] = 0;
#endif
}

// From here on every system call of this thread is counted instead of made, except exit_group and those of the counting itself.
// `allowed` is made and not counted.
bool trap_system_calls(unsigned allowed = SYS_exit_group) {
  struct sigaction action {};
  action.sa_sigaction = on_call;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSYS, &action, nullptr);
  sigset_t unblock;
  sigemptyset(&unblock);
  sigaddset(&unblock, SIGSYS);
  pthread_sigmask(SIG_UNBLOCK, &unblock, nullptr);
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 2, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed, 1, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigreturn, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
  };
  const sock_fprog program = {sizeof filter / sizeof *filter, filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Runs `work` in a process of its own: a filter cannot be taken off again.
Report in_child(const std::function<void()>& work) {
  *report = {};
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    work();
    _exit(1);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  if (!report->done) check::fail(__FILE__, __LINE__, "the child ended with status " + std::to_string(status));
  return *report;
}

void start_counting() {
  allocations = locks = 0;
  counting = true;
}
// Ends the child at once, before it does anything else.
[[noreturn]] void stop_counting() {
  counting = false;
  report->allocations = allocations;
  report->locks = locks;
  report->done = true;
  _exit(0);
}

bool the_counters_count() {
  static std::mutex mutex;
  const Report r = in_child([&] {
    if (!trap_system_calls()) stop_counting();
    start_counting();
    void* volatile memory = std::malloc(10);
    std::free(memory);
    int* volatile number = new int(3);   // volatile, or the compiler would leave both out
    delete number;
    mutex.lock();
    mutex.unlock();
    syscall(SYS_getppid);
    stop_counting();
  });
  if (r.calls == 0) return false;
  CHECK_EQ(r.allocations, 4u);
  CHECK_EQ(r.locks, 1u);
  CHECK_EQ(r.calls, 1u);
  CHECK_EQ(r.last_call, SYS_getppid);
  return true;
}

constexpr int kOperations = 300;

// One run of everything that step() does: mail, posts, completions, arrivals.
void steps_of_the_proxy(const CostOptions& options) {
  const Report r = in_child([&] {
    CostRun run(options);
    Proxy proxy(*run.fabric(), options.shard_bytes);
    run.attach(proxy);
    run.announce();   // first touches of pages are no system calls, but mmap would be
    while (!run.settled()) proxy.step();
    CHECK(trap_system_calls());
    start_counting();
    for (int i = 0; i < kOperations; ++i) {
      run.announce();
      while (!run.settled()) proxy.step();
    }
    stop_counting();
  });
  std::printf("  proxy: %u peers, %d endpoints, %u rows: %d operations, %llu allocations, %llu locks, %llu system calls\n",
              options.peers, options.endpoints, options.rows, kOperations, static_cast<unsigned long long>(r.allocations),
              static_cast<unsigned long long>(r.locks), static_cast<unsigned long long>(r.calls));
  CHECK_EQ(r.allocations, 0u);
  CHECK_EQ(r.locks, 0u);
  if (r.calls != 0) check::fail(__FILE__, __LINE__, "system call " + std::to_string(r.last_call) + " was the last");
}

// The null fabric, with a switch: its polling thread can be told to count from there on. A command of ProxyThread could not do
// that: waking the thread that waits for its end is a system call itself.
class ArmedFabric final : public Fabric {
 public:
  explicit ArmedFabric(std::shared_ptr<NullFabric> null) : null_(std::move(null)) {}

  std::string name() const override { return null_->name(); }
  int endpoints() const override { return null_->endpoints(); }
  std::string endpoint_name(int endpoint) const override { return null_->endpoint_name(endpoint); }
  Blob address() const override { return {}; }
  void insert_peer(int, const Blob&) override {}
  void remove_peer(int) override {}
  LocalRegion register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) override {
    return null_->register_memory(base, bytes, shared_bytes);
  }
  void unregister_memory(const LocalRegion&) override {}
  RemoteRegion import_region(int, const Blob&) const override { return {}; }
  Post write(const Write& write) override { return null_->write(write); }
  std::string describe_error(const Completion& failed) const override { return null_->describe_error(failed); }
  int poll(Completion* out, int capacity) override {
    if (arm_.load(std::memory_order_relaxed) && counted_[0] == nullptr) {
      counted_[0] = &allocations;
      counted_[1] = &locks;
      CHECK(trap_system_calls(SYS_sched_yield));
      start_counting();
      armed_.store(true, std::memory_order_release);
    }
    return null_->poll(out, capacity);
  }

  void arm() {
    arm_.store(true, std::memory_order_relaxed);
    while (!armed_.load(std::memory_order_acquire)) sched_yield();
  }
  std::uint64_t allocated() const { return *counted_[0]; }
  std::uint64_t locked() const { return *counted_[1]; }

 private:
  const std::shared_ptr<NullFabric> null_;
  std::atomic<bool> arm_{false}, armed_{false};
  const std::uint64_t* counted_[2] = {};
};

// The whole thread, idle in between: then it gives up its turn, and that is all it asks of the system.
void the_thread(int cpu) {
  CostOptions options;
  options.peers = 64;
  options.endpoints = 2;
  const Report r = in_child([&] {
    const auto run = std::make_shared<CostRun>(options);
    const auto fabric = std::make_shared<ArmedFabric>(run->fabric());
    ProxyThread thread(fabric, options.shard_bytes, cpu);
    thread.call([run](Proxy& proxy, Fabric&) { run->attach(proxy); });
    const auto operate = [&](int times) {
      for (int i = 0; i < times; ++i) {
        run->announce();
        while (!run->settled()) sched_yield();
      }
    };
    operate(2);
    fabric->arm();
    operate(kOperations);
    report->allocations = fabric->allocated();
    report->locks = fabric->locked();
    report->done = true;
    _exit(0);   // the thread can no longer be asked to stop
  });
  std::printf("  thread%s: %d operations, %llu allocations, %llu locks, %llu system calls but sched_yield\n",
              cpu < 0 ? "" : ", pinned", kOperations, static_cast<unsigned long long>(r.allocations),
              static_cast<unsigned long long>(r.locks), static_cast<unsigned long long>(r.calls));
  CHECK_EQ(r.allocations, 0u);
  CHECK_EQ(r.locks, 0u);
  if (r.calls != 0) check::fail(__FILE__, __LINE__, "system call " + std::to_string(r.last_call) + " was the last");
}

}  // namespace

int main() {
  report = static_cast<Report*>(mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  CHECK(report != MAP_FAILED);
  if (!the_counters_count()) {
    std::puts("skipped: this kernel has no seccomp filters, so system calls cannot be counted");
    return 0;
  }
  for (const std::uint32_t peers : {8u, 64u})
    for (const int endpoints : {1, 4})
      for (const std::uint32_t rows : {0u, 128u}) {
        CostOptions options;
        options.peers = peers;
        options.endpoints = endpoints;
        options.rows = rows;
        steps_of_the_proxy(options);
      }
  the_thread(-1);
  the_thread(0);
}

#endif
