// The proxy alone, with blocks in parts and in pieces: what it posts of them, and what it counts.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "check.h"
#include "scripted_world.h"

using namespace pplx;
using namespace pplx::test;

namespace {

// ---- blocks in pieces ----------------------------------------------------------------------------------------------------

// Slots of eight rows: blocks of up to eight are whole, others go in pieces of four.
struct PieceWorld : World {
  explicit PieceWorld(int endpoints = 4) : World(endpoints) {
    proxy.detach(0);
    Config c = config;
    c.whole_tokens = 8;
    c.slot_bytes = least_slot_bytes(c);
    attach(c);
    CHECK(heap.in_pieces && heap.piece_rows == 4);
  }
  void mail_pieces(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows, std::uint64_t at) {
    const std::uint64_t index = heap.word_index(config, set_of(config, step), op, peer);
    word(heap.outgoing + 8 * index) = at;
    word(heap.mailbox + 8 * index) = mail_word({step, rows, true});
  }
  void give_credit(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t pieces) {
    word(heap.mailbox + 8 * heap.credit_index(config, set_of(config, step), op, peer)) = pieces_word(generation, step, pieces);
  }
  std::uint32_t count(std::uint64_t words, std::uint32_t step, Op op, std::uint32_t peer) {
    return pieces_in(word(heap.count_at(config, words, set_of(config, step), op, peer)), generation, step);
  }
  std::uint32_t piece(Op op, std::uint32_t source, std::uint32_t step, std::uint32_t piece, std::uint32_t shard = 0,
                      std::uint32_t shards = 1) {
    return pack({op, config.object, source, step, shard, shards, piece});
  }
  std::uint32_t credit(Op op, std::uint32_t source, std::uint32_t step, std::uint32_t number) {
    return piece(Op::Credit, source, step, number, static_cast<std::uint32_t>(op));
  }
};

// A mail word counts rows over the whole step: each piece goes once, to its place, and the last one has what is left.
void pieces_of_a_block() {
  for (const Op op : {Op::Dispatch, Op::Combine}) {
    PieceWorld w(1);
    const BlockLayout block = block_layout(w.config, op);
    const auto check = [&](const Write& x, std::uint32_t piece, std::uint32_t rows) {
      const std::uint64_t place = w.heap.piece_at(op, piece);
      CHECK_EQ(x.source_offset, static_cast<std::size_t>(4096 + place));
      CHECK_EQ(x.target_offset, static_cast<std::size_t>(w.heap.slot_at(w.config, 1, op, 0) + place));
      CHECK_EQ(x.bytes, static_cast<std::size_t>(block.bytes(rows)));
      CHECK_EQ(x.immediate, w.piece(op, 0, 1, piece));
    };
    w.mail_pieces(1, op, 3, 8, 4096);   // two pieces in one word
    std::vector<Write> writes = w.take_writes();
    CHECK_EQ(writes.size(), std::size_t{2});
    check(writes[0], 0, 4);
    check(writes[1], 1, 4);
    w.fabric.finish(writes[1]);   // in any order; what has left is counted from the first on
    w.run();
    CHECK_EQ(w.count(w.heap.left, 1, op, 3), 0u);
    w.fabric.finish(writes[0]);
    w.run();
    CHECK_EQ(w.count(w.heap.left, 1, op, 3), 2u);
    for (std::uint32_t piece = 2; piece < 20; ++piece) {   // the three bits of its number wrap
      w.mail_pieces(1, op, 3, 4 * piece + 4, 4096);
      writes = w.take_writes();
      CHECK_EQ(writes.size(), std::size_t{1});
      check(writes[0], piece, 4);
      CHECK_EQ(w.count(w.heap.left, 1, op, 3), piece);
      w.fabric.finish(writes[0]);
      w.run();
      CHECK_EQ(w.count(w.heap.left, 1, op, 3), piece + 1);
    }
    w.mail_pieces(1, op, 3, 81, 4096);
    writes = w.take_writes();
    CHECK_EQ(writes.size(), std::size_t{1});
    check(writes[0], 20, 1);
    w.fabric.finish(writes[0]);
    w.run();
    CHECK(w.sent(1, op, 3));
    // The next one of the set is whole, and its rows lie behind each other.
    w.mail(3, op, 3, 8, 4096);
    writes = w.take_writes();
    CHECK_EQ(writes.size(), std::size_t{1});
    CHECK_EQ(writes[0].bytes, static_cast<std::size_t>(block.bytes(8)));
    CHECK_EQ(writes[0].immediate, w.piece(op, 0, 3, 0));
    w.fabric.finish(writes[0]);
    w.run();
    CHECK_EQ(w.count(w.heap.left, 3, op, 3), 1u);
  }
}

// The arrival word rises with piece 0; leading pieces are counted, whatever the order in which their shards come.
void pieces_that_arrive() {
  check::Random random(5);
  for (int round = 0; round < 200; ++round) {
    PieceWorld w;
    w.mail(1, Op::Dispatch, 2, 1, 0);
    for (const Write& x : w.take_writes()) w.fabric.finish(x);
    w.run();
    for (const Op op : {Op::Dispatch, Op::Combine}) {
      CHECK(w.proxy.waiting());
      std::vector<std::uint32_t> come(20, 0);
      std::uint32_t done = 0;
      while (done < 18) {
        // At most two pieces are in flight. Older ones are repeated.
        const std::uint32_t back = random.chance(0.3) ? static_cast<std::uint32_t>(random.integer(1, 5)) : 0;
        const std::uint32_t piece =
            back > 0 ? done - std::min(done, back) : done + static_cast<std::uint32_t>(random.integer(0, 1));
        const auto shard = static_cast<std::uint32_t>(random.integer(0, 2));
        w.fabric.arrive(w.piece(op, 2, 1, piece, shard, 3));
        w.run();
        if (piece >= done) come[piece] |= 1u << shard;
        while (come[done] == 7u) ++done;
        CHECK_EQ(w.count(w.heap.pieces, 1, op, 2), done);
        CHECK_EQ(w.has(1, op, 2), done > 0);
      }
    }
    CHECK(!w.proxy.waiting());   // however many pieces the answer has
  }
}

// Credits travel without data, one for each piece, and those that come count once, in any order, for the step that is open.
void credits() {
  PieceWorld w(1);
  w.fabric.busy = {2};
  w.give_credit(1, Op::Dispatch, 2, 1);
  CHECK_EQ(w.proxy.outstanding(0), 1u);
  for (int i = 0; i < 3; ++i) w.proxy.step();
  w.give_credit(1, Op::Dispatch, 2, 2);
  for (int i = 0; i < 3; ++i) w.proxy.step();
  w.fabric.busy = {};
  std::vector<Write> writes = w.take_writes();
  CHECK_EQ(writes.size(), std::size_t{2});
  CHECK_EQ(writes[0].bytes, std::size_t{0});
  CHECK_EQ(writes[0].immediate, w.credit(Op::Dispatch, 0, 1, 0));
  CHECK_EQ(writes[1].immediate, w.credit(Op::Dispatch, 0, 1, 1));
  w.give_credit(1, Op::Dispatch, 2, 3);   // while those are in flight
  writes = w.take_writes();
  CHECK_EQ(writes.size(), std::size_t{1});
  CHECK_EQ(writes[0].immediate, w.credit(Op::Dispatch, 0, 1, 2));
  CHECK_EQ(w.proxy.outstanding(0), 3u);
  w.fabric.finish(writes[0], 113);
  w.run();
  CHECK_EQ(w.failures.size(), std::size_t{1});
  CHECK(w.failures[0].peer == 2 && w.failures[0].op == Op::Dispatch && w.failures[0].step == 1);

  const auto consumed = [&](Op op) { return w.count(w.heap.consumed, 1, op, 3); };
  w.fabric.arrive(w.credit(Op::Dispatch, 3, 1, 0));   // its pieces were never sent
  w.run();
  CHECK_EQ(consumed(Op::Dispatch), 0u);
  w.mail_pieces(1, Op::Dispatch, 3, 8, 0);
  w.run();
  w.fabric.arrive(w.credit(Op::Dispatch, 3, 3, 0));   // another step of the set
  w.fabric.arrive(w.credit(Op::Combine, 3, 1, 0));    // another op
  w.fabric.arrive(w.credit(Op::Dispatch, 4, 1, 0));   // another peer
  w.fabric.arrive(w.credit(Op::Dispatch, 3, 1, 2));   // its piece has not been sent
  w.run();
  CHECK_EQ(consumed(Op::Dispatch), 0u);
  // A credit, and what then is consumed
  const std::pair<std::uint32_t, std::uint32_t> come[] = {{1, 0}, {1, 0}, {0, 2}, {0, 2}, {1, 2}};
  for (const auto& [number, expected] : come) {
    w.fabric.arrive(w.credit(Op::Dispatch, 3, 1, number));
    w.run();
    CHECK_EQ(consumed(Op::Dispatch), expected);
  }
  w.mail_pieces(1, Op::Dispatch, 3, 16, 0);
  w.run();
  for (const std::uint32_t number : {2u, 0u, 1u, 2u, 3u}) w.fabric.arrive(w.credit(Op::Dispatch, 3, 1, number));
  w.run();
  CHECK_EQ(consumed(Op::Dispatch), 4u);
  CHECK_EQ(consumed(Op::Combine), 0u);
}

// ---- blocks in parts -----------------------------------------------------------------------------------------------------

// A world with blocks of at most 64 rows, in parts of at least two rows.
struct PartWorld : World {
  explicit PartWorld(int endpoints = 1) : World(endpoints) {
    proxy.detach(0);
    Config c = config;
    c.part_bytes = 2 * dispatch_block(c).row_bytes;
    attach(c);
    CHECK(heap.in_parts && !heap.in_pieces);
  }
  void mail_parts(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows, std::uint32_t parts, std::uint64_t at) {
    const std::uint64_t index = heap.word_index(config, set_of(config, step), op, peer);
    word(heap.outgoing + 8 * index) = at;
    word(heap.mailbox + 8 * index) = mail_word({step, rows, false, parts});
  }
  std::uint32_t count(std::uint32_t step, Op op, std::uint32_t peer) {
    return pieces_in(word(heap.count_at(config, heap.pieces, set_of(config, step), op, peer)), generation, step);
  }
};

// Parts follow each other, hold all rows, are eight at most, and not smaller than they may be.
void sizes_of_parts() {
  for (const std::uint32_t tokens : {1u, 7u, 64u, 100u, 4096u, 1u << 20})
    for (const std::uint32_t hidden : {16u, 7168u})
      for (const std::uint32_t bytes : {1u, 3000u, 65536u, 1u << 30}) {
        Config c;
        c.world = 4;
        c.num_experts = 8;
        c.hidden = hidden;
        c.max_tokens = tokens;
        c.part_bytes = bytes;
        for (const Op op : {Op::Dispatch, Op::Combine}) {
          const PartSizes sizes = part_sizes(c, op);
          CHECK_EQ(sizes.begin(0), 0u);
          CHECK(sizes.begin(kMostParts) >= tokens);
          CHECK_EQ(sizes.count(0), 1u);
          CHECK(sizes.count(tokens) <= kMostParts);
          std::uint32_t part = 0;
          for (std::uint32_t row = 0; row < tokens; row += tokens > 5000 ? 997 : 1) {
            while (sizes.begin(part + 1) <= row) ++part;
            CHECK_EQ(sizes.part_of(row), part);
            CHECK_EQ(sizes.count(row + 1), part + 1);
          }
          const std::uint64_t least = std::uint64_t{sizes.begin(1)} * block_layout(c, op).row_bytes;
          CHECK(sizes.begin(1) == 1 || least <= bytes);
          CHECK(sizes.begin(1) >= tokens || 2 * least > bytes);
        }
      }
}

// Each part goes once, when the mail has reached it; together they are the block. Its memory is free when all of it has left, and
// not when all that has been announced has.
void parts_of_a_block() {
  check::Random random(6);
  for (int round = 0; round < 300; ++round) {
    PartWorld w(static_cast<int>(random.integer(1, 3)));
    const Op op = random.chance(0.5) ? Op::Dispatch : Op::Combine;
    const auto rows = static_cast<std::uint32_t>(random.integer(0, 64));
    const PartSizes sizes = part_sizes(w.config, op);
    const BlockLayout block = block_layout(w.config, op);
    const std::uint32_t parts = sizes.count(rows);
    std::uint64_t at = 0;
    std::vector<Write> under_way;
    for (std::uint32_t told = 0, seen = 0; seen < parts;) {
      told = std::min(parts, told + static_cast<std::uint32_t>(random.integer(1, 3)));
      w.mail_parts(1, op, 3, rows, told, 4096);
      for (const Write& x : w.take_writes()) {
        const Immediate i = unpack(x.immediate);
        CHECK_EQ(x.source_offset, static_cast<std::size_t>(4096 + at));
        CHECK_EQ(x.target_offset, static_cast<std::size_t>(w.heap.slot_at(w.config, 1, op, 0) + at));
        CHECK(i.op == op && i.piece == seen);
        at += x.bytes;
        under_way.push_back(x);
        if (i.shard + 1 != i.shards) continue;
        ++seen;
        CHECK_EQ(at, block.bytes(std::min(rows, sizes.begin(seen))));
      }
      CHECK_EQ(seen, told);
      while (!under_way.empty() && (seen == parts || random.chance(0.7))) {
        const auto which = static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(under_way.size()) - 1));
        CHECK(!w.sent(1, op, 3));
        w.fabric.finish(under_way[which]);
        under_way.erase(under_way.begin() + static_cast<std::ptrdiff_t>(which));
        w.run();
      }
    }
    CHECK_EQ(at, block.bytes(rows));
    CHECK(w.sent(1, op, 3));
    w.mail_parts(3, op, 3, 1, 1, 4096);   // the set's next block
    CHECK_EQ(w.take_writes().size(), std::size_t{1});
    CHECK(!w.sent(3, op, 3));
    w.mail(1, Op::Weights, 3, 64, 8192);   // weights blocks are always whole
    for (const Write& x : w.take_writes()) CHECK_EQ(unpack(x.immediate).piece, 0u);
  }
}

