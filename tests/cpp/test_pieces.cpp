// Blocks in pieces between two ranks that map each other's memory, a poll at a time: when each rank may write, what is refused,
// what a wait says, and what a reset leaves. proxy/sim runs whole steps.
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../../src/cpu/exchange.h"
#include "check.h"

using namespace pplx;
using namespace pplx::cpu;

namespace {

constexpr std::uint32_t kTokens = 20, kPieces = 10;

struct Rank {
  std::unique_ptr<std::uint64_t[]> heap;
  std::unique_ptr<Exchange> exchange;
  std::vector<float> x, out, y;
  std::vector<float> out_weights;
  std::vector<std::int32_t> counts, offsets, src_rank, src_token;
  std::shared_ptr<Received> received;
  Tokens in;
  char* memory() const { return reinterpret_cast<char*>(heap.get()); }
};

struct Pair {
  Pair() : ranks(2) {
    Config c;
    c.world = 2;
    c.num_experts = c.top_k = 2;
    c.hidden = 4;
    c.max_tokens = kTokens;
    c.in_flight = 2;
    c.dtype = Dtype::Float32;
    c.max_rows = 2 * c.max_tokens * c.top_k;
    c.whole_tokens = 4;
    c.slot_bytes = least_slot_bytes(c);
    for (Rank& r : ranks) r.heap = std::make_unique<std::uint64_t[]>(heap_of(c).bytes / 8 + 8);
    for (c.rank = 0; c.rank < 2; ++c.rank) {
      Rank& r = ranks[c.rank];
      r.exchange = std::make_unique<Exchange>(c, Memory{r.memory(), {ranks[0].memory(), ranks[1].memory()}}, 1, 10.0,
                                              [this] { return now; });
      for (std::uint32_t i = 0; i < kTokens * c.hidden; ++i) r.x.push_back(static_cast<float>(1000 * c.rank + i));
      r.in.x = {reinterpret_cast<const char*>(r.x.data()), c.hidden * 4};
      route(c.rank, kTokens);
      r.out.resize(c.max_rows * c.hidden);
      r.y.resize(kTokens * c.hidden);
      r.out_weights.resize(c.max_rows);
      r.counts.resize(1);
      r.offsets.resize(2);
      r.src_rank.resize(c.max_rows);
      r.src_token.resize(c.max_rows);
    }
    CHECK(heap().in_pieces && heap().piece_rows == 2);
    CHECK_EQ(shape_of(heap(), kTokens).pieces, kPieces);
  }

  // Every token to both ranks.
  void route(std::uint32_t rank, std::uint32_t tokens) {
    std::vector<std::int32_t> ids;
    for (std::uint32_t t = 0; t < tokens; ++t) ids.insert(ids.end(), {0, 1});
    ranks[rank].in.plan = std::make_shared<const Plan>(make_plan(ranks[rank].exchange->config(), ids.data(), tokens));
  }
  std::uint32_t send(std::uint32_t rank) { return ranks[rank].exchange->dispatch_send(ranks[rank].in, {}); }
  std::unique_ptr<PhaseRun> receive(std::uint32_t rank, std::uint32_t step) {
    Rank& r = ranks[rank];
    DispatchOutput o;
    o.x = reinterpret_cast<char*>(r.out.data());
    o.counts = r.counts.data();
    o.offsets = r.offsets.data();
    o.weights = r.out_weights.data();
    o.src_rank = r.src_rank.data();
    o.src_token = r.src_token.data();
    r.received = std::make_shared<Received>();
    return r.exchange->start_dispatch_recv(step, o, r.received);
  }
  void send_back(std::uint32_t rank, std::uint32_t step) {
    Rank& r = ranks[rank];
    r.exchange->finish_dispatch_recv(step, r.received);
    ExpertOutputs outputs;
    outputs.received = r.received;
    outputs.expert_out = {reinterpret_cast<const char*>(r.out.data()), r.exchange->config().hidden * 4};
    r.exchange->combine_send(step, outputs, {});
  }
  std::unique_ptr<PhaseRun> add(std::uint32_t rank, std::uint32_t step) {
    Rank& r = ranks[rank];
    return r.exchange->start_combine_recv(step, {reinterpret_cast<char*>(r.y.data()), r.exchange->config().hidden * 4, false});
  }
  // How many pieces of the other rank's block are in a rank's memory, and how many of its own the other has read.
  std::uint32_t here(std::uint32_t rank, Op op, std::uint32_t step) { return blocks(rank).pieces_here(step, op, 1 - rank); }
  std::uint32_t consumed(std::uint32_t rank, Op op, std::uint32_t step) { return blocks(rank).pieces_consumed(step, op, 1 - rank); }
  // The header of a piece that rank 1 has sent, in rank 0's memory.
  BlockHeader& header(Op op, std::uint32_t step, std::uint32_t piece) {
    const Config& c = ranks[0].exchange->config();
    const std::uint64_t at = heap().slot_at(c, set_of(c, step), op, 1) + heap().piece_at(op, piece);
    return *reinterpret_cast<BlockHeader*>(ranks[0].memory() + at);
  }
  const Blocks& blocks(std::uint32_t rank) const { return ranks[rank].exchange->blocks(); }
  const Heap& heap() const { return blocks(0).heap(); }

