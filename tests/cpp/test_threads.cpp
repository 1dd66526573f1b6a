// Ranks as threads of one process, with helper threads and real proxy threads, through the blocking calls: what ThreadSanitizer
// should see. Ranks 0 and 1 share memory; rank 2 is behind the proxy.
#include <cmath>
#include <deque>
#include <mutex>
#include <thread>

#include "../../proxy/proxy_thread.h"
#include "../../src/cpu/exchange.h"
#include "check.h"

using namespace pplx;
using namespace pplx::cpu;

namespace {

// A network of queues, one per rank. In order, unlike the real ones: what is tested here is who synchronises with whom.
struct QueueNet {
  struct Inbox {
    std::mutex mutex;
    std::deque<Completion> completions;
  };
  explicit QueueNet(std::size_t ranks) : inboxes(ranks) {}
  std::vector<Inbox> inboxes;
};

class QueueFabric final : public Fabric {
 public:
  QueueFabric(QueueNet& net, int rank) : net_(net), rank_(rank) {}
  std::string name() const override { return "queues"; }
  int endpoints() const override { return 2; }
  std::string endpoint_name(int) const override { return "queue"; }
  Blob address() const override { return {}; }
  void insert_peer(int, const Blob&) override {}
  void remove_peer(int) override {}
  LocalRegion register_memory(void* base, std::size_t bytes) override {
    LocalRegion region;
    region.base = base;
    region.bytes = bytes;
    return region;
  }
  void unregister_memory(const LocalRegion&) override {}
  RemoteRegion import_region(int, const Blob&) const override { return {}; }
  std::string describe_error(const Completion&) const override { return ""; }

  Post write(const Write& w) override {
    std::memcpy(reinterpret_cast<char*>(w.target->base + w.target_offset), static_cast<char*>(w.source->base) + w.source_offset, w.bytes);
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
    QueueNet::Inbox& inbox = net_.inboxes[rank_];
    std::lock_guard<std::mutex> lock(inbox.mutex);
    int n = 0;
    for (; n < capacity && !inbox.completions.empty(); inbox.completions.pop_front()) out[n++] = inbox.completions.front();
    return n;
  }

 private:
  void push(int rank, const Completion& completion) {
    std::lock_guard<std::mutex> lock(net_.inboxes[rank].mutex);
    net_.inboxes[rank].completions.push_back(completion);
  }

