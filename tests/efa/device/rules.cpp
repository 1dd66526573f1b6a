// Queues, keys, capabilities: what the device refuses, and with which code.
#include "fabric.h"

#include <csignal>
#include <unistd.h>

using namespace efa;

namespace {

using Post = Endpoint::Post;

// A receiver that only lends its memory until the others have done what they came for.
void lends(Member& me) {
  Endpoint endpoint({.nic = 1, .unsolicited = true});
  Memory memory(endpoint, 1 << 16);
  me.join(endpoint, &memory);
  me.meet();
}

uint32_t code_of(Endpoint& endpoint, const Post& post) {
  REQUIRE(endpoint.post({post}) == 0);
  Completion done = endpoint.wait();
  REQUIRE((done.vendor == EFA_OK) == (done.status == IBV_WC_SUCCESS));
  return done.vendor;
}

}  // namespace

CASE(a_receive_that_comes_late) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    memory.fill(4);
    me.join(endpoint, &memory);
    REQUIRE(endpoint.post({{Post::send, me.board.address[1][0], {}, memory.data(), 100, memory.key(), {}}}) == 0);
    until("a try that meets no receive", [&] { return !endpoint.poll() && counted(folder(), "rnr_tries") >= 2; });
    me.meet();
    REQUIRE(endpoint.wait().status == IBV_WC_SUCCESS);
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1});
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    me.meet();
    REQUIRE(!endpoint.poll());
    REQUIRE(endpoint.receive(memory.data(), 100, memory.key(), 3) == 0);
    Completion done = endpoint.wait();
    REQUIRE(done.wr_id == 3 && done.bytes == 100 && memory.is(4, 0, 100));
    me.meet();
  };
  run({sender, receiver});
}

CASE(retries_for_a_receive_can_end) {
  auto sender = [](Member& me) {
    Endpoint endpoint({.rnr_retry = 3});
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    Post post{Post::send, me.board.address[1][0], {}, memory.data(), 100, memory.key(), {}};
    REQUIRE(endpoint.post({post}) == 0);
    Completion done = endpoint.wait();
    REQUIRE(done.vendor == EFA_REMOTE_RNR && done.status == IBV_WC_RNR_RETRY_EXC_ERR);
    REQUIRE(counted(folder(), "rnr_tries") == 4);
    REQUIRE(counted(folder(), "error_10") == 1);
    me.meet();
  };
  run({sender, lends});
}

CASE(a_full_send_queue_refuses) {
  auto sender = [](Member& me) {
    Endpoint endpoint({.sends = 4});
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    Post post{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 8, memory.key(), {}};
    REQUIRE(endpoint.post({post, post, post}) == 0);
    REQUIRE(endpoint.post({post, post}) == ENOMEM);  // both or none
    REQUIRE(endpoint.post({post}) == 0);
    REQUIRE(endpoint.post({post}) == ENOMEM);
    endpoint.wait();  // a completion that is polled makes room
    REQUIRE(endpoint.post({post}) == 0);
    for (int i = 0; i < 4; i++) REQUIRE(endpoint.wait().status == IBV_WC_SUCCESS);
    REQUIRE(counted(folder(), "refused_posts") == 2);
    me.meet();
  };
  run({sender, lends});
}

CASE(a_full_receive_queue_refuses) {
  run({[](Member&) {
    Endpoint endpoint({.receives = 2});
    Memory memory(endpoint, 4096);
    for (int i = 0; i < 2; i++) REQUIRE(endpoint.receive(memory.data(), 8, memory.key()) == 0);
    REQUIRE(endpoint.receive(memory.data(), 8, memory.key()) == ENOMEM);
  }});
}

CASE(unsolicited_writes) {
  for (bool unsolicited : {true, false}) {
    auto sender = [=](Member& me) {
      Endpoint endpoint({.rnr_retry = 2});
      Memory memory(endpoint, 4096);
      me.join(endpoint, &memory);
      Post post{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 8, memory.key(), 0xfedcba98u};
      REQUIRE(code_of(endpoint, post) == (unsolicited ? EFA_OK : EFA_REMOTE_RNR));
      me.meet();
      me.meet();  // now a receive is there
      REQUIRE(code_of(endpoint, post) == EFA_OK);
      me.meet();
    };
    auto receiver = [=](Member& me) {
      Endpoint endpoint({.nic = 1, .unsolicited = unsolicited});
      Memory memory(endpoint, 4096);
      me.join(endpoint, &memory);
      me.meet();
      REQUIRE(endpoint.receive(nullptr, 0, 0, 6) == 0);
      me.meet();
      if (unsolicited) REQUIRE(endpoint.wait().unsolicited);
      Completion done = endpoint.wait();
      REQUIRE(done.unsolicited == unsolicited && done.immediate == 0xfedcba98u && done.wr_id == (unsolicited ? 0u : 6u));
      me.meet();
      REQUIRE(counted(folder(), "unsolicited_arrivals") == (unsolicited ? 2 : 0));
      REQUIRE(counted(folder(), "receives_used") == (unsolicited ? 0 : 1));
    };
    run({sender, receiver});
  }
}

