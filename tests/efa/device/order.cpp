// SRD has no order, and what it has instead is drawn from a seed.
#include "fabric.h"

#include <algorithm>
#include <csignal>
#include <set>
#include <sys/mman.h>
#include <unistd.h>

using namespace efa;

namespace {

constexpr uint32_t WRITES = 64;

// One process writes with the immediates 0, 1, 2, ... and one doorbell; in which order the other hears of them.
std::vector<uint32_t> order_of_arrivals(const std::string& seed, const std::string& window) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    std::vector<Endpoint::Post> posts;
    for (uint32_t i = 0; i < WRITES; i++)
      posts.push_back({Endpoint::Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 64, memory.key(), i,
                       i});
    REQUIRE(endpoint.post(posts) == 0);
    for (uint32_t i = 0; i < WRITES; i++) REQUIRE(endpoint.wait().status == IBV_WC_SUCCESS);
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1, .unsolicited = true});
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    for (uint32_t i = 0; i < WRITES; i++) me.board.word[i] = endpoint.wait().immediate;
    me.meet();
  };
  std::vector<uint32_t> order;
  run({sender, receiver}, {{{"EFA_SOFT_SEED", seed}, {"EFA_SOFT_WINDOW", window}}, {}}, {},
      [&](Board& board, const std::string&) { order.assign(board.word, board.word + WRITES); });
  return order;
}

}  // namespace

CASE(order_is_drawn_and_comes_again) {
  std::vector<uint32_t> one = order_of_arrivals("1", "16"), again = order_of_arrivals("1", "16"),
      other = order_of_arrivals("2", "16");
  std::vector<uint32_t> sorted = one;
  std::sort(sorted.begin(), sorted.end());
  for (uint32_t i = 0; i < WRITES; i++) REQUIRE(sorted[i] == i);
  REQUIRE(one != sorted);
  REQUIRE(one == again);
  REQUIRE(one != other);
  // No more than 15 may overtake one.
  for (uint32_t i = 0; i < WRITES; i++) {
    uint32_t before_it = 0;
    for (uint32_t j = 0; j < i; j++) before_it += one[j] > one[i];
    REQUIRE(before_it <= 15);
  }
}

CASE(a_window_of_one_is_in_order) {
  std::vector<uint32_t> order = order_of_arrivals("1", "1");
  for (uint32_t i = 0; i < WRITES; i++) REQUIRE(order[i] == i);
}

// A page of the target that is not there stops a write where it is: what landed before shows the order of its packets.
static std::vector<bool> landed_pages(const std::string& window) {
  constexpr size_t PAGES = 16, PAGE = 4096;
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, PAGES * PAGE);
    memory.fill(3);
    me.join(endpoint, &memory);
    REQUIRE(endpoint.post({{Endpoint::Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), PAGES * PAGE,
                            memory.key(), 1u}}) == 0);
    REQUIRE(endpoint.wait().vendor == EFA_REMOTE_BAD_ADDRESS);
    me.meet();
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1, .unsolicited = true});
    Memory memory(endpoint, PAGES * PAGE);
    REQUIRE(mprotect(memory.data() + 9 * PAGE, PAGE, PROT_NONE) == 0);
    me.join(endpoint, &memory);
    me.meet();
    REQUIRE(!endpoint.poll()); // nothing is told of a write that did not land whole
    REQUIRE(mprotect(memory.data() + 9 * PAGE, PAGE, PROT_READ) == 0);
    for (size_t i = 0; i < PAGES; i++) me.board.word[i] = memory.is(3, i * PAGE, PAGE);
  };
  std::vector<bool> landed;
  run({sender, receiver}, {{{"EFA_SOFT_MTU", "4096"}, {"EFA_SOFT_WINDOW", window}}, {}}, {},
      [&](Board& board, const std::string&) { landed.assign(board.word, board.word + PAGES); });
  return landed;
}

CASE(packets_land_in_drawn_order) {
  std::vector<bool> in_order = landed_pages("1"), drawn = landed_pages("16");
  for (size_t i = 0; i < 16; i++) REQUIRE(in_order[i] == (i < 9));
  REQUIRE(drawn != in_order);
}

