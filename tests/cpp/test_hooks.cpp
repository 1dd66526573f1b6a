// Hooks on the CPU device, between two ranks that map each other: which words are raised when a row, or the plan, is written.
// Memory that may not be touched says so at the very access.
#include <csignal>
#include <cstring>
#include <memory>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "../../src/cpu/exchange.h"
#include "check.h"

using namespace pplx;
using namespace pplx::cpu;

namespace {

constexpr std::uint32_t kRanks = 2, kTokens = 100, kExperts = 4, kTopK = 2;
constexpr std::size_t kPage = 4096, kRowBytes = 2 * kPage;   // a row is seen when it is begun, and in its middle

// Pages whose first access calls allow(page), and ends the program where that says no.
class Guarded {
 public:
  using Allow = bool (*)(const void* of, std::size_t page);

  Guarded(std::size_t pages, Allow allow, const void* of) : pages_(pages), allow_(allow), of_(of) {
    void* const got = mmap(nullptr, pages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(got != MAP_FAILED);
    data_ = static_cast<char*>(got);
    all_.push_back(this);
  }
  ~Guarded() {
    munmap(data_, pages_ * kPage);
    for (Guarded*& each : all_)
      if (each == this) each = nullptr;
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  char* data() const { return data_; }
  void lock() { CHECK(mprotect(data_, pages_ * kPage, PROT_NONE) == 0); }

  static void watch() {
    struct sigaction action = {};
    action.sa_sigaction = touched;
    action.sa_flags = SA_SIGINFO;
    CHECK(sigaction(SIGSEGV, &action, nullptr) == 0);
  }

 private:
  static void touched(int, siginfo_t* info, void*) {
    for (Guarded* each : all_) {
      const auto* at = static_cast<const char*>(info->si_addr);
      if (each == nullptr || at < each->data_ || at >= each->data_ + each->pages_ * kPage) continue;
      const std::size_t page = static_cast<std::size_t>(at - each->data_) / kPage;
      if (each->allow_(each->of_, page) && mprotect(each->data_ + page * kPage, kPage, PROT_READ | PROT_WRITE) == 0) return;
    }
    constexpr char kSays[] = "CHECK: a row, or the plan, is touched while its word says otherwise\n";
    if (write(STDERR_FILENO, kSays, sizeof kSays - 1) < 0) _exit(2);
    _exit(1);
  }

  static std::vector<Guarded*> all_;
  std::size_t pages_;
  Allow allow_;
  const void* of_;
  char* data_ = nullptr;
};
std::vector<Guarded*> Guarded::all_;

struct Rank {
  Rank(const Config& config, Memory memory)
      : c(config), exchange(c, std::move(memory), 1, 10.0, [] { return 1.0; }), hooks(hook_words_in_all(c)),
          before(1 + hook_words(c)),
        x(kTokens * kRowBytes / 4), y(x.size()), made(c.max_rows * kRowBytes / 4), weights(c.max_rows), source(c.max_rows),
        token(c.max_rows) {}

  const std::uint32_t* words() const { return hooks.data() + hook_arrived_at(c); }
  std::uint32_t load(std::uint32_t at) const { return __atomic_load_n(hooks.data() + at, __ATOMIC_ACQUIRE); }

  // A row may be written until its block's word is raised; counts and offsets until any word is.
  static bool row_may_be_written(const void* rank, std::size_t page) {
    const Rank& r = *static_cast<const Rank*>(rank);
    return !is_raised(r.words()[page * kPage / kRowBytes / kHookRows]);
  }
  static bool plan_may_be_written(const void* rank, std::size_t) {
    const Rank& r = *static_cast<const Rank*>(rank);
    for (std::uint32_t i = 0; i < hook_words(r.c); ++i)
      if (is_raised(r.words()[i])) return false;
    return !is_raised(r.hooks[0]);
  }

  Config c;
  Exchange exchange;
  std::vector<std::uint32_t> hooks, before;
  std::vector<float> x, y, made, weights;
  std::vector<std::int32_t> source, token;
  Tokens in;
  std::shared_ptr<Received> received;
  std::unique_ptr<PhaseRun> run;
  bool receives = false, done = false;
  Guarded out{c.max_rows * kRowBytes / kPage, row_may_be_written, this};
  // The last of each stands at the beginning of a page.
  Guarded counts{2, plan_may_be_written, this}, offsets{2, plan_may_be_written, this};
  std::int32_t* count() const { return reinterpret_cast<std::int32_t*>(counts.data() + kPage) - (kExperts / kRanks - 1); }
  std::int32_t* offset() const { return reinterpret_cast<std::int32_t*>(offsets.data() + kPage) - kExperts / kRanks; }
};

float value_of(std::uint32_t rank, std::uint32_t token) { return static_cast<float>(1000 * rank + token + 1); }
float value_made(std::uint32_t rank, std::uint32_t place) { return static_cast<float>(1000 * rank + place + 1); }

struct Pair {
  Pair(bool in_pieces, check::Random& random) : random_(random) {
    Config c;
    c.world = kRanks;
    c.num_experts = kExperts;
    c.top_k = kTopK;
    c.hidden = kRowBytes / 4;
    c.max_tokens = kTokens;
    c.in_flight = 2;
    c.dtype = Dtype::Float32;
    c.max_rows = kRanks * kTokens * kTopK;
    if (in_pieces) {
      c.whole_tokens = 4;
      c.slot_bytes = least_slot_bytes(c);
    }
    for (auto& heap : heaps_) heap = std::make_unique<std::uint64_t[]>(heap_of(c).bytes / 8 + 8);
    const auto at = [&](std::uint32_t rank) { return reinterpret_cast<char*>(heaps_[rank].get()); };
    for (c.rank = 0; c.rank < kRanks; ++c.rank) ranks.push_back(std::make_unique<Rank>(c, Memory{at(c.rank), {at(0), at(1)}}));
    CHECK_EQ(ranks[0]->exchange.blocks().heap().in_pieces, in_pieces);
    CHECK(hook_words(ranks[0]->c) == 4);
  }

  void draw(Rank& r) {
    // Anywhere; or each token to all experts of one rank, whose rows are sums of rows far apart.
    const bool together = random_.chance(0.5);
    const std::int64_t first = random_.integer(0, kRanks - 1) * kTopK;
    std::vector<std::int32_t> ids;
    for (std::uint32_t i = 0; i < kTokens * kTopK; ++i)
      ids.push_back(static_cast<std::int32_t>(together ? first + i % kTopK : random_.integer(-1, kExperts - 1)));
    r.in.plan = std::make_shared<const Plan>(make_plan(r.c, ids.data(), kTokens));
    for (std::uint32_t t = 0; t < kTokens; ++t)
      std::fill_n(r.x.begin() + std::size_t{t} * r.c.hidden, r.c.hidden, value_of(r.c.rank, t));
    r.in.x = {reinterpret_cast<const char*>(r.x.data()), kRowBytes};
  }

  void start_receiving(Rank& r, std::uint32_t step) {
    std::fill(r.hooks.begin(), r.hooks.end(), 0);
    std::fill(r.before.begin(), r.before.end(), 0);
    DispatchOutput o;
    o.x = r.out.data();
    o.counts = r.count();
    o.offsets = r.offset();
    o.weights = r.weights.data();
    o.src_rank = r.source.data();
    o.src_token = r.token.data();
    o.hooks = r.hooks.data();
    for (Guarded* each : {&r.out, &r.counts, &r.offsets}) each->lock();
    r.received = std::make_shared<Received>();
    r.run = r.exchange.start_dispatch_recv(step, o, r.received);
    r.done = false;
  }

  // A word that has been raised keeps its value; the others only count up.
  void check_words(Rank& r) {
    for (std::uint32_t i = 0; i < r.before.size(); ++i) {
      const std::uint32_t now = r.load(i == 0 ? 0 : hook_arrived_at(r.c) + i - 1);
      CHECK(is_raised(now) ? now == kRaised : now >= r.before[i] && !is_raised(r.before[i]));
      if (is_raised(now) && i > 0 && !is_raised(r.before[i])) check_block(r, i - 1);
      r.before[i] = now;
    }
  }
  void check_block(Rank& r, std::uint32_t word) {
    CHECK(is_raised(r.load(0)));
    const std::uint32_t rows = static_cast<std::uint32_t>(r.offset()[kExperts / kRanks]);
    for (std::uint32_t place = word * kHookRows; place < std::min(rows, (word + 1) * kHookRows); ++place) {
      const auto* row = reinterpret_cast<const float*>(r.out.data() + place * kRowBytes);
      const float wanted = value_of(static_cast<std::uint32_t>(r.source[place]), static_cast<std::uint32_t>(r.token[place]));
      CHECK_EQ(row[0], wanted);
      CHECK_EQ(row[r.c.hidden - 1], wanted);
    }
  }

  // Polls in any order until both are done, with something to do in between.
  template <typename Poll>
  void go_on(const Poll& poll) {
    for (int i = 0; i < 100'000; ++i) {
      if (ranks[0]->done && ranks[1]->done) return;
      Rank& r = *ranks[static_cast<std::size_t>(random_.integer(0, kRanks - 1))];
      if (!r.done) poll(r);
    }
    CHECK(!"it comes to an end");
  }

  void dispatch(std::uint32_t step) {
    // One rank receives before the other has sent.
    CHECK_EQ(ranks[0]->exchange.dispatch_send(ranks[0]->in, {}), step);
    start_receiving(*ranks[0], step);
    CHECK(!ranks[0]->run->poll());
    check_words(*ranks[0]);
    CHECK(!is_raised(ranks[0]->load(0)));
    CHECK_EQ(ranks[1]->exchange.dispatch_send(ranks[1]->in, {}), step);
    start_receiving(*ranks[1], step);
    go_on([&](Rank& r) {
      r.done = r.run->poll();
      check_words(r);
    });
    for (auto& r : ranks) {
      for (std::uint32_t word : r->before) CHECK_EQ(word, kRaised);
      r->exchange.finish_dispatch_recv(step, r->received);
    }
  }

  void combine(std::uint32_t step) {
    for (auto& r : ranks) {
      for (std::uint32_t place = 0; place < r->c.max_rows; ++place)
        std::fill_n(r->made.begin() + std::size_t{place} * r->c.hidden, r->c.hidden, value_made(r->c.rank, place));
      ExpertOutputs outputs;
      outputs.received = r->received;
      outputs.expert_out = {reinterpret_cast<const char*>(r->made.data()), kRowBytes};
      r->run = r->exchange.start_combine_send(step, outputs);
      r->receives = r->done = false;
    }
    go_on([&](Rank& r) {
      if (!r.run->poll()) return;
      if (r.receives) {
        r.done = true;
        return;
      }
      r.exchange.finish_combine_send(step);
      r.run = r.exchange.start_combine_recv(step, {reinterpret_cast<char*>(r.y.data()), kRowBytes, false});
      r.receives = true;
    });
    for (auto& r : ranks) r->exchange.finish_combine_recv(step);
  }

  void check_sums() {
    std::vector<float> wanted(kRanks * kTokens);
    for (auto& r : ranks)
      for (std::uint32_t e = 0; e < kExperts / kRanks; ++e)
        for (std::int32_t n = 0; n < r->count()[e]; ++n) {
          const auto place = static_cast<std::uint32_t>(r->offset()[e] + n);
          wanted[static_cast<std::uint32_t>(r->source[place]) * kTokens +
                 static_cast<std::uint32_t>(r->token[place])] += value_made(r->c.rank, place);
        }
    for (auto& r : ranks)
      for (std::uint32_t t = 0; t < kTokens; ++t)
        for (std::uint32_t column : {0u, r->c.hidden - 1})
          CHECK_EQ(r->y[std::size_t{t} * r->c.hidden + column], wanted[r->c.rank * kTokens + t]);
  }

  std::vector<std::unique_ptr<Rank>> ranks;

 private:
  check::Random& random_;
  std::unique_ptr<std::uint64_t[]> heaps_[kRanks];
};

}  // namespace

int main() {
  check::Random random(check::seed());
  Guarded::watch();
  for (const bool in_pieces : {false, true}) {
    Pair p(in_pieces, random);
    for (int i = 0; i < 12; ++i) {
      const std::uint32_t step = p.ranks[0]->exchange.next_step();
      for (auto& r : p.ranks) p.draw(*r);
      p.dispatch(step);
      p.combine(step);
      p.check_sums();
    }
  }
  return 0;
}
