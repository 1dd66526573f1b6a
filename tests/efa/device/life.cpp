// Peers that die, stop or fall silent; ports, wires and forks.
#include "fabric.h"

#include <csignal>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

using namespace efa;
using Post = Endpoint::Post;

namespace {

void stop_here(Member& me) {
  me.meet();
  for (;;) pause();
}

Completion finish(Endpoint& endpoint, const Post& post) {
  REQUIRE(endpoint.post({post}) == 0);
  return endpoint.wait();
}

void until_stopped(pid_t pid) {
  until("the stop", [&] {
    char path[64], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE* file = fopen(path, "r");
    REQUIRE(file && fgets(text, sizeof text, file));
    fclose(file);
    return strstr(text, ") T ") != nullptr;
  });
}

}  // namespace

CASE(a_dead_peer) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    Post known{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 8, memory.key(), {}};
    REQUIRE(finish(endpoint, known).vendor == EFA_OK);
    Post unknown = known;
    unknown.to = me.board.address[1][1];
    me.meet();
    REQUIRE(kill(me.board.pid[1], SIGKILL) == 0);
    until("its death", [&] { return kill(me.board.pid[1], 0) != 0; });
    auto start = Clock::now();
    Completion done = finish(endpoint, known);
    REQUIRE(done.vendor == EFA_UNRESPONSIVE_REMOTE && done.status == IBV_WC_RESP_TIMEOUT_ERR);
    REQUIRE(seconds_since(start) >= 0.2);
    REQUIRE(finish(endpoint, unknown).vendor == EFA_UNREACHABLE_REMOTE);  // it never answered
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1}), other({.nic = 1});
    Memory memory(endpoint, 4096);
    me.board.address[1][1] = other.address();
    me.join(endpoint, &memory);
    stop_here(me);
  };
  run({sender, receiver}, {{{"EFA_SOFT_UNRESPONSIVE_MS", "200"}}, {}}, {1});
}

CASE(a_peer_that_has_closed) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    Post post{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 8, memory.key(), {}};
    REQUIRE(finish(endpoint, post).vendor == EFA_OK);
    me.meet();
    me.meet();
    REQUIRE(finish(endpoint, post).vendor == EFA_REMOTE_BAD_DEST_QPN);
  };
  auto receiver = [](Member& me) {
    {
      Endpoint endpoint({.nic = 1});
      Memory memory(endpoint, 4096);
      me.join(endpoint, &memory);
      me.meet();
    }
    me.meet();
  };
  run({sender, receiver});
}

CASE(a_stopped_peer) {
  for (const char* mover : {"vm", "shm"}) {
    bool direct = *mover == 'v';
    auto sender = [=](Member& me) {
      Endpoint endpoint;
      Memory memory(endpoint, 4096);
      memory.fill(6);
      me.join(endpoint, &memory);
      Post post{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 4096, memory.key(), 3u};
      me.meet();
      REQUIRE(kill(me.board.pid[1], SIGSTOP) == 0);
      until_stopped(me.board.pid[1]);
      REQUIRE(endpoint.post({post}) == 0);
      if (direct) REQUIRE(endpoint.wait().vendor == EFA_OK);  // its NIC works on
      else for (auto start = Clock::now(); seconds_since(start) < 0.05;) REQUIRE(!endpoint.poll());
      me.board.word[0] = 1;
      REQUIRE(kill(me.board.pid[1], SIGCONT) == 0);
      if (!direct) REQUIRE(endpoint.wait().vendor == EFA_OK);
      me.meet();
    };
    auto receiver = [](Member& me) {
      Endpoint endpoint({.nic = 1, .unsolicited = true});
      Memory memory(endpoint, 4096);
      me.join(endpoint, &memory);
      me.meet();
      until("to be stopped and continued", [&] { return me.board.word[0] == 1; });
      REQUIRE(endpoint.wait().immediate == 3 && memory.is(6));
      me.meet();
    };
    run({sender, receiver}, {{{"EFA_SOFT_MOVER", mover}}, {}});
  }
}