// Checks the device's capabilities, and if a queue pair that writes, reads and takes unsolicited writes can be made.
static Role has(uint32_t capabilities, bool made) {
  return [=](Member&) {
    ibv_device** list = ibv_get_device_list(nullptr);
    ibv_context* context = ibv_open_device(list[0]);
    efadv_device_attr device{};
    REQUIRE(efadv_query_device(context, &device, sizeof device) == 0 && device.device_caps == capabilities);
    ibv_free_device_list(list);
    ibv_close_device(context);
    bool refused = false;
    try {
      Endpoint endpoint({.unsolicited = true});
    } catch (const std::exception&) {
      refused = true;
    }
    REQUIRE(refused == !made);
  };
}

CASE(capabilities_can_be_taken_away) {
  run({has(31, true), has(30, false), has(23, false), has(15, false)},
      {{}, {{1, {{"EFA_SOFT_RDMA_READ", "0"}}}, {2, {{"EFA_SOFT_RDMA_WRITE", "0"}}}, {3, {{"EFA_SOFT_UNSOLICITED", "0"}}}}});
}

CASE(checks_at_the_sender) {
  auto sender = [](Member& me) {
    Endpoint endpoint, stranger;
    Memory memory(endpoint, 1 << 16), other_domain(stranger, 4096), read_only(endpoint, 4096, 0);
    me.join(endpoint, &memory);
    const Post right{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 64, memory.key(), {}};
    auto with = [&](auto change) {
      Post post = right;
      change(post);
      return code_of(endpoint, post);
    };
    REQUIRE(with([](Post&) {}) == EFA_OK);
    REQUIRE(with([](Post& p) { p.key += 1 << 16; }) == EFA_INVALID_LKEY);
    REQUIRE(with([](Post& p) { p.key = 0; }) == EFA_INVALID_LKEY);
    REQUIRE(with([&](Post& p) { p.data = memory.data() + memory.size() - 63; }) == EFA_INVALID_LKEY);
    REQUIRE(with([&](Post& p) { p.data = memory.data() - 1; }) == EFA_INVALID_LKEY);
    REQUIRE(with([&](Post& p) { p.data = other_domain.data(), p.key = other_domain.key(); }) == EFA_INVALID_LKEY);
    REQUIRE(with([&](Post& p) { p.data = read_only.data(), p.key = read_only.key(); }) == EFA_OK);
    REQUIRE(with([&](Post& p) { p.kind = Post::read, p.data = read_only.data(), p.key = read_only.key(); }) == EFA_INVALID_LKEY);
    REQUIRE(with([](Post& p) { p.kind = Post::send, p.bytes = 8929; }) == EFA_BAD_LENGTH);
    // A handle of another NIC, and one that is destroyed while the work request waits for its doorbell.
    Endpoint elsewhere({.nic = 1});
    REQUIRE(with([&](Post& p) { p.ah = elsewhere.meet({.gid = {{9}}, .qpn = 1, .qkey = 1}); }) == EFA_INVALID_AH);
    me.meet();
    REQUIRE(counted(folder(), "error_5") == 6 && counted(folder(), "error_6") == 1 && counted(folder(), "error_4") == 1);
  };
  run({sender, lends});
}

