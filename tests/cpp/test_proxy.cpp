// The proxy alone, over a fabric whose every answer the test chooses: what it posts, when it raises a word, and what it ignores.
#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../../src/host/atomic.h"
#include "check.h"
#include "scripted_world.h"

using namespace pplx;
using namespace pplx::test;

namespace {

// A block becomes one write, to the place that belongs to this rank at the peer.
void one_write() {
  World w;
  CHECK(!w.proxy.step());
  CHECK(!w.proxy.waiting());
  w.mail(1, Op::Dispatch, 3, 0, 4096);   // no rows: the header travels all the same
  const std::vector<Write> writes = w.take_writes();
  CHECK_EQ(writes.size(), std::size_t{1});
  const Write& x = writes[0];
  CHECK_EQ(x.peer, 3);
  CHECK_EQ(x.source_offset, std::size_t{4096});
  CHECK_EQ(x.bytes, std::size_t{dispatch_block(w.config).header_bytes});
  CHECK_EQ(x.target->base, kBase * 3);
  CHECK_EQ(x.target_offset, static_cast<std::size_t>(w.heap.slot_at(w.config, 1, Op::Dispatch, 0)));
  CHECK_EQ(x.immediate, w.immediate(Op::Dispatch, 0, 1));
  CHECK(w.proxy.waiting());
  CHECK_EQ(w.proxy.outstanding(0), 1u);
  CHECK(!w.sent(1, Op::Dispatch, 3));
  w.fabric.finish(x);
  w.run();
  CHECK(w.sent(1, Op::Dispatch, 3));
  CHECK_EQ(w.proxy.outstanding(0), 0u);
  CHECK(w.proxy.waiting());   // the proxy waits for the combine
  w.fabric.arrive(w.immediate(Op::Combine, 3, 1));
  w.run();
  CHECK(w.has(1, Op::Combine, 3));
  CHECK(!w.proxy.waiting());
  CHECK(w.take_writes().empty());   // each word is taken once
}

// Shards cover the block exactly, one endpoint each, and only the last completion frees the memory, whatever the order.
void shards_of_a_block() {
  for (int endpoints : {1, 2, 3, 16})
    for (std::uint32_t rows : {0u, 1u, 4u, 5u, 9u, 64u}) {
      World w(endpoints);
      w.mail(1, Op::Combine, 2, rows, 8192);
      std::vector<Write> writes = w.take_writes();
      const std::uint64_t bytes = combine_block(w.config).bytes(rows);
      const std::uint64_t most = std::min<std::uint64_t>((bytes + kShardBytes - 1) / kShardBytes,
                                                         static_cast<std::uint64_t>(endpoints));
      CHECK_EQ(writes.size(), static_cast<std::size_t>(most));
      std::uint64_t at = 0;
      std::set<int> used;
      std::uint32_t mask = 0;
      for (const Write& x : writes) {
        CHECK_EQ(x.source_offset, static_cast<std::size_t>(8192 + at));
        CHECK_EQ(x.target_offset, static_cast<std::size_t>(w.heap.slot_at(w.config, 1, Op::Combine, 0) + at));
        at += x.bytes;
        used.insert(x.endpoint);
        const Immediate i = unpack(x.immediate);
        CHECK_EQ(i.shards, static_cast<std::uint32_t>(writes.size()));
        mask |= 1u << i.shard;
      }
      CHECK_EQ(at, bytes);
      CHECK_EQ(used.size(), writes.size());
      CHECK_EQ(mask, full_mask(static_cast<std::uint32_t>(writes.size())));
      std::reverse(writes.begin(), writes.end());
      for (const Write& x : writes) {
        CHECK(!w.sent(1, Op::Combine, 2));
        w.fabric.finish(x);
        w.run();
      }
      CHECK(w.sent(1, Op::Combine, 2));
    }
}

// The arrival word rises when every shard is in, in each of their orders, and with each of them repeated.
void shards_in_any_order() {
  std::vector<std::uint32_t> order{0, 1, 2, 3};
  do {
    World w;
    w.mail(1, Op::Dispatch, 2, 1, 0);
    w.run();
    for (Op op : {Op::Dispatch, Op::Weights, Op::Combine}) {
      for (std::size_t i = 0; i < order.size(); ++i) {
        CHECK(!w.has(1, op, 2));
        for (int twice = 0; twice < 2; ++twice) w.fabric.arrive(w.immediate(op, 2, 1, order[i], 4));
        w.fabric.arrive(w.immediate(op, 2, 1, order[0], 4));
        w.run();
      }
      CHECK(w.has(1, op, 2));
    }
    CHECK(!w.has(1, Op::Dispatch, 3) && !w.has(1, Op::Dispatch, 4));
    CHECK(w.proxy.stats().duplicates >= 12);
  } while (std::next_permutation(order.begin(), order.end()));
}

// An immediate that belongs to no open step or no peer, or contradicts itself, changes nothing.
void stray_immediates() {
  World w;
  const std::vector<std::uint64_t> before(w.memory.get(), w.memory.get() + w.heap.bytes / 8);
  std::vector<std::uint32_t> stray{
      w.immediate(Op::Combine, 2, 1),             // answers a dispatch that was never sent
      w.immediate(Op::Weights, 2, 5),
      w.immediate(Op::Weights, 5, 1),
      w.immediate(Op::Dispatch, 2, 0),            // before the first step
      w.immediate(Op::Dispatch, 2, 5),            // two turns ahead of its set
      w.immediate(Op::Dispatch, 2, 31),
      w.immediate(Op::Dispatch, 1, 1),            // from a rank of this node, which never uses the network
      w.immediate(Op::Dispatch, 0, 1),            // from oneself
      w.immediate(Op::Dispatch, 5, 1),            // from a rank that does not exist
      w.immediate(Op::Dispatch, 1023, 1),
      pack({Op::Dispatch, 1, 2, 1, 0, 1}),        // names another AllToAll
      w.immediate(Op::Dispatch, 3, 1, 2, 2),      // the third of two shards
      0x60010100u, 0xe0020100u, 0xffffffffu,      // ops that do not exist
  };
  for (std::uint32_t bits : stray) w.fabric.arrive(bits);
  w.run();
  CHECK_EQ(w.proxy.stats().dropped, static_cast<std::uint64_t>(stray.size()));
  for (std::size_t i = 0; i < before.size(); ++i) CHECK_EQ(w.memory[i], before[i]);
  CHECK(w.failures.empty());

  // All of it again, between the shards of real blocks.
  for (std::uint32_t shard = 0; shard < 3; ++shard) {
    CHECK(!w.has(1, Op::Dispatch, 2));
    w.fabric.arrive(w.immediate(Op::Dispatch, 2, 1, shard, 3));
    for (std::uint32_t bits : stray) w.fabric.arrive(bits);
    w.fabric.arrive(w.immediate(Op::Dispatch, 2, 1, 3, 4));   // says four where three are in flight
    w.run();
  }
  CHECK(w.has(1, Op::Dispatch, 2));
}

// Weights follow their rank's own dispatch, whichever of them is here first, and whether or not this rank sends that one any.
void weights_of_a_source() {
  for (const bool first : {false, true})
    for (const bool asked : {false, true}) {
      World w;
      for (std::uint32_t step = 1; step < 40; ++step) {
        if (asked) w.mail(step, Op::Dispatch, 2, 1, 0);
        w.run();
        for (const Op op : {first ? Op::Weights : Op::Dispatch, first ? Op::Dispatch : Op::Weights}) {
          CHECK(!w.has(step, op, 2));
          for (std::uint32_t shard : {1u, 0u, 1u}) w.fabric.arrive(w.immediate(op, 2, step, shard, 2));
          w.fabric.arrive(w.immediate(Op::Weights, 2, step - 2));   // the last ones of the set
          w.fabric.arrive(w.immediate(Op::Weights, 2, step + 4));   // and some that come two turns too early
          w.run();
          CHECK(w.has(step, op, 2));
        }
        CHECK(!w.has(step, Op::Combine, 2));
      }
      CHECK(w.failures.empty());
    }
}

// Steps follow each other, over the wrap of step numbers too; an old step's immediate is not counted.
void many_steps() {
  for (std::uint32_t first : {1u, 0u - 300u}) {
    World w(2, first, 2);
    check::Random random(7);
    for (std::uint32_t i = 0; i < 700; ++i) {
      const std::uint32_t step = first + i;
      if (i > 2) {
        // Too old or too new, but by less than what five bits can tell apart.
        const auto off = static_cast<std::uint32_t>(random.integer(1, 14)) * 2;
        w.fabric.arrive(w.immediate(Op::Dispatch, 2, step - off));
        w.fabric.arrive(w.immediate(Op::Dispatch, 2, step + off));
        w.fabric.arrive(w.immediate(Op::Combine, 2, step - off));
      }
      // The peer may dispatch before this rank has.
      const bool peer_first = random.chance(0.5);
      if (peer_first) w.fabric.arrive(w.immediate(Op::Dispatch, 2, step));
      w.run();
      CHECK_EQ(w.has(step, Op::Dispatch, 2), peer_first);
      for (std::uint32_t peer = 2; peer < 5; ++peer) w.mail(step, Op::Dispatch, peer, 1, 0);
      if (!peer_first) w.fabric.arrive(w.immediate(Op::Dispatch, 2, step));
      for (const Write& x : w.take_writes()) w.fabric.finish(x);
      w.run();
      CHECK(w.has(step, Op::Dispatch, 2));
      CHECK(!w.has(step, Op::Combine, 2));
      for (std::uint32_t peer = 2; peer < 5; ++peer) {
        CHECK(w.sent(step, Op::Dispatch, peer));
        CHECK(w.proxy.waiting());
        w.fabric.arrive(w.immediate(Op::Combine, peer, step));
        if (peer != 2) w.fabric.arrive(w.immediate(Op::Dispatch, peer, step));
        w.run();
        CHECK(w.has(step, Op::Combine, peer));
      }
      CHECK(!w.proxy.waiting());
    }
    CHECK_EQ(w.proxy.stats().dropped + w.proxy.stats().duplicates, 3u * 697u);
  }
}

// A peer whose queue is full delays no other peer; refused writes go out later, once, and whole.
void busy_peer() {
  World w;
  w.fabric.busy = {2, 4};
  for (std::uint32_t peer = 2; peer < 5; ++peer) w.mail(1, Op::Dispatch, peer, 20, 64 * peer);
  for (int i = 0; i < 10; ++i) w.proxy.step();
  CHECK(!w.fabric.writes.empty());
  for (const Write& x : w.fabric.writes) CHECK_EQ(x.peer, 3);
  CHECK(w.fabric.refused >= 2);
  CHECK_EQ(w.proxy.stats().again, static_cast<std::uint64_t>(w.fabric.refused));
  w.fabric.busy = {4};
  w.fabric.writes.clear();
  w.mail(1, Op::Combine, 3, 20, 0);   // a later block of a peer that is free overtakes
  for (const Write& x : w.take_writes()) CHECK(x.peer != 4);
  w.fabric.busy = {};
  std::map<int, std::uint64_t> bytes;
  for (const Write& x : w.take_writes()) bytes[x.peer] += x.bytes;
  CHECK_EQ(bytes.size(), std::size_t{1});
  CHECK_EQ(bytes[4], dispatch_block(w.config).bytes(20));
}

// Writes that go out together share doorbells: the last attempt on each endpoint announces no more, even if an earlier one was
// refused.
void shared_doorbells() {
  check::Random random(11);
  for (int round = 0; round < 300; ++round) {
    const int endpoints = static_cast<int>(random.integer(1, 5));
    World w(endpoints);
    std::uint64_t bytes = 0;
    for (std::uint32_t peer = 2; peer < 5; ++peer) {
      if (random.chance(0.3)) w.fabric.busy.insert(static_cast<int>(peer));
      else if (random.chance(0.2)) w.fabric.broken.insert(static_cast<int>(peer));
      w.mail(1, Op::Dispatch, peer, static_cast<std::uint32_t>(random.integer(0, 20)), 0);
    }
    for (int turn = 0; turn < 3; ++turn) {   // the second turn retries, the third finds no peer busy
      if (turn == 2) w.fabric.busy = {};
      w.fabric.attempts.clear();
      w.proxy.step();
      std::map<int, std::vector<bool>> more;
      for (const Write& x : w.fabric.attempts) more[x.endpoint].push_back(x.more);
      for (const auto& [endpoint, hints] : more) {
        CHECK(!hints.back());
      }
    }
    std::uint64_t by_endpoint = 0;
    for (const Write& x : w.fabric.writes) bytes += x.bytes;
    for (int endpoint = 0; endpoint < kMaxEndpoints; ++endpoint) {
      std::uint64_t expected = 0;
      for (const Write& x : w.fabric.writes) expected += x.endpoint == endpoint ? x.bytes : 0;
      CHECK_EQ(w.proxy.stats().endpoint_bytes[endpoint], expected);
      by_endpoint += expected;
    }
    CHECK_EQ(by_endpoint, bytes);
    CHECK_EQ(w.proxy.stats().bytes, bytes);
  }
}

// Eight blocks of one write each, on one endpoint: one doorbell. Past eight there is another, for the first must not wait for all.
void one_doorbell() {
  World w(1, 1, 2);
  w.proxy.detach(0);
  Config c = w.config;
  c.world = 12;
  c.num_experts = 24;
  c.remote_peers = 10;
  w.attach(c);
  for (std::uint32_t peer = 2; peer < 12; ++peer) w.mail(1, Op::Dispatch, peer, 0, 64);
  w.proxy.step();
  std::vector<bool> more;
  for (const Write& x : w.fabric.writes) more.push_back(x.more);
  CHECK(more == (std::vector<bool>{true, true, true, true, true, true, true, false, true, false}));
}

// The peers after this rank come first, so that a step's writes do not all begin at rank 0; and a peer far back in a large world is
// found.
void order_of_peers() {
  for (const std::uint32_t rank : {0u, 3u, 8u, 20u}) {
    World w(1, 1, 2);
    w.proxy.detach(0);
    Config c = w.config;
    c.world = 21;
    c.num_experts = 42;
    c.rank = rank;
    c.remote_peers = 20;
    w.attach(c);
    for (std::uint32_t peer = 0; peer < c.world; ++peer) w.mail(2, Op::Dispatch, peer, 0, 64);   // one's own word is not a write
    const std::vector<Write> writes = w.take_writes();
    std::vector<std::uint32_t> order;
    for (std::uint32_t i = 1; i < c.world; ++i)
      if (const std::uint32_t peer = (rank + i) % c.world; peer > 1 && peer != rank) order.push_back(peer);
    CHECK_EQ(writes.size(), order.size());
    for (std::size_t i = 0; i < order.size(); ++i) CHECK_EQ(writes[i].peer, static_cast<int>(order[i]));
  }
}

// Sets and operations do not mix.
void steps_in_flight() {
  World w;
  for (std::uint32_t step : {1u, 2u}) w.mail(step, Op::Dispatch, 2, 1, step * 4096);
  std::vector<Write> writes = w.take_writes();
  CHECK_EQ(writes.size(), std::size_t{2});
  std::sort(writes.begin(), writes.end(), [](const Write& a, const Write& b) { return a.source_offset < b.source_offset; });
  for (std::uint32_t i : {0u, 1u})
    CHECK_EQ(writes[i].target_offset, static_cast<std::size_t>(w.heap.slot_at(w.config, set_of(w.config, i + 1), Op::Dispatch, 0)));
  w.fabric.finish(writes[1]);
  w.fabric.arrive(w.immediate(Op::Combine, 2, 2));
  w.run();
  CHECK(w.sent(2, Op::Dispatch, 2) && !w.sent(1, Op::Dispatch, 2));
  CHECK(w.has(2, Op::Combine, 2) && !w.has(1, Op::Combine, 2));
  w.fabric.arrive(w.immediate(Op::Combine, 2, 1));
  w.run();
  CHECK(w.has(1, Op::Combine, 2));
}

// A failed write names the peer, what it carried and the NIC; so does one that cannot even be posted.
void failures() {
  World w;
  w.mail(1, Op::Dispatch, 2, 1, 0);
  w.mail(1, Op::Dispatch, 3, 1, 0);
  for (const Write& x : w.take_writes()) w.fabric.finish(x, x.peer == 3 ? 113 : 0);
  w.run();
  CHECK_EQ(w.failures.size(), std::size_t{1});
  CHECK_EQ(w.failures[0].peer, 3u);
  CHECK(w.failures[0].op == Op::Dispatch);
  CHECK_EQ(w.failures[0].step, 1u);
  CHECK(w.failures[0].message.find("113") != std::string::npos && w.failures[0].message.find("nic") != std::string::npos);
  CHECK(!w.sent(1, Op::Dispatch, 3));
  CHECK(w.sent(1, Op::Dispatch, 2));
  CHECK_EQ(w.proxy.outstanding(0), 0u);

  w.fabric.broken = {4};
  w.mail(1, Op::Combine, 4, 1, 0);
  CHECK(w.take_writes().empty());
  CHECK_EQ(w.failures.size(), std::size_t{2});
  CHECK_EQ(w.failures[1].peer, 4u);
  CHECK(w.failures[1].op == Op::Combine);

  Completion lost;
  lost.kind = Completion::Kind::Failed;
  lost.has_context = false;
  w.fabric.completions.push_back(lost);
  w.run();
  CHECK_EQ(w.failures.size(), std::size_t{3});
  CHECK_EQ(w.failures[2].peer, kNoRank);
}

// Completions of an AllToAll that is gone say nothing to the one that took its number.
void another_life() {
  World w;
  w.mail(1, Op::Dispatch, 2, 1, 0);
  w.fabric.busy = {3};
  w.mail(1, Op::Dispatch, 3, 1, 0);
  const std::vector<Write> old = [&] {
    for (int i = 0; i < 5; ++i) w.proxy.step();
    return std::exchange(w.fabric.writes, {});
  }();
  CHECK_EQ(old.size(), std::size_t{1});
  const std::unique_ptr<std::uint64_t[]> kept = std::move(w.memory);   // writes may still read it
  w.proxy.detach(0);
  CHECK(!w.proxy.waiting());
  CHECK_EQ(w.proxy.outstanding(0), 0u);
  w.proxy.detach(0);   // nothing there: nothing happens
  w.fabric.busy = {};
  CHECK(w.take_writes().empty());   // the waiting writes went with it

  w.generation = 2;
  w.attach(w.config);
  w.mail(1, Op::Dispatch, 2, 1, 0);
  const std::vector<Write> writes = w.take_writes();
  CHECK_EQ(writes.size(), std::size_t{1});
  w.fabric.finish(old[0]);
  w.fabric.finish(old[0], 5);
  w.run();
  CHECK(!w.sent(1, Op::Dispatch, 2));
  CHECK(w.failures.empty());
  CHECK_EQ(w.proxy.outstanding(0), 1u);
  w.fabric.finish(writes[0]);
  w.run();
  CHECK(w.sent(1, Op::Dispatch, 2));
}

// close() asks what is outstanding right after the last block was announced: it must not be lost.
void announced_and_not_taken() {
  World w;
  w.mail(1, Op::Combine, 2, 1, 0);
  CHECK_EQ(w.proxy.outstanding(0), 1u);
  const std::vector<Write> writes = w.take_writes();
  CHECK_EQ(writes.size(), std::size_t{1});
  CHECK_EQ(w.proxy.outstanding(0), 1u);
  w.fabric.finish(writes[0]);
  w.run();
  CHECK_EQ(w.proxy.outstanding(0), 0u);
}

// Detached in the middle of a step, attached again: waiting() neither sticks nor goes below zero.
void waiting_is_balanced() {
  World w;
  for (int round = 0; round < 5; ++round) {
    for (std::uint32_t peer = 2; peer < 5; ++peer) w.mail(1, Op::Dispatch, peer, 1, 0);
    for (const Write& x : w.take_writes()) w.fabric.finish(x);
    w.fabric.arrive(w.immediate(Op::Combine, 3, 1));
    w.run();
    CHECK(w.proxy.waiting());
    w.proxy.detach(0);
    CHECK(!w.proxy.waiting());
    w.attach(w.config);
    CHECK(!w.proxy.waiting());
  }
}

// One that its owner forgot, with a step open, gives way to the next of its number, and leaves nothing to wait for.
// A thread that was told to stop tells of nothing that its provider still brings: the memory may be another generation's.
void told_to_stop_in_the_provider() {
  for (const bool posts : {false, true}) {
    World w;
    w.fabric.arrive(w.immediate(Op::Dispatch, 2, 1));
    if (posts) {
      w.mail(1, Op::Dispatch, 2, 1, 0);
      w.mail(1, Op::Dispatch, 3, 1, 0);
    }
    w.stopped = true;
    bool left = false;
    try {
      w.run();
    } catch (const LeftBehind&) {
      left = true;
    }
    CHECK(left && !w.has(1, Op::Dispatch, 2));
    CHECK_EQ(w.fabric.writes.size(), posts ? 1u : 0u);
  }
}

void attached_over() {
  World w;
  w.mail(1, Op::Dispatch, 2, 1, 0);
  for (const Write& x : w.take_writes()) w.fabric.finish(x);
  w.run();
  CHECK(w.proxy.waiting());
  w.attach(w.config);
  CHECK(!w.proxy.waiting());
  w.proxy.detach(0);
  CHECK(w.proxy.unused() && !w.proxy.waiting());
}

// Blocks of one shard: a source spreads its peers over its endpoints, and a peer's sources reach it through all of its own.
void small_blocks_use_every_endpoint() {
  for (int endpoints : {2, 3}) {
    std::set<int> into_one_peer;
    for (std::uint32_t source = 0; source < static_cast<std::uint32_t>(endpoints); ++source) {
      World w(endpoints);
      w.proxy.detach(0);
      Config c = w.config;
      c.rank = source;
      w.attach(c);
      std::set<int> out_of_one_source;
      for (std::uint32_t peer : {3u, 4u}) {
        w.mail(1, Op::Dispatch, peer, 0, 0);
        const std::vector<Write> writes = w.take_writes();
        CHECK_EQ(writes.size(), std::size_t{1});
        out_of_one_source.insert(writes[0].endpoint);
        if (peer == 3) into_one_peer.insert(writes[0].endpoint);
      }
      CHECK_EQ(out_of_one_source.size(), std::size_t{2});
    }
    CHECK_EQ(into_one_peer.size(), static_cast<std::size_t>(endpoints));
  }
}

// EP64 on nodes of eight: of a rank's seven rails each of two NICs has three or four.
void rails_use_every_endpoint() {
  for (std::uint32_t rank : {0u, 13u, 63u}) {
    World w(2);
    w.proxy.detach(0);
    Config c = w.config;
    c.world = 64;
    c.rank = rank;
    w.attach(c);
    std::uint32_t first = 0;
    for (std::uint32_t peer = rank % 8; peer < c.world; peer += 8) {
      if (peer == rank) continue;
      w.mail(1, Op::Dispatch, peer, 0, 0);
      first += w.take_writes().at(0).endpoint == 0;
    }
    CHECK(first == 3 || first == 4);
  }
}

// On GPUs this rank's slots have another number at each peer, and lie where there are none for mapped peers; with relays they lie
// in other memory.
void slots_for_remote_peers() {
  World w(1);
  Config c = w.config;
  for (std::uint32_t index = 0; index < c.in_flight * kOps * c.world; ++index) w.targets.push_back(64 * index * index);
  w.attach(c);
  for (const Op op : {Op::Dispatch, Op::Combine})
    for (std::uint32_t peer = 2; peer < 5; ++peer) {
      w.mail(1, op, peer, 1, 0);
      const std::vector<Write> writes = w.take_writes();
      CHECK_EQ(writes.size(), std::size_t{1});
      CHECK_EQ(writes[0].target_offset, static_cast<std::size_t>(w.targets[w.heap.word_index(c, 1, op, peer)]));
    }
}

// Eight AllToAlls share one proxy.
void many_objects() {
  World w;
  std::vector<std::unique_ptr<std::uint64_t[]>> memories;
  for (std::uint32_t n = 1; n < kMaxObjects; ++n) {
    memories.push_back(std::move(w.memory));
    Config c = w.config;
    c.object = n;
    w.attach(c);
  }
  w.mail(1, Op::Dispatch, 2, 1, 0);   // the last one's
  const std::vector<Write> writes = w.take_writes();
  CHECK_EQ(writes.size(), std::size_t{1});
  CHECK_EQ(unpack(writes[0].immediate).object, kMaxObjects - 1);
  w.fabric.arrive(pack({Op::Dispatch, 3, 2, 1, 0, 1}));
  w.run();
  CHECK(!w.has(1, Op::Dispatch, 2));
  const std::uint64_t at = w.heap.arrival_at(w.config, 1, Signal::Dispatch, 2);
  for (std::size_t n = 0; n < memories.size(); ++n) CHECK_EQ(memories[n][at / 8] != 0, n == 3);
}

// Two proxies, or several NICs, of a rank: both ranks of a pair name the same one, and each has its share of the peers, one more or
// less at most; so has each of two where every `apart`th rank is a network peer. Of four NICs none has more than three of seven.
void splits_peers() {
  const auto most_and_least = [](std::uint32_t rank, std::uint32_t world, std::uint32_t apart, std::uint32_t count) {
    std::vector<std::uint32_t> peers(count);
    for (std::uint32_t peer = rank % apart; peer < world; peer += apart) {
      CHECK_EQ(proxy_of(rank, peer, count), dealt(peer, rank, count));
      if (peer != rank) ++peers.at(dealt(rank, peer, count));
    }
    return std::pair(*std::max_element(peers.begin(), peers.end()), *std::min_element(peers.begin(), peers.end()));
  };
  for (const std::uint32_t world : {2u, 3u, 8u, 9u, 64u, 512u})
    for (std::uint32_t rank = 0; rank < world; ++rank) {
      CHECK_EQ(dealt(rank, (rank + 1) % world, 1), 0u);
      const auto [most, least] = most_and_least(rank, world, 1, 2);
      CHECK(most - least <= 2 && (world % 8 != 0 || most - least == 1));
      if (world < 64) continue;
      for (const std::uint32_t node : {2u, 4u, 8u, 16u}) {
        const auto [many, few] = most_and_least(rank, world, node, 2);
        CHECK_EQ(many - few, 1u);
        CHECK(most_and_least(rank, world, node, 4).first <= (world / node + 4) / 4);
      }
    }
}

}  // namespace

int main() {
  one_write();
  shards_of_a_block();
  small_blocks_use_every_endpoint();
  rails_use_every_endpoint();
  slots_for_remote_peers();
  shards_in_any_order();
  stray_immediates();
  weights_of_a_source();
  many_steps();
  busy_peer();
  shared_doorbells();
  one_doorbell();
  order_of_peers();
  steps_in_flight();
  failures();
  another_life();
  announced_and_not_taken();
  waiting_is_balanced();
  told_to_stop_in_the_provider();
  attached_over();
  many_objects();
  splits_peers();
}
