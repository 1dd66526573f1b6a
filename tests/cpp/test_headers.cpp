// A peer's block is used only when its word has come and its header fits. Two ranks map each other's memory, and the test changes
// one field or one word in between.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "local_ranks.h"

using namespace pplx;
using namespace pplx::cpu;
using namespace pplx::test;

namespace {

constexpr std::uint32_t kTokens = 3;
const std::vector<std::int32_t> kIds{0, 1, 0, 1, 0, 1};   // every token to both

struct Rank {
  std::unique_ptr<std::uint64_t[]> heap;
  std::unique_ptr<Exchange> exchange;
  std::vector<float> x, weights, out, out_weights;
  std::vector<std::int32_t> counts, offsets, src_rank, src_token;
  Tokens in;
  ExpertOutputs combine;
  char* memory() const { return reinterpret_cast<char*>(heap.get()); }
};

struct Pair {
  explicit Pair(std::uint32_t replicas = 1) : ranks(2) {
    Config c;
    c.world = 2;
    c.num_experts = c.top_k = 2;
    c.hidden = 4;
    c.max_tokens = 8;
    c.replicas = replicas;
    c.dtype = Dtype::Float32;
    c.max_rows = 2 * c.max_tokens * c.top_k;
    for (Rank& r : ranks) r.heap = std::make_unique<std::uint64_t[]>(heap_of(c).bytes / 8 + 8);
    for (c.rank = 0; c.rank < 2; ++c.rank) {
      Rank& r = ranks[c.rank];
      r.exchange = std::make_unique<Exchange>(c, Memory{r.memory(), {ranks[0].memory(), ranks[1].memory()}, {}, {}}, 1, 10.0);
      r.x.assign(kTokens * c.hidden, 1.0f);
      r.weights.assign(kTokens * c.top_k, 0.5f);
      route(c.rank, kIds);
      r.in.x = {reinterpret_cast<const char*>(r.x.data()), c.hidden * 4};
      r.out.resize(c.max_rows * c.hidden);
      r.out_weights.resize(c.max_rows);
      r.counts.resize(1);
      r.offsets.resize(2);
      r.src_rank.resize(c.max_rows);
      r.src_token.resize(c.max_rows);
    }
  }

  void route(std::uint32_t rank, const std::vector<std::int32_t>& ids) {
    const Config& c = ranks[rank].exchange->config();
    ranks[rank].in.plan = std::make_shared<const Plan>(make_plan(c, ids.data(), static_cast<std::uint32_t>(ids.size()) / c.top_k));
  }
  void send(std::uint32_t rank) { step = ranks[rank].exchange->dispatch_send(ranks[rank].in, {}); }
  DispatchOutput output(Rank& r) {
    DispatchOutput o;
    o.x = reinterpret_cast<char*>(r.out.data());
    o.counts = r.counts.data();
    o.offsets = r.offsets.data();
    o.weights = r.out_weights.data();
    o.src_rank = r.src_rank.data();
    o.src_token = r.src_token.data();
    return o;
  }
  void receive(std::uint32_t rank) {
    Rank& r = ranks[rank];
    r.combine.received = r.exchange->dispatch_recv(step, output(r), {});
    r.combine.expert_out = {reinterpret_cast<const char*>(r.out.data()), r.exchange->config().hidden * 4};
    r.combine.plan = r.in.plan;
    r.combine.weights = r.weights.data();
  }
  void send_back(std::uint32_t rank) { ranks[rank].exchange->combine_send(step, ranks[rank].combine, {}); }
  void add(std::uint32_t rank) {
    Rank& r = ranks[rank];
    r.exchange->combine_recv(step, {reinterpret_cast<char*>(r.x.data()), r.exchange->config().hidden * 4, false}, {});
  }