CASE(checks_at_the_target) {
  auto sender = [](Member& me) {
    Endpoint endpoint({.rnr_retry = 0});
    Memory memory(endpoint, 1 << 16);
    me.join(endpoint, &memory);
    const Post right{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 64, memory.key(), {}};
    auto with = [&](auto change) {
      Post post = right;
      change(post);
      return code_of(endpoint, post);
    };
    auto& of_peer = me.board.memory[1];
    REQUIRE(with([](Post&) {}) == EFA_OK);
    REQUIRE(with([](Post& p) { p.kind = Post::read; }) == EFA_OK);
    REQUIRE(with([](Post& p) { p.remote.key += 1 << 16; }) == EFA_REMOTE_BAD_ADDRESS);
    REQUIRE(with([](Post& p) { p.remote.address += 4096 - 63; }) == EFA_REMOTE_BAD_ADDRESS);
    REQUIRE(with([](Post& p) { p.remote.address -= 1; }) == EFA_REMOTE_BAD_ADDRESS);
    REQUIRE(with([&](Post& p) { p.remote = of_peer[1]; }) == EFA_REMOTE_BAD_ADDRESS);                        // no remote write
    REQUIRE(with([&](Post& p) { p.remote = of_peer[1], p.kind = Post::read; }) == EFA_REMOTE_BAD_ADDRESS);   // no remote read
    REQUIRE(with([&](Post& p) { p.remote = of_peer[2]; }) == EFA_REMOTE_BAD_ADDRESS);                        // another domain
    REQUIRE(with([](Post& p) { p.to.qpn = 77; }) == EFA_REMOTE_BAD_DEST_QPN);
    REQUIRE(with([](Post& p) { p.to.qkey++; }) == EFA_UNRESPONSIVE_REMOTE);
    REQUIRE(with([](Post& p) { p.to.gid.raw[3] = 5; }) == EFA_UNREACHABLE_REMOTE);
    REQUIRE(with([&](Post& p) { p.to = me.board.address[1][1]; }) == EFA_OK);
    me.meet();
    // Two receives: one is too short, and stays; then one in memory that is not registered.
    REQUIRE(with([](Post& p) { p.kind = Post::send; }) == EFA_REMOTE_BAD_LENGTH);
    REQUIRE(with([](Post& p) { p.kind = Post::send, p.bytes = 16; }) == EFA_OK);
    REQUIRE(with([](Post& p) { p.kind = Post::send; }) == EFA_REMOTE_BAD_STATUS);
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1}), elsewhere({.nic = 1});
    Memory memory(endpoint, 4096), closed(endpoint, 4096, IBV_ACCESS_LOCAL_WRITE), other_domain(elsewhere, 4096);
    me.board.memory[1][1] = closed.remote();
    me.board.memory[1][2] = other_domain.remote();
    Endpoint same_nic({.nic = 1});
    me.board.address[1][1] = endpoint.address();
    REQUIRE(endpoint.receive(memory.data(), 16, memory.key()) == 0);
    REQUIRE(endpoint.receive(memory.data(), 64, memory.key() + (1 << 16)) == 0);
    me.join(endpoint, &memory);
    me.meet();
    me.meet();
  };
  run({sender, receiver}, {{{"EFA_SOFT_UNRESPONSIVE_MS", "50"}}, {}});
}

CASE(a_target_that_does_not_know_the_sender) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    me.meet();
    Address to = me.board.address[1][0];
    const Post right{Post::write, to, me.board.memory[1][0], memory.data(), 64, memory.key(), {}};
    REQUIRE(endpoint.post({right}) == 0);
    Completion done = endpoint.wait();
    REQUIRE(done.vendor == EFA_REMOTE_UNKNOWN_PEER && done.status == IBV_WC_REM_OP_ERR);
    // A message needs no handle there.
    REQUIRE(code_of(endpoint, {Post::send, to, {}, memory.data(), 8, memory.key(), {}}) == EFA_OK);
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1});
    Memory memory(endpoint, 4096);
    me.board.address[1][0] = endpoint.address();
    me.board.memory[1][0] = memory.remote();
    REQUIRE(endpoint.receive(memory.data(), 64, memory.key()) == 0);
    me.meet();
    REQUIRE(!endpoint.wait().known_sender);
    me.meet();
  };
  run({sender, receiver});
}

CASE(a_completion_queue_that_overruns) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    Post post{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 8, memory.key(), 1u};
    for (int i = 0; i < 7; i++) REQUIRE(code_of(endpoint, post) == EFA_OK);
    REQUIRE(counted(folder(), "cq_overruns") == 3);
    me.meet();
    me.meet();
    REQUIRE(code_of(endpoint, post) == EFA_OK);  // there is room again
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1, .completions = 4, .unsolicited = true});
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    me.meet();
    for (int i = 0; i < 4; i++) REQUIRE(endpoint.poll());
    REQUIRE(!endpoint.poll());
    me.meet();
    endpoint.wait();
    me.meet();
  };
  run({sender, receiver});
}