  QueueNet& net_;
  int rank_;
};

constexpr std::uint32_t kRanks = 3;

bool together(std::uint32_t a, std::uint32_t b) { return a / 2 == b / 2; }

struct Rank {
  Config config;
  std::unique_ptr<std::uint64_t[]> heap;
  std::unique_ptr<Exchange> exchange;
  std::unique_ptr<ProxyThread> proxy;
  char* memory() const { return reinterpret_cast<char*>(heap.get()); }
};

void walk(Rank& rank, std::uint32_t steps, std::uint64_t seed) {
  const Config& c = rank.config;
  check::Random random(seed + c.rank);
  Exchange& e = *rank.exchange;
  for (std::uint32_t s = 0; s < steps; ++s) {
    const auto tokens = static_cast<std::uint32_t>(random.integer(0, c.max_tokens));
    std::vector<std::int32_t> ids(std::size_t{tokens} * c.top_k);
    std::vector<float> weights(ids.size()), x(std::size_t{tokens} * c.hidden), y(x.size(), std::nanf(""));
    for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random.integer(-1, c.num_experts - 1));
    for (float& w : weights) w = random.real(-1, 1);
    for (float& v : x) v = random.real(-4, 4);

    DispatchInput in;
    in.plan = std::make_shared<const Plan>(make_plan(c, ids.data(), tokens));
    in.x = {reinterpret_cast<const char*>(x.data()), std::uint64_t{c.hidden} * 4};
    in.weights = weights.data();
    const std::uint32_t step = e.dispatch_send(in, {});

    std::vector<float> out(std::size_t{c.max_rows} * c.hidden), out_weights(c.max_rows);
    std::vector<std::int32_t> counts(c.num_experts), offsets(c.num_experts + 1), rank_of(c.max_rows), token_of(c.max_rows);
    DispatchOutput o;
    o.x = reinterpret_cast<char*>(out.data());
    o.counts = counts.data();
    o.offsets = offsets.data();
    o.weights = out_weights.data();
    o.src_rank = rank_of.data();
    o.src_token = token_of.data();
    CombineInput back;
    back.received = e.dispatch_recv(step, o, {});
    back.expert_out = {reinterpret_cast<const char*>(out.data()), std::uint64_t{c.hidden} * 4};
    e.combine_send(step, back, {});
    e.combine_recv(step, {reinterpret_cast<char*>(y.data()), std::uint64_t{c.hidden} * 4, false}, {});

    for (std::uint32_t t = 0; t < tokens; ++t)
      for (std::uint32_t h = 0; h < c.hidden; ++h) {
        float total = 0;
        for (std::uint32_t r = 0; r < c.world; ++r) {
          float part = 0;
          for (std::uint32_t k = 0; k < c.top_k; ++k)
            if (const std::int32_t id = ids[t * c.top_k + k]; id >= 0 && rank_of_expert(c, static_cast<std::uint32_t>(id)) == r)
              part += weights[t * c.top_k + k] * x[std::size_t{t} * c.hidden + h];
          total += part;
        }
        CHECK_EQ(y[std::size_t{t} * c.hidden + h], total);
      }
  }
}

}  // namespace

int main() {
  const std::uint64_t seed = check::seed();
  Config config;
  config.world = kRanks;
  config.num_experts = 7;
  config.top_k = 3;
  config.hidden = 64;
  config.max_tokens = 16;
  config.dtype = Dtype::Float32;
  config.max_rows = kRanks * config.max_tokens * config.top_k;

  QueueNet net(kRanks);
  std::vector<Rank> ranks(kRanks);
  for (std::uint32_t r = 0; r < kRanks; ++r) {
    ranks[r].config = config;
    ranks[r].config.rank = r;
    for (std::uint32_t p = 0; p < kRanks; ++p) ranks[r].config.remote_peers += !together(r, p);
    ranks[r].heap = std::make_unique<std::uint64_t[]>(heap_of(ranks[r].config).bytes / 8 + 8);
  }
  for (Rank& rank : ranks) {
    Exchange::Memory memory;
    memory.own = rank.memory();
    for (std::uint32_t p = 0; p < kRanks; ++p) memory.peers.push_back(together(rank.config.rank, p) ? ranks[p].memory() : nullptr);
    rank.exchange = std::make_unique<Exchange>(rank.config, memory, 2, 60.0);
    rank.proxy = std::make_unique<ProxyThread>(std::make_shared<QueueFabric>(net, static_cast<int>(rank.config.rank)), 512, -1);
    CHECK(rank.proxy->call([&](Proxy& proxy, Fabric& fabric) {
      ProxyObject object;
      object.config = rank.config;
      object.memory = rank.memory();
      object.region = fabric.register_memory(rank.memory(), heap_of(rank.config).bytes);
      object.peers.resize(kRanks);
      for (std::uint32_t p = 0; p < kRanks; ++p) {
        if (together(rank.config.rank, p)) continue;
        object.peers[p] = std::make_unique<RemoteRegion>();
        object.peers[p]->base = reinterpret_cast<std::uint64_t>(ranks[p].memory());
      }
      proxy.attach(std::move(object));
    }));
  }
  const std::uint32_t steps = 1500;
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) threads.emplace_back([&rank, seed] { walk(rank, steps, seed); });
  for (std::thread& thread : threads) thread.join();
  for (Rank& rank : ranks) CHECK(rank.proxy->close(5.0));
  std::printf("%u steps of %u ranks\n", steps, kRanks);
}