  // Rank 1's blocks and words, in rank 0's memory.
  BlockHeader& slice() { return *reinterpret_cast<BlockHeader*>(ranks[0].memory() + heap().slice_at(config(), 0, 1)); }
  BlockHeader& header(Op op) { return *reinterpret_cast<BlockHeader*>(ranks[0].memory() + heap().slot_at(config(), 0, op, 1)); }
  std::uint64_t& word(Signal signal) {
    return *reinterpret_cast<std::uint64_t*>(ranks[0].memory() + heap().arrival_at(config(), 0, signal, 1));
  }
  const Config& config() const { return ranks[0].exchange->config(); }
  const Heap& heap() const { return ranks[0].exchange->blocks().heap(); }

  std::vector<Rank> ranks;
  std::uint32_t step = 0;
};

void must_refuse(const std::function<void()>& call, const std::string& word, std::uint32_t peer = 1) {
  try {
    call();
  } catch (const PeerFailure& failure) {
    CHECK(failure.reason == AbortReason::Protocol);
    CHECK_EQ(failure.peer, peer);
    const std::string what = failure.what();
    if (what.find(word) == std::string::npos) check::fail(__FILE__, __LINE__, what + ", not " + word);
    return;
  }
  check::fail(__FILE__, __LINE__, "was accepted: a wrong header, " + word);
}

struct Damage {
  const char* word;
  std::function<void(BlockHeader&)> change;
};
const std::vector<Damage> kDamages{
    {"step", [](BlockHeader& h) { ++h.step; }},
    {"step", [](BlockHeader& h) { h.step -= 256; }},
    {"generation", [](BlockHeader& h) { ++h.generation; }},
    {"source", [](BlockHeader& h) { h.source = 0; }},
    {"rows", [](BlockHeader& h) { h.rows = 9; }},
    {"rows", [](BlockHeader& h) { h.rows = 0xffffffffu; }},
    {"rows", [](BlockHeader& h) { ++h.rows; }},
    {"rows", [](BlockHeader& h) { --h.rows; }},
};

// The number of a dispatch's rows is not known in advance: it can only be too large, or contradict the counts.
bool contradicts(const Damage& damage, Op op) {
  BlockHeader h;
  h.rows = kTokens;
  damage.change(h);
  return op != Op::Dispatch || h.rows != kTokens - 1;
}

void headers() {
  for (const Damage& damage : kDamages) {
    {
      Pair p;
      p.send(0);
      p.send(1);
      damage.change(p.header(Op::Dispatch));
      if (contradicts(damage, Op::Dispatch)) must_refuse([&] { p.receive(0); }, damage.word);
    }
    for (const bool weights : {false, true}) {
      Pair p;
      p.send(0);
      p.send(1);
      p.receive(0);
      p.receive(1);
      for (Rank& r : p.ranks) r.combine.uses_weights = weights;
      // With weights= rank 1's send waits for rank 0's: it has sent its own by then.
      const std::unique_ptr<PhaseRun> other = p.ranks[1].exchange->start_combine_send(p.step, p.ranks[1].combine);
      CHECK_EQ(other->poll(), !weights);
      if (weights) {
        damage.change(p.header(Op::Weights));
        must_refuse([&] { p.send_back(0); }, damage.word);
      } else {
        damage.change(p.header(Op::Combine));
        p.send_back(0);
        must_refuse([&] { p.add(0); }, damage.word);
      }
    }
  }
}

// More rows than a slot has are refused even if the counts agree.
void too_many_rows() {
  Pair p;
  p.send(0);
  p.send(1);
  BlockHeader& header = p.header(Op::Dispatch);
  const std::uint32_t rows = p.config().max_tokens + 1;
  header.rows = rows;
  std::memcpy(reinterpret_cast<char*>(&header) + sizeof header, &rows, sizeof rows);
  must_refuse([&] { p.receive(0); }, "more than max_tokens_per_rank");
}

// Replicas that pass different tokens are told so by name.
void other_tokens() {
  for (const std::vector<std::int32_t>& ids : {std::vector<std::int32_t>{0, 1, 0, 1, 0, -1}, {0, 1, 0, 1}, {}}) {
    Pair p(2);
    p.route(1, ids);
    p.send(0);
    p.send(1);
    must_refuse([&] { p.receive(0); }, ids.size() == kIds.size() ? "different topk_ids" : "rank 0 passed 3");
  }
}

// Runs to the point where rank 0 waits for the rows that rank 1 finished, and rank 1 waits for nothing.
std::unique_ptr<PhaseRun> until_slice(Pair& p) {
  p.send(0);
  p.send(1);
  for (std::uint32_t rank : {0u, 1u}) p.receive(rank);
  for (std::uint32_t rank : {0u, 1u}) p.send_back(rank);
  const auto output = [&](std::uint32_t rank) {
    return Result{reinterpret_cast<char*>(p.ranks[rank].x.data()), p.config().hidden * 4, false};
  };
  auto phase = p.ranks[0].exchange->start_combine_recv(p.step, output(0));
  CHECK(!phase->poll());
  const Waiting w = phase->waiting();
  CHECK(w.peer == 1 && w.what == "the finished rows" && w.seen == 0);
  CHECK(p.ranks[1].exchange->start_combine_recv(p.step, output(1))->poll());   // rank 0's rows were there
  return phase;
}

void slices() {
  {
    Pair p(2);
    const std::unique_ptr<PhaseRun> phase = until_slice(p);
    const std::uint64_t word = p.word(Signal::Slice);
    for (const std::uint64_t other : {std::uint64_t{0}, arrival_word(1, p.step - 1), arrival_word(2, p.step)}) {
      p.word(Signal::Slice) = other;
      CHECK(!phase->poll());
    }
    p.word(Signal::Slice) = word;
    CHECK(phase->poll());
  }
  for (const Damage& damage : kDamages) {
    Pair p(2);
    const std::unique_ptr<PhaseRun> phase = until_slice(p);
    damage.change(p.slice());
    must_refuse([&] { phase->poll(); }, damage.word);
  }
  Pair p(2);
  const std::unique_ptr<PhaseRun> phase = until_slice(p);
  p.slice().flags ^= kAccumulates;
  must_refuse([&] { phase->poll(); }, "accumulate=");
}

// Without its word a block is not used, even if everything else is there.
void words() {
  Pair p;
  p.send(0);
  p.send(1);
  Rank& r = p.ranks[0];
  const auto without = [&](Signal signal, PhaseRun& phase) {
    const std::uint64_t word = p.word(signal);
    CHECK_EQ(word, arrival_word(1, p.step));
    for (const std::uint64_t other : {std::uint64_t{0}, arrival_word(1, p.step - 1), arrival_word(2, p.step)}) {
      p.word(signal) = other;
      CHECK(!phase.poll());
      const Waiting w = phase.waiting();
      CHECK(w.peer == 1 && w.seen == other && w.expected == word);
    }
    p.word(signal) = word;
  };
  const auto received = std::make_shared<Received>();
  const std::unique_ptr<PhaseRun> receive = r.exchange->start_dispatch_recv(p.step, p.output(r), received);
  const std::uint64_t header = p.word(Signal::Header);
  p.word(Signal::Header) = 0;
  CHECK(!receive->poll());
  p.word(Signal::Header) = header;
  without(Signal::Dispatch, *receive);   // its header is here and read, its rows are not
  CHECK(receive->poll());
  r.exchange->finish_dispatch_recv(p.step, received);
  p.receive(1);
  r.combine.received = received;
  r.combine.expert_out = {reinterpret_cast<const char*>(r.out.data()), p.config().hidden * 4};
  p.send_back(0);
  p.send_back(1);
  const Result out{reinterpret_cast<char*>(r.x.data()), p.config().hidden * 4, false};
  const std::unique_ptr<PhaseRun> add = r.exchange->start_combine_recv(p.step, out);
  without(Signal::Combine, *add);
  CHECK(add->poll());
}

// ---- with relays ----------------------------------------------------------------------------------------------------------

// Two nodes of two, over a network: 2 is the relay of 0, and 3 that of 1. A rank has two experts; 3 has one, number 6. All ranks
// send the same tokens: the first for both ranks of either node, the second for 0 and 2, the third for 1 and 3.
struct Relayed {
  static constexpr std::uint32_t kTopK = 4, kBoth = 3;
  explicit Relayed(std::uint32_t in_flight = 1)
      : local(configuration(in_flight), 2, 2, 4096, 1), x(4 * 16, 1.0f), weights(12, 0.5f) {
    for (Out& o : out) {
      o.x.resize(local.ranks[0].config.max_rows * 4);
      o.y.resize(12);
      o.numbers.resize(4 * local.ranks[0].config.max_rows + 16);
      o.weights.resize(local.ranks[0].config.max_rows);
    }
  }
  static Config configuration(std::uint32_t in_flight) {
    Config c;
    c.world = 4;
    c.num_experts = 7;
    c.top_k = kTopK;
    c.hidden = 4;
    c.max_tokens = 4;
    c.in_flight = in_flight;
    c.dtype = Dtype::Float32;
    c.max_rows = 64;
    c.node_ranks = 2;
    return c;
  }