CASE(a_silent_peer) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    Post post{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 8, memory.key(), {}};
    REQUIRE(finish(endpoint, post).vendor == EFA_OK);
    me.meet();
    me.meet();
    REQUIRE(finish(endpoint, post).vendor == EFA_UNRESPONSIVE_REMOTE);
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1});
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    me.meet();
    Post post{Post::write, me.board.address[0][0], me.board.memory[0][0], memory.data(), 8, memory.key(), {}};
    REQUIRE(finish(endpoint, post).vendor == EFA_UNREACHABLE_REMOTE);  // it falls silent with this one
    me.meet();
    me.meet();
  };
  run({sender, receiver}, {{{"EFA_SOFT_UNRESPONSIVE_MS", "100"}}, {{1, {{"EFA_SOFT_FAIL", "silent"}}}}});
}

CASE(a_port_goes_down_and_up) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    Post post{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 8, memory.key(), {}};
    REQUIRE(finish(endpoint, post).vendor == EFA_OK);
    for (int whose : {0, 1}) {
      ibv_gid gid = me.board.address[whose][0].gid;
      set_control(gid, PORT_DOWN, 1);
      ibv_port_attr port{};
      REQUIRE(whose || (ibv_query_port(endpoint.context, 1, &port) == 0 && port.state == IBV_PORT_DOWN));
      REQUIRE(endpoint.post({post}) == 0);
      for (auto start = Clock::now(); seconds_since(start) < 0.05;) REQUIRE(!endpoint.poll());
      set_control(gid, PORT_DOWN, 0);
      REQUIRE(endpoint.wait().vendor == EFA_OK);  // it was not down for long
      set_control(gid, PORT_DOWN, 1);
      REQUIRE(finish(endpoint, post).vendor == EFA_UNRESPONSIVE_REMOTE);
      set_control(gid, PORT_DOWN, 0);
    }
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1});
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    me.meet();
  };
  run({sender, receiver}, {{{"EFA_SOFT_UNRESPONSIVE_MS", "1000"}}, {}});
}

CASE(latency) {
  auto pinger = [](Member& me) {
    Endpoint endpoint({.unsolicited = true});
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    int other = 1 - me.role;
    Post post{Post::write, me.board.address[other][0], me.board.memory[other][0], memory.data(), 8, memory.key(), 1u};
    auto hear = [&] {
      while (endpoint.wait().opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
      }
    };
    auto start = Clock::now();
    for (int i = 0; i < 5; i++) {
      if (me.role == 1) hear();
      REQUIRE(endpoint.post({post}) == 0);
      if (me.role == 0) hear();
    }
    double took = seconds_since(start);
    me.meet();
    if (me.role == 0) REQUIRE(took >= 10 * 0.004 && took < 10 * 0.004 + 1);
  };
  run({pinger, pinger}, {{{"EFA_SOFT_LATENCY_US", "4000"}}, {}});
}

CASE(bandwidth_is_shared) {
  // Two senders on two NICs, one target: its NIC takes 8 MiB at 1 Gbit/s.
  auto sender = [](Member& me) {
    Endpoint endpoint({.nic = me.role});
    Memory memory(endpoint, 1 << 20);
    me.join(endpoint, &memory);
    Post post{Post::write, me.board.address[2][0], me.board.memory[2][0], memory.data(), 1 << 20, memory.key(), {}};
    auto now = [] { return static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now().time_since_epoch()).count()); };
    me.board.word[me.role] = now();
    REQUIRE(endpoint.post({post, post, post, post}) == 0);
    for (int i = 0; i < 4; i++) REQUIRE(endpoint.wait().vendor == EFA_OK);
    me.board.word[2 + me.role] = now();
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 2});
    Memory memory(endpoint, 1 << 20);
    me.join(endpoint, &memory);
    me.meet();
    uint64_t begun = std::min<uint64_t>(me.board.word[0], me.board.word[1]);
    uint64_t ended = std::max<uint64_t>(me.board.word[2], me.board.word[3]);
    REQUIRE(ended - begun >= 60'000'000);  // 67 ms for both, whichever begins first; NICs of their own would take 34
  };
  run({sender, sender, receiver}, {{{"EFA_SOFT_GBIT", "1"}}, {}, 3});
}