CASE(a_key_that_is_used_again) {
  for (const char* reuse : {"0", "1"}) {
    bool again = *reuse == '1';
    auto sender = [=](Member& me) {
      Endpoint endpoint;
      Memory memory(endpoint, 4096);
      memory.fill(8);
      me.join(endpoint, &memory);
      me.meet();
      Post post{Post::write, me.board.address[1][0], me.board.memory[1][1], memory.data(), 64, memory.key(), {}};
      REQUIRE(code_of(endpoint, post) == (again ? EFA_OK : EFA_REMOTE_BAD_ADDRESS));
      REQUIRE(counted(folder(), "keys_given_twice") == (again ? 1 : 0));
      me.meet();
    };
    auto receiver = [=](Member& me) {
      Endpoint endpoint({.nic = 1});
      Memory memory(endpoint, 4096);
      me.join(endpoint, &memory);
      auto old = std::make_unique<Memory>(endpoint, 4096);
      uint32_t key = old->key();
      old.reset();
      Memory next(endpoint, 4096);
      REQUIRE((next.key() == key) == again);
      me.board.memory[1][1] = {next.remote().address, key};
      me.meet();
      me.meet();
    };
    run({sender, receiver}, {{{"EFA_SOFT_REUSE_KEYS", reuse}}, {}});
  }
}

CASE(faults_that_are_asked_for) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    Post post{Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 8, memory.key(), {}};
    std::vector<uint32_t> codes;
    for (int i = 0; i < 6; i++) codes.push_back(code_of(endpoint, post));
    REQUIRE((codes == std::vector<uint32_t>{0, 0, 8, 8, 0, 0}));
    std::vector<int> posted;
    for (int i = 0; i < 4; i++) posted.push_back(endpoint.post({post}));
    REQUIRE((posted == std::vector<int>{0, 0, 0, ENOMEM}));  // the tenth doorbell
    // One for several is not refused, and does not count: the first of them were accepted before it.
    for (int i = 0; i < 10; i++) REQUIRE(endpoint.post({post, post}) == 0);
    posted.clear();
    for (int i = 0; i < 10; i++) posted.push_back(endpoint.post({post}));
    REQUIRE((posted == std::vector<int>{0, 0, 0, 0, 0, 0, 0, 0, 0, ENOMEM}));
    me.meet();
  };
  run({sender, lends}, {{}, {{0, {{"EFA_SOFT_FAIL", "error=8,nic=0,after=2,count=2;full,every=10"}}}}});
}

CASE(counters_add_up) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 1 << 16);
    me.join(endpoint, &memory);
    Address to = me.board.address[1][0];
    Remote there = me.board.memory[1][0];
    std::vector<Post> posts;
    for (uint32_t i = 0; i < 10; i++) {
      posts.push_back({Post::write, to, there, memory.data(), 100, memory.key(), {}});
      posts.push_back({Post::write, to, there, memory.data(), 10, memory.key(), i});
      posts.push_back({Post::read, to, there, memory.data(), 1, memory.key(), {}});
      posts.push_back({Post::send, to, {}, memory.data(), 1000, memory.key(), {}});
    }
    REQUIRE(endpoint.post(posts) == 0);
    for (size_t i = 0; i < posts.size(); i++) REQUIRE(endpoint.wait().vendor == EFA_OK);
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1});
    Memory memory(endpoint, 1 << 16);
    for (int i = 0; i < 20; i++) REQUIRE(endpoint.receive(memory.data(), 1000, memory.key()) == 0);
    me.join(endpoint, &memory);
    for (int i = 0; i < 20; i++) endpoint.wait();
    me.meet();
  };
  run({sender, receiver}, {}, {}, [](Board&, const std::string& folder) {
    REQUIRE(counted(folder, "writes", 0) == 10 && counted(folder, "writes_with_immediate", 0) == 10);
    REQUIRE(counted(folder, "reads", 0) == 10 && counted(folder, "sends", 0) == 10);
    REQUIRE(counted(folder, "bytes", 0) == 11110 && counted(folder, "bytes", 1) == 0);
    REQUIRE(counted(folder, "receives_used", 1) == 20 && counted(folder, "out_of_order", 0) > 0);
  });
}

CASE(what_never_had_a_doorbell_is_counted) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    ibv_qp_ex* ex = ibv_qp_to_qp_ex(endpoint.qp);
    ex->wr_flags = IBV_SEND_SIGNALED;
    ex->wr_start(ex);
    ex->wr_rdma_write(ex, me.board.memory[1][0].key, me.board.memory[1][0].address);
    ex->wr_set_sge(ex, memory.key(), reinterpret_cast<uint64_t>(memory.data()), 8);
    me.meet();
  };
  run({sender, lends}, {{{"EFA_SOFT_LOG", "/dev/null"}}, {}}, {},
      [](Board&, const std::string& folder) { REQUIRE(counted(folder, "posted_without_doorbell") == 1); });
}