  Exchange& at(std::uint32_t rank) { return *local.ranks[rank].exchange; }
  void send() {
    for (LocalRank& rank : local.ranks) {
      Tokens in;
      in.plan = plans[rank.config.rank] = std::make_shared<const Plan>(
          make_plan(rank.config, ids.data(), 3, nullptr, &rank.exchange->blocks().rails().rep));
      in.x = {reinterpret_cast<const char*>(x.data()), 16};
      step = rank.exchange->dispatch_send(in, {});
    }
    local.run_network();
  }
  std::shared_ptr<const Received> receive(std::uint32_t rank) {
    Out& o = out[rank];
    std::int32_t* const numbers = o.numbers.data();
    const std::uint32_t rows = local.ranks[0].config.max_rows;
    DispatchOutput to;
    to.x = reinterpret_cast<char*>(o.x.data());
    to.weights = o.weights.data();
    to.src_rank = numbers;
    to.src_token = numbers + rows;
    to.counts = numbers + 2 * rows;
    to.offsets = numbers + 2 * rows + 4;
    return o.received = at(rank).dispatch_recv(step, to, {});
  }
  std::unique_ptr<PhaseRun> start_back(std::uint32_t rank, bool uses_weights = false, bool release = false) {
    ExpertOutputs in;
    in.received = out[rank].received;
    in.expert_out = {reinterpret_cast<const char*>(out[rank].x.data()), 16};
    in.uses_weights = uses_weights;
    in.release = release;
    in.weights = weights.data();
    in.plan = plans[rank];
    return at(rank).start_combine_send(step, in);
  }
  void send_back() {
    for (std::uint32_t rank = 0; rank < 4; ++rank) {
      CHECK(start_back(rank)->poll());
      at(rank).finish_combine_send(step);
    }
  }
  std::unique_ptr<PhaseRun> start_add(std::uint32_t rank) {
    return at(rank).start_combine_recv(step, {reinterpret_cast<char*>(out[rank].y.data()), 16, false});
  }
  // Runs all ranks to the end.
  void add() {
    std::unique_ptr<PhaseRun> runs[4];
    for (std::uint32_t rank = 0; rank < 4; ++rank) runs[rank] = start_add(rank);
    for (bool done = false; !done;) {
      done = true;
      for (const auto& run : runs) done &= run->poll();
      local.run_network();
    }
    for (std::uint32_t rank = 0; rank < 4; ++rank) at(rank).finish_combine_recv(step);
  }