// Parts and pieces for one peer, each too small for shards, take the endpoints in turn, and share no doorbell then.
void one_peer_uses_every_endpoint() {
  for (const int endpoints : {2, 3}) {
    PartWorld parts(endpoints);
    parts.mail_parts(1, Op::Dispatch, 3, 4, 2, 0);
    PieceWorld pieces(endpoints);
    pieces.mail_pieces(1, Op::Dispatch, 3, 8, 0);
    for (World* w : std::initializer_list<World*>{&parts, &pieces}) {
      const std::vector<Write> writes = w->take_writes();
      CHECK_EQ(writes.size(), std::size_t{2});
      CHECK_EQ(writes[1].endpoint, (writes[0].endpoint + 1) % endpoints);
      CHECK(!writes[0].more && !writes[1].more);
    }
  }
}

// The arrival word rises with part 0; those that stand complete from the first on are counted, in whatever order they come, and
// repeated.
void parts_that_arrive() {
  check::Random random(7);
  for (int round = 0; round < 200; ++round) {
    PartWorld w;
    w.mail_parts(1, Op::Dispatch, 2, 1, 1, 0);
    for (const Write& x : w.take_writes()) w.fabric.finish(x);
    w.run();
    for (const Op op : {Op::Dispatch, Op::Combine}) {
      CHECK(w.proxy.waiting());
      std::vector<std::uint32_t> come(kMostParts + 1, 0);
      std::uint32_t done = 0;
      while (done < kMostParts) {
        const auto part = static_cast<std::uint32_t>(random.integer(0, kMostParts - 1)),
            shard = static_cast<std::uint32_t>(random.integer(0, 1));
        w.fabric.arrive(pack({op, w.config.object, 2, 1, shard, 2, part}));
        w.run();
        come[part] |= 1u << shard;
        while (come[done] == 3u) ++done;
        CHECK_EQ(w.count(1, op, 2), done);
        CHECK_EQ(w.has(1, op, 2), done > 0);
      }
    }
    CHECK(!w.proxy.waiting());
  }
}

}  // namespace

int main() {
  sizes_of_parts();
  parts_of_a_block();
  one_peer_uses_every_endpoint();
  parts_that_arrive();
  pieces_of_a_block();
  pieces_that_arrive();
  credits();
}
