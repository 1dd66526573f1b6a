// A peer's block is used only when its word has come and its header fits. Two ranks map each other's memory, and the test changes
// one field or one word in between.
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
      r.exchange = std::make_unique<Exchange>(c, Memory{r.memory(), {ranks[0].memory(), ranks[1].memory()}}, 1, 10.0);
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

void must_refuse(const std::function<void()>& call, const std::string& word) {
  try {
    call();
  } catch (const PeerFailure& failure) {
    CHECK(failure.reason == AbortReason::Protocol);
    CHECK_EQ(failure.peer, 1u);
    CHECK(std::string(failure.what()).find(word) != std::string::npos);
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
  CHECK(w.peer == 1 && w.signal == Signal::Slice && w.seen == 0);
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
      CHECK(w.peer == 1 && w.signal == signal && w.seen == other && w.expected == word);
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

}  // namespace

int main() {
  headers();
  too_many_rows();
  words();
  other_tokens();
  slices();
}