CASE(where_ptrace_is_refused) {
  auto sender = [](Member& me) {
    // process_vm_readv and process_vm_writev are forbidden, as in a container that restricts them.
    sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    sock_fprog program{sizeof filter / sizeof *filter, filter};
    REQUIRE(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    Endpoint endpoint;
    Memory memory(endpoint, 1 << 18);
    memory.fill(2);
    me.join(endpoint, &memory);
    Post post{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 1 << 18, memory.key(), 4u};
    REQUIRE(finish(endpoint, post).vendor == EFA_OK);
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1, .unsolicited = true});
    Memory memory(endpoint, 1 << 18);
    me.join(endpoint, &memory);
    REQUIRE(endpoint.wait().immediate == 4 && memory.is(2));
    me.meet();
  };
  run({sender, receiver}, {{{"EFA_SOFT_LOG", "/dev/null"}}, {}});
}

CASE(the_killed_leave_nothing) {
  auto victim = [](Member& me) {
    Endpoint endpoint({.nic = 1});
    Memory memory(endpoint, 4096);
    me.board.word[0] = endpoint.address().qpn;
    stop_here(me);
  };
  auto next = [](Member& me) {
    me.meet();
    std::string victims = std::to_string(me.board.pid[0]) + "-";
    // Not this process yet: it has not touched the device.
    REQUIRE(files(folder(), "process-" + victims).size() == 1 && files(folder(), "cq-" + victims).size() == 1);
    REQUIRE(kill(me.board.pid[0], SIGKILL) == 0);
    until("its death", [&] { return kill(me.board.pid[0], 0) != 0; });
    Endpoint endpoint({.nic = 1});
    REQUIRE(endpoint.address().qpn == me.board.word[0]);  // its number too
    REQUIRE(files(folder(), "process-" + victims).empty() && files(folder(), "cq-" + victims).empty());
  };
  run({victim, next}, {}, {0}, [](Board&, const std::string& folder) {
    REQUIRE(files(folder, "process-").empty() && files(folder, "cq-").empty() && files(folder, "qp-").empty());
    REQUIRE(files(folder, "counters-").size() == 2);
  });
}

CASE(a_death_in_the_middle_hurts_nobody_else) {
  auto victim = [](Member& me) {
    Endpoint endpoint({.nic = 1});
    Memory memory(endpoint, 1 << 16);
    me.join(endpoint, &memory);
    Post post{Post::write, me.board.address[0][0], me.board.memory[0][0], memory.data(), 1 << 15, memory.key(), 1u};
    for (uint64_t i = 0;; i++) {
      finish(endpoint, post);
      me.board.word[me.role] = i;
    }
  };
  auto survivor = [](Member& me) {
    Endpoint endpoint({.unsolicited = true});
    Memory memory(endpoint, 1 << 16);
    me.join(endpoint, &memory);
    for (int victim = 2; victim < me.roles; victim++) {
      uint64_t arrived = 0;
      until("writes of the victim", [&] {
        while (endpoint.poll()) arrived++;
        return arrived > 50 && me.board.word[victim] > 3;
      });
      REQUIRE(kill(me.board.pid[victim], SIGKILL) == 0);
    }
    // The rest works on, and a new queue too.
    uint64_t arrived = 0;
    until("writes of the survivors", [&] {
      while (endpoint.poll()) arrived++;
      return arrived > 200;
    });
    REQUIRE(kill(me.board.pid[1], SIGKILL) == 0);
    Endpoint another;
    Memory more(another, 4096);
    another.meet(another.address());
    REQUIRE(finish(another, {Post::write, another.address(), more.remote(), more.data(), 8, more.key(), {}}).vendor == EFA_OK);
  };
  run({survivor, victim, victim, victim, victim, victim}, {}, {1, 2, 3, 4, 5});
}