  double now = 1.0;
  std::vector<Rank> ranks;
};

void finish(PhaseRun& a, PhaseRun& b) {
  bool done = false;
  for (int i = 0; i < 100 && !done; ++i) {
    const bool first = a.poll(), second = b.poll();
    done = first && second;
  }
  CHECK(done);
}

// A send half lets two pieces go and does not block; each further one waits until its place has been read, in both operations.
void credits() {
  Pair p;
  const std::uint32_t step = p.send(0);
  CHECK_EQ(p.send(1), step);
  CHECK_EQ(p.here(0, Op::Dispatch, step), 2u);
  const auto zero = p.receive(0, step), one = p.receive(1, step);
  CHECK(!zero->poll());   // reads two pieces of rank 1's, which it sends the rest of only when it comes here, too
  CHECK_EQ(p.here(0, Op::Dispatch, step), 2u);
  CHECK_EQ(p.consumed(1, Op::Dispatch, step), 2u);
  CHECK_EQ(p.consumed(0, Op::Dispatch, step), 0u);
  CHECK(!one->poll());
  CHECK_EQ(p.here(0, Op::Dispatch, step), 4u);
  CHECK(zero->waiting().peer == 1 && zero->waiting().piece == 2);
  finish(*zero, *one);
  CHECK_EQ(p.here(0, Op::Dispatch, step), kPieces);
  CHECK_EQ(p.consumed(0, Op::Dispatch, step), kPieces - 2);   // no rank waits for the last ones
  for (std::uint32_t rank : {0u, 1u}) p.send_back(rank, step);
  CHECK_EQ(p.here(0, Op::Combine, step), 2u);
  const auto add_zero = p.add(0, step), add_one = p.add(1, step);
  CHECK(!add_zero->poll());
  CHECK_EQ(p.consumed(1, Op::Combine, step), 2u);
  CHECK_EQ(p.here(0, Op::Combine, step), 2u);
  finish(*add_zero, *add_one);
  CHECK_EQ(p.here(0, Op::Combine, step), kPieces);
  for (const Rank& r : p.ranks)
    for (std::size_t i = 0; i < r.y.size(); ++i) CHECK_EQ(r.y[i], 2 * r.x[i]);
}

// Ranks with no token, with few and with many: each pair has pieces of its own.
void uneven() {
  for (std::uint32_t tokens : {0u, 1u, 4u, 5u, 6u, 19u}) {
    Pair p;
    p.route(1, tokens);
    const std::uint32_t step = p.send(0);
    p.send(1);
    CHECK_EQ(p.here(0, Op::Dispatch, step), tokens <= 4 ? 1u : 2u);   // a slot holds four rows
    const auto zero = p.receive(0, step), one = p.receive(1, step);
    finish(*zero, *one);
    CHECK_EQ(p.ranks[0].counts[0], static_cast<std::int32_t>(kTokens + tokens));
    for (std::uint32_t rank : {0u, 1u}) p.send_back(rank, step);
    const auto add_zero = p.add(0, step), add_one = p.add(1, step);
    finish(*add_zero, *add_one);
    for (std::size_t i = 0; i < p.ranks[0].y.size(); ++i) CHECK_EQ(p.ranks[0].y[i], 2 * p.ranks[0].x[i]);
    for (std::size_t i = 0; i < std::size_t{tokens} * 4; ++i) CHECK_EQ(p.ranks[1].y[i], 2 * p.ranks[1].x[i]);
  }
}

void must_refuse(PhaseRun& phase, const std::string& word) {
  try {
    phase.poll();
  } catch (const PeerFailure& failure) {
    CHECK(failure.reason == AbortReason::Protocol && failure.peer == 1);
    if (std::string(failure.what()).find(word) == std::string::npos)
      check::fail(__FILE__, __LINE__, std::string("does not say ") + word + ": " + failure.what());
    return;
  }
  check::fail(__FILE__, __LINE__, "was accepted: a wrong header, " + word);
}

// Each piece's header must be that of this piece of this block.
void headers() {
  const std::pair<const char*, std::function<void(BlockHeader&)>> damages[] = {
      {"step", [](BlockHeader& h) { ++h.step; }},       {"generation", [](BlockHeader& h) { ++h.generation; }},
      {"source", [](BlockHeader& h) { h.source = 0; }}, {"rows", [](BlockHeader& h) { --h.rows; }},
      {"piece ", [](BlockHeader& h) { h.piece += 2; }}, {"pieces", [](BlockHeader& h) { ++h.pieces; }},
      {"flags", [](BlockHeader& h) { h.flags ^= kReleased; }},
  };
  for (const auto& [word, change] : damages)
    for (const std::uint32_t piece : {0u, 1u, 2u}) {
      if (piece == 0 && std::string(word) == "flags") continue;   // a dispatch has none
      for (const Op op : {Op::Dispatch, Op::Combine}) {
        Pair p;
        const std::uint32_t step = p.send(0);
        p.send(1);
        auto zero = p.receive(0, step), one = p.receive(1, step);
        if (op == Op::Combine) {
          finish(*zero, *one);
          for (std::uint32_t rank : {0u, 1u}) p.send_back(rank, step);
          zero = p.add(0, step), one = p.add(1, step);
        }
        if (op == Op::Combine && piece == 0 && std::string(word) == "rows") continue;   // other words: test_headers
        if (piece == 2) {
          CHECK(!zero->poll());
          CHECK(!one->poll());
        }
        change(p.header(op, step, piece));
        must_refuse(*zero, word);
      }
    }
}

// A rank that gives up names the peer that it waits for, the phase, and the piece.
void timeouts() {
  for (const bool combine : {false, true}) {
    Pair p;
    const std::uint32_t step = p.send(0);
    p.send(1);
    auto zero = p.receive(0, step), one = p.receive(1, step);
    if (combine) {
      finish(*zero, *one);
      for (std::uint32_t rank : {0u, 1u}) p.send_back(rank, step);
      zero = p.add(0, step), one = p.add(1, step);
    }
    const Phase phase = combine ? Phase::CombineRecv : Phase::DispatchRecv;
    const std::string block = combine ? "combine block" : "dispatch block";
    const auto gives_up = [&](PhaseRun& run, std::uint32_t rank, const std::string& words, const std::string& expected,
                              const std::string& seen) {
      try {
        p.ranks[rank].exchange->poll(run, phase, step, p.now - 100);
      } catch (const PeerFailure& failure) {
        const std::string text = failure.what();
        CHECK(failure.reason == AbortReason::Timeout && failure.peer == 1 - rank && failure.phase == phase && failure.step == step);
        if (text.find(words) == std::string::npos) check::fail(__FILE__, __LINE__, "does not say " + words + ": " + text);
        CHECK_EQ(failure.expected, expected);
        CHECK_EQ(failure.seen, seen);
        return;
      }
      check::fail(__FILE__, __LINE__, "did not give up");
    };
    CHECK(!zero->poll());
    gives_up(*zero, 0, "waiting for piece 2 of the " + block + " of rank 1 in " + phase_name(phase), "piece 2", "2 before it");
  }
  // Everything has come, but the peer does not read.
  Pair p;
  p.route(1, 0);
  const std::uint32_t step = p.send(0);
  p.send(1);
  const auto zero = p.receive(0, step);
  for (std::uint32_t i = 0; i < kPieces; ++i) CHECK(!zero->poll());   // it reads its own block, too
  const Waiting w = zero->waiting();
  CHECK(w.peer == 1 && w.piece == 0 && w.to_be_read && w.seen == 0);
  try {
    p.ranks[0].exchange->poll(*zero, Phase::DispatchRecv, step, p.now - 100);
    check::fail(__FILE__, __LINE__, "did not give up");
  } catch (const PeerFailure& failure) {
    CHECK(std::string(failure.what()).find("waiting for rank 1 to read piece 0 of the dispatch block in dispatch_recv") !=
          std::string::npos);
  }
}

// Steps are received in the order of their dispatches; what is refused can be done in its turn.
void order() {
  Pair p;
  const std::uint32_t first = p.send(0), second = p.send(0);
  p.send(1), p.send(1);
  const auto refused = [](const std::function<void()>& call) {
    try {
      call();
    } catch (const Misuse& misuse) {
      CHECK(std::string(misuse.what()).find("received in order") != std::string::npos);
      return;
    }
    check::fail(__FILE__, __LINE__, "a later step was received first");
  };
  refused([&] { p.ranks[0].exchange->check_order(second, Phase::DispatchRecv); });
  refused([&] { p.receive(0, second); });
  for (const std::uint32_t step : {first, second}) {
    const auto zero = p.receive(0, step), one = p.receive(1, step);
    finish(*zero, *one);
    for (std::uint32_t rank : {0u, 1u}) p.send_back(rank, step);
  }
  refused([&] { p.ranks[0].exchange->check_order(second, Phase::CombineRecv); });
  refused([&] { p.add(0, second); });
  for (const std::uint32_t step : {first, second}) {
    const auto zero = p.add(0, step), one = p.add(1, step);
    finish(*zero, *one);
    for (std::uint32_t rank : {0u, 1u}) p.ranks[rank].exchange->finish_combine_recv(step);
  }
}

// Nothing of a step that was broken off counts after a reset, though its step numbers come again.
void reset() {
  Pair p;
  std::uint32_t step = p.send(0);
  p.send(1);
  {
    const auto zero = p.receive(0, step), one = p.receive(1, step);
    CHECK(!zero->poll() && !one->poll());
    CHECK(p.consumed(1, Op::Dispatch, step) > 0);
  }
  for (Rank& r : p.ranks) r.exchange->reset(2, {true, true});
  CHECK_EQ(p.consumed(1, Op::Dispatch, step), 0u);
  CHECK_EQ(p.send(0), step);
  CHECK_EQ(p.here(0, Op::Dispatch, step), 0u);
  p.send(1);
  CHECK_EQ(p.here(0, Op::Dispatch, step), 2u);
  CHECK_EQ(p.consumed(1, Op::Dispatch, step), 0u);
  const auto zero = p.receive(0, step), one = p.receive(1, step);
  finish(*zero, *one);
}

}  // namespace

int main() {
  credits();
  uneven();
  headers();
  timeouts();
  order();
  reset();
}
