// The chaos fabric alone, over a fabric and a clock that the test controls: what it may do to a write, and what it must not.
#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../../proxy/arrivals.h"
#include "../../proxy/chaos.h"
#include "check.h"
#include "plain_fabric.h"

using namespace pplx;

namespace {

// Keeps every write until the test decides its fate.
class InnerFabric final : public test::PlainFabric {
 public:
  std::string name() const override { return "inner"; }
  int endpoints() const override { return 3; }
  Blob address() const override { return {1, 2}; }
  std::string describe_error(const Completion& c) const override { return "inner error " + std::to_string(c.error); }

  Post write(const Write& w) override {
    if (broken) throw FabricError("no route");
    if (busy > 0) {
      --busy;
      return Post::Again;
    }
    CHECK(w.source_offset + w.bytes <= w.source->bytes);
    CHECK(!w.more);   // the next write may come much later
    char* to = reinterpret_cast<char*>(w.target->base + w.target_offset);
    if (w.bytes > 0) std::memcpy(to, static_cast<const char*>(w.source->base) + w.source_offset, w.bytes);
    writes.push_back(w);
    return Post::Accepted;
  }
  int poll(Completion* out, int capacity) override {
    int n = 0;
    for (; n < capacity && !completions.empty(); completions.pop_front()) out[n++] = completions.front();
    return n;
  }

  void finish(const Write& w, int error = 0) {
    Completion c;
    c.kind = error == 0 ? Completion::Kind::Sent : Completion::Kind::Failed;
    c.context = w.context;
    c.error = error;
    completions.push_back(c);
  }
  void arrive(std::uint32_t immediate) {
    Completion c;
    c.kind = Completion::Kind::Arrived;
    c.has_context = false;
    c.immediate = immediate;
    completions.push_back(c);
  }

  std::vector<Write> writes;
  std::deque<Completion> completions;
  int busy = 0;
  bool broken = false;
};

struct World {
  explicit World(const ChaosOptions& options, int rank = 0)
      : inner(std::make_shared<InnerFabric>()), chaos(inner, options, rank, [this] { return time; }), memory(1 << 16),
        there(1 << 16) {
    std::iota(memory.begin(), memory.end(), char(1));
    region = chaos.register_memory(memory.data(), memory.size(), memory.size());
    remote.base = reinterpret_cast<std::uint64_t>(there.data());
    remote.bytes = there.size();
  }
  Write write_of(std::uint64_t context, std::size_t at, std::size_t bytes, const Immediate& immediate, int peer = 1) {
    Write w;
    w.peer = peer;
    w.source = &region;
    w.source_offset = at;
    w.bytes = bytes;
    w.target = &remote;
    w.target_offset = at;
    w.immediate = pack(immediate);
    w.context = context;
    w.more = true;
    return w;
  }
  void post(const Write& w) {
    while (chaos.write(w) == Post::Again) {}
  }
  std::vector<Completion> poll(int capacity = 64) {
    std::vector<Completion> out(static_cast<std::size_t>(capacity));
    out.resize(static_cast<std::size_t>(chaos.poll(out.data(), capacity)));
    return out;
  }
  void later(int us) { time += std::chrono::microseconds(us); }