// Dies while it writes into another's completion queue, in the hundred nanoseconds in which it holds the lock of the queue.
CASE(a_writer_that_dies_with_the_lock) {
  auto victim = [](Member& me) {
    me.meet();
    std::string queue = files(folder(), "cq-" + std::to_string(me.board.pid[1]) + "-").at(0);
    int fd = open((folder() + "/" + queue).c_str(), O_RDWR);
    REQUIRE(fd >= 0);
    void* page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REQUIRE(page != MAP_FAILED);
    constexpr size_t LOCK = 40;  // struct cq_file
    REQUIRE(pthread_mutex_lock(reinterpret_cast<pthread_mutex_t*>(static_cast<char*>(page) + LOCK)) == 0);
    raise(SIGKILL);
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.unsolicited = true});
    Memory memory(endpoint, 4096);
    endpoint.meet(endpoint.address());
    me.meet();
    until("the death of the other", [&] { return kill(me.board.pid[0], 0) != 0; });
    Post post{Post::write, endpoint.address(), memory.remote(), memory.data(), 8, memory.key(), 1u};
    for (int i = 0; i < 3; i++) {
      REQUIRE(finish(endpoint, post).vendor == EFA_OK);
      endpoint.wait();
    }
  };
  run({victim, receiver}, {}, {0});
}

CASE(a_fork) {
  auto parent = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    memory.fill(5);
    me.join(endpoint, &memory);
    Post post{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 64, memory.key(), {}};
    REQUIRE(finish(endpoint, post).vendor == EFA_OK);
    size_t before = files(folder(), "").size();
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      // Inherited objects are the parent's; objects opened here are its own.
      int code = 1;
      if (endpoint.receive(nullptr, 0, 0) == EINVAL && !endpoint.poll()) {
        Endpoint own({.nic = 1});
        Memory more(own, 4096);
        own.meet(own.address());
        code = finish(own, {Post::write, own.address(), more.remote(), more.data(), 8, more.key(), {}}).vendor == EFA_OK ? 0 : 2;
      }
      exit(code);
    }
    int status = 1;
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    REQUIRE(files(folder(), "").size() == before + 1);  // the child's counters
    REQUIRE(finish(endpoint, post).vendor == EFA_OK);
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1});
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    me.meet();
  };
  run({parent, receiver});
}

CASE(a_broken_queue_pair_is_flushed) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    REQUIRE(endpoint.receive(memory.data(), 8, memory.key(), 21) == 0);
    // No receive there
    REQUIRE(endpoint.post({{Post::send, me.board.address[1][0], {}, memory.data(), 8, memory.key(), {}, 22}}) == 0);
    REQUIRE(!endpoint.poll());
    endpoint.modify(IBV_QPS_ERR);
    for (int i = 0; i < 2; i++) {
      Completion done = endpoint.wait();
      REQUIRE(done.vendor == EFA_FLUSHED && done.status == IBV_WC_WR_FLUSH_ERR && (done.wr_id == 21 || done.wr_id == 22));
    }
    REQUIRE(endpoint.receive(memory.data(), 8, memory.key()) == EINVAL);
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1});
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    me.meet();
  };
  run({sender, receiver});
}

CASE(threads) {
  // Gives ThreadSanitizer two threads that post on two queue pairs, poll both, and register memory meanwhile.
  auto peer = [](Member& me) {
    Endpoint endpoint({.unsolicited = true});
    Memory memory(endpoint, 1 << 16);
    me.join(endpoint, &memory);
    int other = 1 - me.role;
    std::atomic<int> left{200};
    std::atomic<uint32_t> completions{0};
    auto work = [&](int number) {
      Post post{Post::write, me.board.address[other][0], me.board.memory[other][0], memory.data() + number * 4096, 512,
                memory.key(), 1u};
      while (left.fetch_sub(1) > 0) {
        while (endpoint.post({post}) != 0) completions += endpoint.poll().has_value();
        Memory brief(endpoint, 4096);
        completions += endpoint.poll().has_value();
      }
    };
    std::thread one(work, 0), two(work, 1);
    one.join();
    two.join();
    until("all completions", [&] {
      completions += endpoint.poll().has_value();
      return completions == 400;
    });
    me.meet();
  };
  run({peer, peer});
}