  // A word of rank 0's block in the memory of its relay, and of a row of it.
  std::uint32_t& word(Op op, std::uint64_t at_byte) {
    return *reinterpret_cast<std::uint32_t*>(at(2).blocks().own_slot(set_of(at(2).config(), step), op, 0) + at_byte);
  }
  std::uint32_t& mask(std::uint32_t token) { return word(Op::Dispatch, masks_at(at(2).config()) + 4 * token); }
  std::uint32_t& masks() { return word(Op::Dispatch, offsetof(BlockHeader, masks)); }
  std::uint32_t& count(std::uint32_t expert_of_node) { return word(Op::Dispatch, sizeof(BlockHeader) + 4 * expert_of_node); }
  std::uint32_t& route(std::uint32_t row, std::uint32_t n) {
    const BlockLayout block = dispatch_block(at(2).config());
    return word(Op::Dispatch, block.row_at(row) + block.route_at + 4 * n);
  }

  struct Out {
    std::vector<float> x, y, weights;
    std::vector<std::int32_t> numbers;
    std::shared_ptr<const Received> received;
  };
  const std::vector<std::int32_t> ids{0, 2, 4, 6, 1, 5, -1, -1, 3, 6, 6, -1};
  LocalRanks local;
  std::vector<float> x, weights;
  std::shared_ptr<const Plan> plans[4];
  Out out[4];
  std::uint32_t step = 0;
};

// Every check of a block for a node: which of its ranks, 2 and 3, refuse it.
void relayed_dispatches() {
  struct Damaged {
    const char* word;
    std::vector<std::uint32_t> refuse;
    std::function<void(Relayed&)> change;
  };
  const auto entry = [](Relayed& r, std::uint32_t row, std::uint32_t nth) -> std::uint32_t& { return r.route(row, 2 + 2 * nth); };
  const std::vector<Damaged> all{
      {"masks of 2 rows for 3", {2, 3}, [](Relayed& r) { r.mask(2) = 0; }},
      {"masks of 4 rows for 3", {2, 3}, [](Relayed& r) { r.masks() = 4, r.mask(3) = 1; }},
      {"a mask of 5", {2, 3}, [](Relayed& r) { r.mask(1) |= 4; }},
      {"a mask of 2147483649", {2, 3}, [](Relayed& r) { r.mask(1) |= 1u << 31; }},
      {"counts that add up to 2 for 3 rows", {2}, [](Relayed& r) { r.mask(2) = Relayed::kBoth, r.count(1) = 0, r.count(0) = 2; }},
      {"counts that add up to 9 for 2 rows", {3}, [](Relayed& r) { r.count(2) = 9; }},
      {"counts", {2, 3}, [](Relayed& r) { r.count(0) = r.count(2) = 0x80000000u; }},
      {"without a choice of this rank", {3}, [](Relayed& r) { r.mask(1) = Relayed::kBoth; }},
      {"without a choice of this rank", {2}, [&](Relayed& r) { entry(r, 1, 0) = route_place(4, 0); }},
      {"place 0 of its local expert 1", {3}, [&](Relayed& r) { entry(r, 0, 1) = route_place(3, 0); }},
      {"place 7 of its local expert", {2}, [&](Relayed& r) { entry(r, 1, 0) += 7; }},
      {"a route of choices 0", {2}, [](Relayed& r) { r.route(1, 1) = 0; }},
      {"a route of choices 17", {3}, [](Relayed& r) { r.route(2, 1) = 17; }},
      {"rows", {2, 3}, [](Relayed& r) { r.word(Op::Dispatch, offsetof(BlockHeader, rows)) = 5; }},
      {"a mask of 8 for token 2", {2, 3}, [](Relayed& r) { r.mask(2) = 8, ++r.word(Op::Dispatch, offsetof(BlockHeader, rows)); }},
      {"masks of 2 rows for 3", {2, 3}, [](Relayed& r) { r.masks() = 2; }},
  };
  for (const Damaged& damaged : all)
    for (std::uint32_t rank : {2u, 3u}) {
      Relayed r;
      r.send();
      CHECK(r.mask(0) == Relayed::kBoth && r.mask(1) == 1 && r.mask(2) == 2 && r.count(1) == 1 && r.count(2) == 3);
      damaged.change(r);
      if (std::count(damaged.refuse.begin(), damaged.refuse.end(), rank) != 0)
        must_refuse([&] { r.receive(rank); }, damaged.word, 0);
      else
        r.receive(rank);
    }
}

// Damages headers that a mate leaves at a relay, and those of the relay's answers.
void returned_rows() {
  const std::vector<Damage> more{{"release", [](BlockHeader& h) { h.flags ^= kReleased; }},
                                 {"tail", [](BlockHeader& h) { h.flags ^= kHasTail; }}};
  for (const std::vector<Damage>& damages : {kDamages, more})
    for (const Damage& damage : damages) {
      Relayed r;
      r.send();
      for (std::uint32_t rank = 0; rank < 4; ++rank) r.receive(rank);
      r.send_back();
      auto& header = *reinterpret_cast<BlockHeader*>(r.at(2).blocks().relay_slot(0, 0, 3));
      CHECK(header.rows == 2 && header.source == 3 && header.flags == 0);
      damage.change(header);
      const std::unique_ptr<PhaseRun> add = r.start_add(2);
      must_refuse([&] { add->poll(); }, damage.word, 3);

      Relayed other;
      other.send();
      for (std::uint32_t rank = 0; rank < 4; ++rank) other.receive(rank);
      other.send_back();
      const std::unique_ptr<PhaseRun> sum = other.start_add(0);
      CHECK(!sum->poll());   // it waits for the answer
      const std::unique_ptr<PhaseRun> answer = other.start_add(2);
      answer->poll();
      other.local.run_network();
      auto& answered = *reinterpret_cast<BlockHeader*>(other.at(0).blocks().own_slot(0, Op::Combine, 2));
      CHECK(answered.rows == 3 && answered.source == 2 && answered.step == other.step);
      damage.change(answered);
      must_refuse([&] { sum->poll(); }, damage.word, 2);
    }
}

// A node's weights have a row for each row of the dispatch, whichever ranks want it.
void relayed_weights() {
  for (const Damage& damage : kDamages)
    for (std::uint32_t rank : {2u, 3u}) {
      Relayed r;
      r.send();
      for (std::uint32_t each = 0; each < 4; ++each) r.receive(each);
      std::unique_ptr<PhaseRun> runs[4];
      for (std::uint32_t each = 0; each < 4; ++each) runs[each] = r.start_back(each, true);
      for (std::uint32_t each : {0u, 1u, 5 - rank}) runs[each]->poll();
      r.local.run_network();
      auto& header = *reinterpret_cast<BlockHeader*>(r.at(2).blocks().own_slot(0, Op::Weights, 0));
      CHECK(header.rows == 3 && header.source == 0);
      damage.change(header);
      if (header.source == 0 && std::string(damage.word) == "source") header.source = 1;
      must_refuse([&] { runs[rank]->poll(); }, damage.word, 0);
    }
}

// A source that writes its block again once it has been read changes nothing.
void masks_are_read_once() {
  std::vector<float> sums[4];
  for (const bool rewritten : {false, true}) {
    Relayed r;
    r.send();
    for (std::uint32_t rank = 0; rank < 4; ++rank) r.receive(rank);
    for (std::uint32_t row = 0; row < 4 && rewritten; ++row) r.mask(row) = row == 0 ? 1 : Relayed::kBoth;
    if (rewritten) r.word(Op::Dispatch, offsetof(BlockHeader, rows)) = 4;
    r.send_back();
    r.add();
    for (std::uint32_t rank = 0; rank < 4; ++rank)
      if (rewritten)
        CHECK(sums[rank] == r.out[rank].y);
      else
        sums[rank] = r.out[rank].y;
  }
}

// Ranks of a node receive for each other, so all take steps in one order.
void relayed_order() {
  Relayed r(2);
  r.send();
  r.send();
  const auto refused = [&](const std::function<void()>& call) {
    try {
      call();
    } catch (const Misuse& misuse) {
      CHECK(std::string(misuse.what()).find("dedup='node'") != std::string::npos);
      return;
    }
    check::fail(__FILE__, __LINE__, "a later step was received first");
  };
  refused([&] { r.receive(2); });
  for (r.step = 1; r.step <= 2; ++r.step)
    for (std::uint32_t rank = 0; rank < 4; ++rank) r.receive(rank);
  for (std::uint32_t step : {2u, 1u}) {
    r.step = step;
    r.send_back();
  }
  r.step = 2;
  refused([&] { r.start_add(2); });
  for (std::uint32_t step : {1u, 2u}) {
    r.step = step;
    r.add();
  }
}

}  // namespace

int main() {
  relayed_dispatches();
  returned_rows();
  relayed_weights();
  masks_are_read_once();
  relayed_order();
  headers();
  too_many_rows();
  words();
  other_tokens();
  slices();
}
