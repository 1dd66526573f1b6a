// Ranks as threads of one process, with helper threads and real proxy threads, through the blocking calls, over mapped memory and
// real providers, for ThreadSanitizer. It does not see inside a provider, only the calls.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../proxy/chaos.h"
#include "../../proxy/libfabric/libfabric_fabric.h"
#include "../../proxy/libfabric/loader.h"
#include "../../proxy/proxy_thread.h"
#include "../../src/cpu/exchange.h"
#include "../../src/host/question.h"
#include "check.h"
#include "plain_fabric.h"

using namespace pplx;
using namespace pplx::cpu;

namespace {

// A network of queues, one per rank. They are in order, unlike real networks: the subject here is which threads synchronise.
struct QueueNet {
  struct Inbox {
    std::mutex mutex;
    std::deque<Completion> completions;
  };
  explicit QueueNet(std::size_t ranks) : inboxes(ranks) {}
  std::vector<Inbox> inboxes;
};

class QueueFabric final : public test::PlainFabric {
 public:
  // Rank r's first proxy polls the queue r * proxies, its second one the next.
  QueueFabric(QueueNet& net, int rank, int proxy, int proxies) : net_(net), rank_(rank), proxy_(proxy), proxies_(proxies) {}
  int endpoints() const override { return 2; }

  Post write(const Write& w) override {
    std::memcpy(reinterpret_cast<char*>(w.target->base + w.target_offset), static_cast<char*>(w.source->base) + w.source_offset,
                w.bytes);
    Completion arrived, sent;
    arrived.kind = Completion::Kind::Arrived;
    arrived.immediate = w.immediate;
    sent.kind = Completion::Kind::Sent;
    sent.context = w.context;
    push(w.peer, arrived);
    push(rank_, sent);
    return Post::Accepted;
  }

  int poll(Completion* out, int capacity) override {
    QueueNet::Inbox& inbox = net_.inboxes[rank_ * proxies_ + proxy_];
    std::lock_guard<std::mutex> lock(inbox.mutex);
    int n = 0;
    for (; n < capacity && !inbox.completions.empty(); inbox.completions.pop_front()) out[n++] = inbox.completions.front();
    return n;
  }

 private:
  void push(int rank, const Completion& completion) {
    QueueNet::Inbox& inbox = net_.inboxes[rank * proxies_ + proxy_];
    std::lock_guard<std::mutex> lock(inbox.mutex);
    inbox.completions.push_back(completion);
  }

