// A forked child has this process's objects, but neither its threads nor the memory that ranks share. Destructors in the child must
// wait for no thread, and must not touch memory that the child has mapped since.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>

#include "../../proxy/proxy_thread.h"
#include "../../src/cpu/thread_pool.h"
#include "../../src/host/mapping.h"
#include "../../src/host/output_pool.h"
#include "check.h"
#include "plain_fabric.h"

using namespace pplx;
using namespace pplx::cpu;

namespace {

constexpr std::size_t kBytes = 1 << 20;

// A child that hangs is killed by its alarm.
void in_child(const char* what, const std::function<void()>& work) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    work();
    _exit(0);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  if (status != 0) check::fail(__FILE__, __LINE__, std::string(what) + ": the child ended with status " + std::to_string(status));
}

void threads() {
  auto pool = std::make_unique<ThreadPool>(3);
  in_child("a pool of threads", [&] { pool.reset(); });
  CHECK_EQ(pool->helpers(), 3u);
}

class SilentFabric final : public test::PlainFabric {
 public:
  int endpoints() const override { return 1; }
  Post write(const Write&) override { return Post::Again; }
  int poll(Completion*, int) override { return 0; }
};

void proxy() {
  auto thread = std::make_unique<ProxyThread>(std::make_shared<SilentFabric>(), 4096, -1);
  in_child("a proxy thread", [&] {
    if (!thread->close(10.0)) _exit(2);   // there is nothing to wait for
    thread.reset();
  });
  CHECK(thread->takes_turns(10.0));
}

// Where the parent has memory that ranks share, the child may have anything.
void mapping() {
  const int fd = memfd_create("test", 0);
  CHECK(fd >= 0 && ftruncate(fd, kBytes) == 0);
  auto mapping = std::make_unique<Mapping>(fd, kBytes);
  mapping->data()[0] = 'p';
  in_child("a mapping", [&] {
    void* const at = mmap(mapping->data(), kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1,
                          0);
    if (at != mapping->data()) _exit(2);
    mapping.reset();
    *static_cast<volatile char*>(at) = 'c';
  });
  CHECK_EQ(mapping->data()[0], 'p');
  close(fd);
}

// A child that drops the parent's outputs drops its own copy.
void outputs() {
  const auto pool = std::make_shared<OutputPool>();
  auto out = pool->take(kBytes);
  out->data()[0] = 'p';
  in_child("a pool of outputs", [&] {
    out.reset();
    pool->close();
  });
  CHECK_EQ(out->data()[0], 'p');
}

}  // namespace

int main() {
  threads();
  proxy();
  mapping();
  outputs();
}