  std::shared_ptr<InnerFabric> inner;
  ChaosFabric::Clock::time_point time{};
  ChaosFabric chaos;
  std::vector<char> memory, there;
  LocalRegion region;
  RemoteRegion remote;
};

ChaosOptions quiet() { return parse_chaos("delay=0,shuffle=0,split=0,duplicate=0,replay=0,again=0"); }

// Without settings the chaos fabric changes nothing.
void nothing() {
  World w(quiet());
  for (std::uint64_t i = 0; i < 100; ++i) {
    CHECK(w.chaos.write(w.write_of(i, i * 10, 10, {Op::Dispatch, 0, 0, 1, 0, 1})) == Post::Accepted);
    CHECK(w.poll().empty());
    CHECK_EQ(w.inner->writes.size(), std::size_t{1});
    CHECK_EQ(w.inner->writes[0].immediate, pack({Op::Dispatch, 0, 0, 1, 0, 1}));
    w.inner->finish(w.inner->writes[0]);
    w.inner->arrive(77);
    w.inner->writes.clear();
    const std::vector<Completion> seen = w.poll();
    CHECK_EQ(seen.size(), std::size_t{2});
    CHECK(seen[0].kind == Completion::Kind::Sent && seen[0].context == i);
    CHECK(seen[1].kind == Completion::Kind::Arrived && seen[1].immediate == 77 && !seen[1].has_context);
  }
  const ChaosCounts& c = w.chaos.counts();
  CHECK_EQ(c.delayed + c.shuffled + c.split + c.duplicated + c.replayed + c.refused, std::uint64_t{0});
  CHECK_EQ(c.failed + c.swallowed + c.lost, std::uint64_t{0});
}

// Under any chaos each write completes once, after its last part; all of its bytes are there; and at the other side every block
// completes once. Returns a log that distinguishes runs.
std::vector<std::uint64_t> everything(const std::string& options, std::uint64_t seed, ChaosCounts& total) {
  check::Random random(seed);
  World w(parse_chaos(options + ",seed=" + std::to_string(seed)));
  World receiver(parse_chaos(options + ",seed=" + std::to_string(seed)), 1);
  std::map<std::uint64_t, std::size_t> parts;      // keyed by context of the inner fabric: parts that it still has
  std::vector<std::uint64_t> log;
  ShardMask masks[4];
  std::uint32_t completed[4] = {};
  std::vector<Write> under_way;
  const std::uint32_t steps = 60;
  std::uint64_t outstanding = 0;
  for (std::uint32_t step = 1; step <= steps; ++step) {
    // Four objects, each block in shards of its own number: also sixteen, which cannot be cut further.
    std::uint64_t contexts = 0;
    for (std::uint32_t object = 0; object < 4; ++object) {
      const auto shards = static_cast<std::uint32_t>(object == 3 ? 16 : object + 1);
      const std::size_t bytes = static_cast<std::size_t>(random.integer(0, 40));
      for (std::uint32_t shard = 0; shard < shards; ++shard) {
        const std::size_t at = (object * 16 + shard) * 64;
        std::memset(w.there.data() + at, 0, 64);
        // The caller's own descriptions end with the call.
        auto region = std::make_unique<LocalRegion>(w.region);
        auto remote = std::make_unique<RemoteRegion>(w.remote);
        Write x = w.write_of(object * 16 + shard, at, bytes, {Op::Dispatch, object, 0, step, shard, shards});
        x.source = region.get();
        x.target = remote.get();
        w.post(x);
        ++outstanding;
        ++contexts;
      }
    }
    std::vector<bool> sent(64, false);
    while (outstanding > 0 || completed[0] < step || completed[1] < step || completed[2] < step || completed[3] < step) {
      w.later(static_cast<int>(random.integer(0, 40)));
      receiver.time = w.time;
      w.inner->busy = random.chance(0.1) ? 1 : 0;
      for (const Completion& c : w.poll(static_cast<int>(random.integer(1, 8)))) {
        CHECK(c.kind == Completion::Kind::Sent);
        CHECK(!sent[c.context]);
        sent[c.context] = true;
        --outstanding;
        log.push_back(c.context);
      }
      for (const Write& x : w.inner->writes) {
        under_way.push_back(x);
        receiver.inner->arrive(x.immediate);
      }
      w.inner->writes.clear();
      while (!under_way.empty() && random.chance(0.7)) {
        const auto which = static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(under_way.size()) - 1));
        const Write x = under_way[which];
        under_way.erase(under_way.begin() + static_cast<long>(which));
        w.inner->finish(x);
        // It had not completed yet: at least one part of it finishes only now.
        CHECK(!sent[x.source_offset / 64]);
      }
      for (const Completion& c : receiver.poll()) {
        const Immediate i = unpack(c.immediate);
        if (!same_step(step, i)) continue;   // a replay
        const ShardMask::Outcome outcome = masks[i.object].add(step, i.shard, i.shards);
        CHECK(outcome != ShardMask::Outcome::Inconsistent);
        completed[i.object] += outcome == ShardMask::Outcome::Complete;
        log.push_back(c.immediate);
      }
    }
    CHECK_EQ(contexts, std::uint64_t{22});
    for (std::uint32_t object = 0; object < 4; ++object) CHECK_EQ(completed[object], step);
  }
  for (const World* side : {&w, &receiver}) {
    const ChaosCounts& c = side->chaos.counts();
    total.delayed += c.delayed;
    total.shuffled += c.shuffled;
    total.split += c.split;
    total.duplicated += c.duplicated;
    total.replayed += c.replayed;
    total.refused += c.refused;
  }
  return log;
}

void bytes_arrive_whole() {
  World w(parse_chaos("split=1,delay=1,delay_us=50"));
  for (std::uint32_t step = 1; step <= 200; ++step) {
    std::fill(w.there.begin(), w.there.end(), char(0));
    w.post(w.write_of(9, 100, 3 * step, {Op::Combine, 0, 0, step, 0, 1}));
    for (bool back = false; !back; w.later(7)) {
      for (const Completion& c : w.poll()) back = c.kind == Completion::Kind::Sent;
      for (const Write& x : w.inner->writes) w.inner->finish(x);
      w.inner->writes.clear();
    }
    for (std::size_t i = 0; i < w.there.size(); ++i) CHECK_EQ(w.there[i], i >= 100 && i < 100 + 3 * step ? w.memory[i] : char(0));
  }
  CHECK_EQ(w.chaos.counts().split, std::uint64_t{200});
}