  QueueNet& net_;
  const int rank_, proxy_, proxies_;
};

struct Scene {
  const char* name;
  std::uint32_t ranks, node_size;
  std::uint32_t steps;
  std::string provider;        // "": queues
  std::string chaos;           // "": none
  std::uint32_t replicas = 1;
  std::uint32_t proxies = 1;   // proxies of each rank
  std::uint32_t slot_rows = 0; // 0: blocks are whole
  bool relays = false;         // rows go once to each node
  Wire wire = Wire::Native;    // results of quantised ones are not checked
};

struct Rank {
  Config config;
  std::unique_ptr<std::uint64_t[]> heap;
  std::vector<std::uint64_t> rails;
  std::unique_ptr<Exchange> exchange;
  struct Carrier {
    std::unique_ptr<ProxyThread> proxy;
    Blob address;
    LocalRegion region;
  };
  std::vector<Carrier> carriers;
  char* memory() const { return reinterpret_cast<char*>(heap.get()); }
};

void walk(Rank& rank, std::uint32_t steps, std::uint64_t seed) {
  const Config& c = rank.config;
  check::Random random(seed + c.rank / c.replicas);   // replicas draw the same
  Exchange& e = *rank.exchange;
  for (std::uint32_t s = 0; s < steps; ++s) {
    const auto tokens = static_cast<std::uint32_t>(random.integer(0, c.max_tokens));
    std::vector<std::int32_t> ids(std::size_t{tokens} * c.top_k);
    std::vector<float> weights(ids.size()), x(std::size_t{tokens} * c.hidden), y(x.size(), std::nanf(""));
    std::vector<float> tail(ids.size(), std::nanf(""));
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random.integer(-1, c.num_experts - 1));
    for (float& w : weights) w = random.real(-1, 1);
    for (float& v : x) v = random.real(-4, 4);

    Tokens in;
    in.plan = std::make_shared<const Plan>(make_plan(c, ids.data(), tokens, nullptr, &e.blocks().rails().rep));
    in.x = {reinterpret_cast<const char*>(x.data()), std::uint64_t{c.hidden} * 4};
    in.weights = weights.data();
    const std::uint32_t step = e.dispatch_send(in, {});

    std::vector<float> out(std::size_t{c.max_rows} * c.hidden), scales(out.size()), out_weights(c.max_rows);
    std::vector<std::int32_t> counts(c.num_experts), offsets(c.num_experts + 1), rank_of(c.max_rows), token_of(c.max_rows);
    DispatchOutput o;
    o.x = reinterpret_cast<char*>(out.data());
    o.scales = reinterpret_cast<char*>(scales.data());
    o.scale = scale_strides(c);
    o.counts = counts.data();
    o.offsets = offsets.data();
    o.weights = out_weights.data();
    o.src_rank = rank_of.data();
    o.src_token = token_of.data();
    ExpertOutputs back;
    back.received = e.dispatch_recv(step, o, {});
    back.expert_out = {reinterpret_cast<const char*>(out.data()), std::uint64_t{c.hidden} * 4};
    const std::vector<float> sent_weights = weights;
    back.release = s % 7 == 5;
    if (s % 2 == 1 && !back.release) {
      for (float& w : weights) w = random.real(-1, 1);
      back.uses_weights = true;
      back.weights = weights.data();
      back.plan = in.plan;
    }
    back.has_tail = s % 3 == 1 && !back.release;
    back.tail = out_weights.data();   // each choice's weight, as it was sent
    e.combine_send(step, back, {});
    e.combine_recv(step, {reinterpret_cast<char*>(y.data()), std::uint64_t{c.hidden} * 4, false, tail.data()}, {});
    if (back.release) continue;

    for (std::size_t i = 0; back.has_tail && i < ids.size(); ++i) CHECK_EQ(tail[i], ids[i] < 0 ? 0.0f : sent_weights[i]);
    for (std::uint32_t t = 0; t < tokens && !quantised(c.wire); ++t)
      for (std::uint32_t h = 0; h < c.hidden; ++h) {
        float total = 0, of_node = 0;
        for (std::uint32_t r = 0; r < c.world; ++r) {
          float part = 0;
          if (r % std::max(1u, c.node_ranks) == 0) total += of_node, of_node = 0;
          for (std::uint32_t k = 0; k < c.top_k; ++k)
            if (const std::int32_t id = ids[t * c.top_k + k]; id >= 0 && rank_of_expert(c, static_cast<std::uint32_t>(id)) == r)
              part += weights[t * c.top_k + k] * x[std::size_t{t} * c.hidden + h];
          of_node += part;
        }
        total += of_node;
        CHECK_EQ(y[std::size_t{t} * c.hidden + h], total);
      }
  }
}

std::shared_ptr<Fabric> open_fabric(const Scene& scene, QueueNet& net, std::uint32_t rank, std::uint32_t proxy) {
  if (scene.provider.empty())
    return std::make_shared<QueueFabric>(net, static_cast<int>(rank), static_cast<int>(proxy), static_cast<int>(scene.proxies));
  libfabric::Options options;
  options.provider = scene.provider;
  options.endpoints = 2;
  options.peers_on_this_host = true;
  std::shared_ptr<Fabric> fabric = std::make_shared<LibfabricFabric>(options);
  if (scene.chaos.empty()) return fabric;
  return std::make_shared<ChaosFabric>(std::move(fabric), parse_chaos(scene.chaos), static_cast<int>(rank));
}

// Every call goes to the proxy thread, as the bindings do it.
void wire(const Scene& scene, QueueNet& net, std::vector<Rank>& ranks) {
  const auto each = [&](const auto& f) {
    for (Rank& rank : ranks)
      for (std::uint32_t i = 0; i < scene.proxies; ++i)
        CHECK(rank.carriers[i].proxy->call([&](Proxy& proxy, Fabric& fabric) { f(rank, i, proxy, fabric); }));
  };
  for (Rank& rank : ranks)
    for (std::uint32_t i = 0; i < scene.proxies; ++i)
      rank.carriers.push_back({std::make_unique<ProxyThread>(open_fabric(scene, net, rank.config.rank, i), 512, -1), {}, {}});
  each([&](Rank& rank, std::uint32_t i, Proxy&, Fabric& fabric) { rank.carriers[i].address = fabric.address(); });
  each([&](Rank& rank, std::uint32_t i, Proxy&, Fabric& fabric) {
    for (const std::uint32_t peer : rank.exchange->blocks().network_peers())
      fabric.insert_peer(static_cast<int>(peer), ranks[peer].carriers[i].address);
    const Blocks::Region region = rank.exchange->blocks().region();
    rank.carriers[i].region = fabric.register_memory(region.memory, region.bytes, region.shared_bytes);
  });
  each([&](Rank& rank, std::uint32_t i, Proxy& proxy, Fabric& fabric) {
    ProxyObject object;
    object.config = rank.config;
    object.memory = rank.memory();
    object.region = rank.carriers[i].region;
    object.targets = rank.exchange->blocks().targets_there();
    object.peers.resize(ranks.size());
    for (const std::uint32_t number : rank.exchange->blocks().network_peers()) {
      if (proxy_of(rank.config.rank, number, scene.proxies) != i) continue;
      const Blob& description = ranks[number].carriers[i].region.description;
      auto remote = std::make_unique<RemoteRegion>(fabric.import_region(static_cast<int>(number), description));
      if (scene.provider.empty()) remote->base = reinterpret_cast<std::uint64_t>(ranks[number].exchange->blocks().region().memory);
      object.peers[number] = std::move(remote);
    }
    proxy.attach(std::move(object));
  });
}