CASE(an_immediate_comes_after_all_bytes) {
  for (const char* mover : {"vm", "shm"}) {
    auto sender = [](Member& me) {
      Endpoint endpoint;
      Memory memory(endpoint, 1 << 20);
      me.join(endpoint, &memory);
      for (uint8_t round = 1; round <= 20; round++) {
        memory.fill(round);
        REQUIRE(endpoint.post({{Endpoint::Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 1 << 20,
                                memory.key(), round}}) == 0);
        REQUIRE(endpoint.wait().status == IBV_WC_SUCCESS);
        me.meet();
      }
    };
    auto receiver = [](Member& me) {
      Endpoint endpoint({.nic = 1, .unsolicited = true});
      Memory memory(endpoint, 1 << 20);
      me.join(endpoint, &memory);
      for (uint8_t round = 1; round <= 20; round++) {
        Completion done = endpoint.wait();
        REQUIRE(memory.is(round));
        REQUIRE(done.opcode == IBV_WC_RECV_RDMA_WITH_IMM && done.has_immediate && done.immediate == round && done.bytes == 1 << 20);
        me.meet();
      }
    };
    run({sender, receiver}, {{{"EFA_SOFT_MOVER", mover}}, {}});
  }
}

CASE(what_nobody_polls_goes_out) {
  auto sender = [](Member& me) {
    Endpoint endpoint;
    Memory memory(endpoint, 4096);
    memory.fill(9);
    me.join(endpoint, &memory);
    REQUIRE(endpoint.post({{Endpoint::Post::write, me.board.address[1][0], me.board.memory[1][0], memory.data(), 4096, memory.key(),
                            5u}}) == 0);
    me.meet();  // without a single poll
  };
  auto receiver = [](Member& me) {
    Endpoint endpoint({.nic = 1, .unsolicited = true});
    Memory memory(endpoint, 4096);
    me.join(endpoint, &memory);
    REQUIRE(endpoint.wait().immediate == 5);
    REQUIRE(memory.is(9));
    me.meet();
  };
  run({sender, receiver});
}

CASE(messages_and_reads) {
  for (const char* mover : {"vm", "shm"}) {
    auto sender = [](Member& me) {
      Endpoint endpoint;
      Memory memory(endpoint, 1 << 16);
      memory.fill(1);
      me.join(endpoint, &memory);
      Address to = me.board.address[1][0];
      for (uint32_t i = 0; i < 30; i++)
        REQUIRE(endpoint.post({{Endpoint::Post::send, to, {}, memory.data() + i, 1000, memory.key(), i, i}}) == 0);
      std::set<uint64_t> finished;
      for (uint32_t i = 0; i < 30; i++) {
        Completion done = endpoint.wait();
        REQUIRE(done.status == IBV_WC_SUCCESS && done.opcode == IBV_WC_SEND && finished.insert(done.wr_id).second);
      }
      me.meet();
      // Whole of the peer's memory comes back.
      REQUIRE(endpoint.post({{Endpoint::Post::read, to, me.board.memory[1][0], memory.data(), 1 << 16, memory.key(), {}, 7}}) == 0);
      REQUIRE(endpoint.wait().vendor == EFA_OK);
      REQUIRE(memory.is(77));
      me.meet();
    };
    auto receiver = [](Member& me) {
      Endpoint endpoint({.nic = 1});
      Memory memory(endpoint, 1 << 16), source(endpoint, 1 << 16), same(endpoint, 1 << 16);
      source.fill(77);
      same.fill(1);
      for (uint32_t i = 0; i < 30; i++) REQUIRE(endpoint.receive(memory.data() + 2000 * i, 1500, memory.key(), i) == 0);
      me.join(endpoint, &source);
      for (uint32_t i = 0; i < 30; i++) {
        Completion done = endpoint.wait();
        REQUIRE(done.opcode == IBV_WC_RECV && done.bytes == 1000 && done.source_qpn == me.board.address[0][0].qpn &&
                done.known_sender);
        REQUIRE(memcmp(memory.data() + 2000 * done.wr_id, same.data() + done.immediate, 1000) == 0);
      }
      me.meet();
      me.meet();
    };
    run({sender, receiver}, {{{"EFA_SOFT_MOVER", mover}}, {}});
  }
}