// A copy must not come so late that its three bits of the piece mean another piece, nor outlive its AllToAll.
void copies_do_not_linger() {
  World w(parse_chaos("duplicate=1,replay=1,delay=0,delay_us=1000000,shuffle=0.5"));
  std::set<std::uint32_t> seen;
  std::uint32_t copies = 0;
  const auto look = [&] {
    for (const Completion& c : w.poll()) {
      if (seen.insert(c.immediate).second) continue;
      ++copies;
      CHECK(seen.size() - c.immediate <= 12);   // arrivals since the one that it repeats, with those of three looks in between
    }
  };
  for (std::uint32_t i = 0; i < 2000; ++i) {
    w.inner->arrive(i);
    if (i % 3 == 0) look();   // the clock stands still: nothing but the arrivals makes copies due
  }
  look();
  CHECK_EQ(seen.size(), std::size_t{2000});
  CHECK(copies > 3500);
  CHECK(w.chaos.counts().duplicated == 2000 && w.chaos.counts().replayed == 1999);
  std::vector<char> memory(8);
  w.chaos.register_memory(memory.data(), memory.size(), memory.size());
  for (std::uint32_t i = 2000; i < 2100; ++i) w.inner->arrive(i);
  w.time += std::chrono::seconds(10);
  for (int i = 0; i < 10; ++i, w.later(2000000))
    for (const Completion& c : w.poll()) CHECK(c.immediate >= 2000);
}

void cut_links() {
  for (const bool silent : {false, true}) {
    ChaosOptions options = quiet();
    options.cuts = parse_chaos(silent ? "mute=2-0@3,kill=5-6@0" : "kill=2-0@3,mute=5-6@0").cuts;
    World w(options);
    for (std::uint64_t i = 0; i < 5; ++i) {
      w.post(w.write_of(i, 0, 8, {Op::Dispatch, 0, 0, 1, 0, 1}, 2));
      w.post(w.write_of(100 + i, 0, 8, {Op::Dispatch, 0, 0, 1, 0, 1}, 1));
    }
    w.inner->arrive(pack({Op::Dispatch, 0, 2, 1, 0, 1}));
    w.inner->arrive(pack({Op::Dispatch, 0, 1, 1, 0, 1}));
    std::vector<std::uint64_t> failed;
    int arrived = 0;
    for (int i = 0; i < 3; ++i)
      for (const Completion& c : w.poll()) {
        arrived += c.kind == Completion::Kind::Arrived;
        if (c.kind != Completion::Kind::Failed) continue;
        failed.push_back(c.context);
        CHECK(c.error != 0 && c.has_context);
        CHECK(w.chaos.describe_error(c).find("peer 2: chaos cut the link") != std::string::npos);
      }
    CHECK_EQ(w.inner->writes.size(), std::size_t{8});
    CHECK_EQ(arrived, silent ? 1 : 2);
    CHECK_EQ(w.chaos.counts().lost, silent ? std::uint64_t{1} : std::uint64_t{0});
    CHECK_EQ(failed.size(), silent ? std::size_t{0} : std::size_t{2});
    CHECK_EQ(w.chaos.counts().failed, silent ? std::uint64_t{0} : std::uint64_t{2});
    CHECK_EQ(w.chaos.counts().swallowed, silent ? std::uint64_t{2} : std::uint64_t{0});
    w.chaos.remove_peer(2);
    failed.clear();
    for (const Completion& c : w.poll()) {
      CHECK(c.kind == Completion::Kind::Failed);
      CHECK(w.chaos.describe_error(c).find("peer was removed") != std::string::npos);
      failed.push_back(c.context);
    }
    std::sort(failed.begin(), failed.end());
    CHECK(failed == (silent ? std::vector<std::uint64_t>{3, 4} : std::vector<std::uint64_t>{}));
  }
}

// One peer's writes wait; they overtake none to others.
void late_link() {
  World w(parse_chaos("delay=0,shuffle=0,split=0,again=0,late=0-2@500,late=1-3@900"));
  for (const int peer : {2, 3}) w.post(w.write_of(static_cast<std::uint64_t>(peer), 0, 8, {Op::Dispatch, 0, 0, 1, 0, 1}, peer));
  const auto left = [&] {
    w.poll();
    std::vector<int> peers;
    for (const Write& write : w.inner->writes) peers.push_back(write.peer);
    return peers;
  };
  CHECK(left() == std::vector<int>{3});
  w.later(499);
  CHECK(left() == std::vector<int>{3});
  w.later(1);
  CHECK((left() == std::vector<int>{3, 2}));
}