void play(const Scene& scene, std::uint64_t seed) {
  Config config;
  config.world = scene.ranks;
  config.num_experts = 7;
  config.top_k = 3;
  config.hidden = 64;
  config.max_tokens = 16;
  config.dtype = Dtype::Float32;
  config.wire = scene.wire;
  config.replicas = scene.replicas;
  config.max_rows = scene.ranks * config.max_tokens * config.top_k;
  if (scene.relays) config.node_ranks = scene.node_size;
  if (scene.slot_rows > 0) {
    config.whole_tokens = scene.slot_rows;
    config.slot_bytes = least_slot_bytes(config);
    CHECK(in_pieces(config));
  }

  QueueNet net(scene.ranks * scene.proxies);
  std::vector<Rank> ranks(scene.ranks);
  for (std::uint32_t r = 0; r < scene.ranks; ++r) {
    ranks[r].config = config;
    ranks[r].config.rank = r;
    for (std::uint32_t p = 0; p < scene.ranks; ++p) ranks[r].config.remote_peers += r / scene.node_size != p / scene.node_size;
    ranks[r].heap = std::make_unique<std::uint64_t[]>(heap_of(ranks[r].config).bytes / 8 + 8);
  }
  for (Rank& rank : ranks) {
    Memory memory;
    memory.own = rank.memory();
    for (std::uint32_t p = 0; p < scene.ranks; ++p) {
      memory.peers.push_back(rank.config.rank / scene.node_size == p / scene.node_size ? ranks[p].memory() : nullptr);
      if (scene.relays) memory.nodes.push_back(static_cast<std::uint16_t>(p / scene.node_size));
    }
    rank.exchange = std::make_unique<Exchange>(rank.config, memory, 2, 60.0);
    rank.rails.resize(rank.exchange->blocks().relay_bytes(rank.config.rank) / 8);
  }
  for (Rank& rank : ranks) {   // without relays they are not looked at
    std::vector<char*> areas;
    for (Rank& mate : ranks) areas.push_back(reinterpret_cast<char*>(mate.rails.data()));
    rank.exchange->lay_relays(std::move(areas));
  }
  if (scene.node_size < scene.ranks) wire(scene, net, ranks);
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) threads.emplace_back([&rank, &scene, seed] { walk(rank, scene.steps, seed); });
  std::atomic<bool> over{false};
  std::thread asking([&] {   // as dump and metrics do
    for (; !over.load(); std::this_thread::sleep_for(std::chrono::milliseconds(1)))
      for (const Rank& rank : ranks) CHECK(std::string(rank.exchange->standing().device) == "cpu" && rank.exchange->counters().counted);
  });
  for (std::thread& thread : threads) thread.join();
  over = true;
  asking.join();
  for (Rank& rank : ranks)
    for (Rank::Carrier& carrier : rank.carriers) CHECK(carrier.proxy->close(5.0));
  std::printf("%s: %u steps of %u ranks\n", scene.name, scene.steps, scene.ranks);
  std::fflush(stdout);
}