// The caller hears of an error once, in the inner fabric's words, and not while another part may still read the source.
void errors() {
  World w(parse_chaos("split=1,delay=0,again=0"));
  w.post(w.write_of(42, 0, 100, {Op::Dispatch, 0, 0, 1, 0, 1}));
  CHECK(w.poll().empty());
  const std::vector<Write> parts = std::exchange(w.inner->writes, {});
  CHECK(parts.size() >= 2);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    CHECK(w.poll().empty());
    w.inner->finish(parts[i], i == 0 ? 13 : 0);
  }
  std::vector<Completion> seen = w.poll();
  CHECK_EQ(seen.size(), std::size_t{1});
  CHECK(seen[0].kind == Completion::Kind::Failed && seen[0].context == 42 && seen[0].error == 13);
  CHECK(w.chaos.describe_error(seen[0]).find("inner error 13") != std::string::npos);

  w.inner->broken = true;   // a late post cannot throw at the caller any more
  w.post(w.write_of(43, 0, 100, {Op::Dispatch, 0, 0, 2, 0, 1}));
  seen = w.poll();
  CHECK_EQ(seen.size(), std::size_t{1});
  CHECK(seen[0].kind == Completion::Kind::Failed && seen[0].context == 43);
  CHECK(w.chaos.describe_error(seen[0]).find("no route") != std::string::npos);

  Completion nobodys;
  nobodys.kind = Completion::Kind::Failed;
  nobodys.has_context = false;
  nobodys.error = 5;
  w.inner->completions.push_back(nobodys);
  seen = w.poll();
  CHECK(seen.size() == 1 && !seen[0].has_context && w.chaos.describe_error(seen[0]).find("inner error 5") != std::string::npos);
}

void options() {
  const ChaosOptions o =
      parse_chaos("seed=7,delay=0.5,delay_us=900,shuffle=1,split=0,duplicate=.25,replay=0.125,again=0,kill=0-2@100,mute=3-1@0,"
                  "stall=4@9,late=1-0@30");
  CHECK_EQ(o.seed, std::uint64_t{7});
  CHECK(o.delay == 0.5 && o.delay_us == 900 && o.shuffle == 1 && o.split == 0);
  CHECK(o.duplicate == 0.25 && o.replay == 0.125 && o.again == 0);
  CHECK_EQ(o.cuts.size(), std::size_t{2});
  CHECK(o.cuts[0].a == 0 && o.cuts[0].b == 2 && o.cuts[0].after == 100 && !o.cuts[0].silent);
  CHECK(o.cuts[1].a == 3 && o.cuts[1].b == 1 && o.cuts[1].after == 0 && o.cuts[1].silent);
  CHECK_EQ(o.stalls.size(), std::size_t{1});
  CHECK(o.stalls[0].rank == 4 && o.stalls[0].after == 9);
  CHECK(o.lates.size() == 1 && o.lates[0].from == 1 && o.lates[0].to == 0 && o.lates[0].us == 30);
  CHECK_EQ(to_text(parse_chaos(to_text(o))), to_text(o));
  for (const char* bad : {"", "seed", "seed=", "seed=-1", "seed=x", "seed=1 ", "seed=1,", "seed=99999999999999999999", "speed=1",
                          "delay=2", "delay=-0.5", "delay=0.5x", "delay=nan", "delay=.", "delay=0..1", "delay_us=1.5", "kill=1",
                          "kill=1-2", "kill=1@2", "kill=2-2@1", "kill=0-1024@1", "kill=a-b@1", "kill=1-2@", "stall=1", "stall=1@",
                          "stall=1024@1", "late=1@5", "late=1-1@5"}) {
    try {
      parse_chaos(bad);
      check::fail(__FILE__, __LINE__, std::string("was accepted: ") + bad);
    } catch (const std::invalid_argument& error) {
      CHECK(std::strlen(error.what()) > 10);
    }
  }
}

}  // namespace

int main() {
  const std::uint64_t seed = check::seed();
  nothing();
  ChaosCounts total;
  const std::string hard = "delay=0.3,delay_us=100,shuffle=0.5,split=0.5,duplicate=0.3,replay=0.2,again=0.3";
  for (std::uint64_t i = 0; i < 10; ++i) {
    const std::vector<std::uint64_t> log = everything(hard, seed * 1000 + i, total);
    ChaosCounts again, other;
    if (i == 0) CHECK(everything(hard, seed * 1000, again) == log);
    if (i == 0) CHECK(everything(hard, seed * 1000 + 1, other) != log);
  }
  CHECK(total.delayed > 100 && total.shuffled > 100 && total.split > 100);
  CHECK(total.duplicated > 100 && total.replayed > 100 && total.refused > 100);
  bytes_arrive_whole();
  copies_do_not_linger();
  cut_links();
  late_link();
  errors();
  options();
}