// A provider that hangs: its poll returns only when told to.
class HangingFabric final : public test::PlainFabric {
 public:
  int endpoints() const override { return 1; }
  Post write(const Write&) override { return Post::Again; }
  int poll(Completion*, int) override {
    polls.fetch_add(1, std::memory_order_relaxed);
    while (hangs.load(std::memory_order_acquire)) {
      inside.store(true, std::memory_order_release);
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    inside.store(false, std::memory_order_release);
    return 0;
  }
  void hang() {
    hangs = true;
    while (!inside.load(std::memory_order_acquire)) sched_yield();
  }
  std::atomic<bool> hangs{false}, inside{false};
  std::atomic<int> polls{0};
};

// While nothing is attached it polls some fifty times a second, and a command wakes it.
void test_an_unused_proxy_sleeps() {
  const auto fabric = std::make_shared<HangingFabric>();
  ProxyThread thread(fabric, 4096, -1);
  for (int round = 0; round < 3; ++round) {
    CHECK(thread.call([](Proxy& proxy, Fabric&) { CHECK(proxy.unused()); }));
    const int before = fabric->polls.load();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK(thread.takes_turns(20.0));
    CHECK(fabric->polls.load() - before < 500);
  }
  std::chrono::nanoseconds fastest = std::chrono::seconds(1);
  for (int i = 0; i < 30; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const auto begun = std::chrono::steady_clock::now();
    CHECK(thread.call([](Proxy&, Fabric&) {}));
    fastest = std::min<std::chrono::nanoseconds>(fastest, std::chrono::steady_clock::now() - begun);
  }
  CHECK(fastest < std::chrono::milliseconds(5));   // the rest of a nap is 15
}

void test_a_provider_that_hangs() {
  const auto fabric = std::make_shared<HangingFabric>();
  {
    ProxyThread thread(fabric, 4096, -1);
    CHECK(thread.takes_turns(20.0));
    CHECK(!thread.standing().stands_still);
    fabric->hang();
    CHECK(!thread.takes_turns(0.1));
    CHECK(thread.standing().stands_still);
    CHECK(!thread.call([](Proxy&, Fabric&) {}, 0.02));
    fabric->hangs = false;
    CHECK(thread.takes_turns(20.0));
    fabric->hang();
    CHECK(!thread.close(0.02));
  }
  fabric->hangs = false;   // the thread that was left behind ends by itself, and frees the rest
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (fabric.use_count() > 1) {
    CHECK(std::chrono::steady_clock::now() < end);
    sched_yield();
  }
}

// It holds no other thread up, and is not asked again meanwhile.
void test_a_question_without_an_answer() {
  const auto in = [](int ms) { return Question::Clock::now() + std::chrono::milliseconds(ms); };
  std::promise<void> end;
  const std::shared_future<void> ended = end.get_future().share();
  Question question;
  CHECK(question.ask([ended] { return ended.wait(), "late"; }));
  CHECK(!question.answer(in(20)));
  CHECK(!question.ask([] { return "another"; }));
  CHECK(!question.answer(in(20)));
  end.set_value();
  CHECK(question.answer(in(20000)) == "late");
  CHECK(question.ask([]() -> std::string { throw std::runtime_error("there is none"); }));
  CHECK(question.answer(in(20000)) == "");
}

}  // namespace

int main() {
  const std::uint64_t seed = check::seed();
  const std::string chaos = "seed=" + std::to_string(seed) + ",delay=0.1,delay_us=100";
  test_a_question_without_an_answer();
  test_a_provider_that_hangs();
  test_an_unused_proxy_sleeps();
  play({"mapped", 4, 4, 1660, "", ""}, seed);
  play({"queues", 3, 2, 500, "", ""}, seed);
  play({"queues of two proxies", 4, 1, 160, "", "", 1, 2}, seed);
  play({"relays and queues", 5, 2, 160, "", "", 1, 1, 0, true}, seed);
  play({"quantised", 3, 2, 160, "", "", 1, 1, 0, false, Wire::FP8}, seed);
  play({"in pieces", 4, 4, 330, "", "", 1, 1, 4}, seed);
  play({"queues in pieces", 3, 2, 160, "", "", 1, 1, 2}, seed);
  play({"queues of two proxies in pieces", 4, 1, 60, "", "", 1, 2, 6}, seed);
  play({"replicas in pieces", 4, 2, 100, "", "", 2, 1, 2}, seed);
  play({"replicas", 4, 4, 330, "", "", 4}, seed);
  play({"replicas and queues", 4, 2, 160, "", "", 2}, seed);
  try {
    libfabric::library();
  } catch (const FabricError& error) {
    std::printf("skipped: %s\n", error.what());
    return 0;
  }
  play({"shm", 4, 1, 830, "shm", ""}, seed);
  play({"mapped and shm", 4, 2, 430, "shm", ""}, seed);
  play({"relays and shm", 4, 2, 330, "shm", "", 1, 1, 0, true}, seed);
  play({"shm in chaos", 4, 1, 160, "shm", chaos}, seed);
  play({"shm in chaos, two proxies", 4, 1, 100, "shm", chaos, 1, 2}, seed);
  play({"shm in chaos, in pieces", 4, 1, 50, "shm", chaos, 1, 1, 4}, seed);
  play({"tcp", 4, 2, 160, "tcp", ""}, seed);
}
