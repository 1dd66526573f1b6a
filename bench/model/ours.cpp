#include "ours.h"

#include <sys/mman.h>

#include <new>
#include <string>
#include <utility>

#include "host/atomic.h"
#include "protocol/immediate.h"
#include "proxy/proxy.h"

namespace pplx::model {
namespace {

constexpr std::uint32_t kStep = 1;

// A rank's heap: its words are used, its blocks only have places, so nearly all of it is never touched.
class Pages {
 public:
  explicit Pages(std::size_t bytes) : bytes_(bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<char*>(at);
  }
  ~Pages() { munmap(data_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  char* data() const { return data_; }

 private:
  std::size_t bytes_;
  char* data_ = nullptr;
};

// The proxy's fabric: every call takes host time, on a clock of the rank's own that runs ahead of the simulation's.
class ModelFabric final : public Fabric {
 public:
  ModelFabric(Simulation& simulation, std::uint32_t rank, double write_us)
      : simulation_(simulation), costs_(simulation.costs()), rank_(rank), write_us_(write_us) {}

  std::string name() const override { return "model"; }
  int endpoints() const override { return static_cast<int>(costs_.nics); }
  std::string endpoint_name(int endpoint) const override { return "nic" + std::to_string(endpoint); }
  Blob address() const override { return {}; }
  void insert_peer(int, const Blob&) override {}
  void remove_peer(int) override {}
  LocalRegion register_memory(void*, std::size_t, std::size_t) override { return {}; }
  void unregister_memory(const LocalRegion&) override {}
  RemoteRegion import_region(int, const Blob&) const override { return {}; }
  std::string describe_error(const Completion&) const override { return "nothing fails here"; }

  Post write(const Write& write) override {
    clock += write_us_;
    const auto nic = static_cast<std::uint32_t>(write.endpoint);
    if (simulation_.under_way(rank_, nic) >= costs_.depth) return Post::Again;
    Message message;
    message.source = rank_;
    message.target = static_cast<std::uint32_t>(write.peer);
    message.nic = nic;
    message.bytes = write.bytes;
    message.immediate = write.immediate;
    message.context = write.context;
    simulation_.post(clock, message);
    last_post = clock;
    return Post::Accepted;
  }

  int poll(Completion* out, int capacity) override {
    clock += costs_.poll_us * costs_.nics;
    int n = 0;
    for (; n < capacity && !inbox.empty(); ++n) {
      clock += costs_.completion_us;
      out[n] = inbox.front();
      inbox.pop_front();
      if (out[n].kind == Completion::Kind::Arrived) seen.emplace_back(out[n].immediate, clock);
    }
    return n;
  }

  double clock = 0, last_post = 0;
  std::deque<Completion> inbox;                             // completions that the NICs have written for the host
  std::vector<std::pair<std::uint32_t, double>> seen;       // immediates that the proxy has read, and when

 private:
  Simulation& simulation_;
  const FabricCosts& costs_;
  const std::uint32_t rank_;
  const double write_us_;
};

}  // namespace

struct Ours::World final : Ranks {
  struct Mail {
    double at;
    std::uint32_t peer, rows, parts;
  };
  struct Posted {
    double at;
    Message message;
  };
  struct Arrival {
    double at;
    std::uint32_t rows;
  };
  struct Rank {
    Rank(World& world, std::uint32_t rank)
        : config(config_of_rank(world.shape, world.costs, rank)),
          heap(heap_of(config)),
          pages(heap.bytes),
          fabric(world.simulation, rank, world.simulation.costs().post_us + world.costs.block_us),
          proxy(fabric, world.costs.shard_bytes) {}

    void take(double at, std::uint32_t rows, bool completes) {
      arrivals.push_back({at, rows});
      blocks += completes ? 1 : 0;
    }

    Config config;
    Heap heap;
    Pages pages;
    ModelFabric fabric;
    Proxy proxy;
    std::vector<Mail> mail;             // the kernel's announcements, in order
    std::size_t announced = 0;
    std::vector<std::uint32_t> parts;   // indexed by source: parts of its block that the kernel has heard of
    std::vector<Arrival> arrivals;      // as the kernel sees them: of blocks, or of their parts
    std::uint32_t blocks = 0;           // that are there
    double sent = 0;                    // when the send kernel is done
    bool running = false;               // a wake is to come, and the thread is busy until then
    double busy_us = 0;
    std::uint32_t remote = 0;
  };

  World(const Shape& s, const Routing& r, const FabricCosts& f, const OurCosts& c)
      : shape(s), routing(r), costs(c), simulation(f, s.ranks) {
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      ranks.push_back(std::make_unique<Rank>(*this, rank));
      Rank& here = *ranks.back();
      ProxyObject object;
      object.config = here.config;
      object.memory = here.pages.data();
      object.peers.resize(shape.ranks);
      for (std::uint32_t peer = 0; peer < shape.ranks; ++peer)
        if (!shape.same_node(rank, peer)) {
          object.peers[peer] = std::make_unique<RemoteRegion>();
          ++here.remote;
        }
      here.proxy.attach(std::move(object));
    }
  }

  // A heap where only the words matter. Whole blocks, whose size does not follow from a slot's, are of one row: so 1,024 heaps fit.
  static Config config_of_rank(const Shape& shape, const OurCosts& costs, std::uint32_t rank) {
    Config c = config_of(shape, rank);
    c.part_bytes = costs.part_bytes;
    if (c.part_bytes == 0) c.max_tokens = 1;
    return c;
  }

  std::uint32_t rows(Op op, std::uint32_t from, std::uint32_t to) const {
    return op == Op::Dispatch ? routing.rows_to(from, to) : routing.rows_to(to, from);
  }
  std::uint64_t* word(Rank& rank, std::uint64_t at) const { return reinterpret_cast<std::uint64_t*>(rank.pages.data() + at); }

  // The send kernels. A dispatch stores token after token, so all blocks fill at one pace; a combine stores block after block, rank
  // + 1's first, its own last.
  void start(Op op_, double begin_) {
    op = op_;
    begin = begin_;
    const KernelTime send = op == Op::Dispatch ? costs.dispatch_send : costs.combine_send;
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      Rank& here = *ranks[rank];
      std::uint64_t all = 0, before = 0;
      for (std::uint32_t peer = 0; peer < shape.ranks; ++peer) all += rows(op, rank, peer);
      for (std::uint32_t i = 1; i <= shape.ranks; ++i) {
        const std::uint32_t peer = (rank + i) % shape.ranks, n = rows(op, rank, peer);
        const auto stored = [&](std::uint32_t of_it) {
          const double rows_before = op == Op::Combine ? before + of_it : n == 0 ? 0 : static_cast<double>(all) * of_it / n;
          return begin + send.fixed_us + rows_before * send.row_us;
        };
        if (shape.same_node(rank, peer))
          ranks[peer]->take(stored(n) + (peer == rank ? 0 : costs.mapped_us), n, true);
        else
          for_each_part(here, n, [&](std::uint32_t part, std::uint32_t first, std::uint32_t rows_in) {
            const double at = stored(rows_in);
            if (costs.by_gpu)
              post_by_gpu(here, peer, part, first, rows_in, at + costs.gpu_post_us);
            else
              here.mail.push_back({at + costs.mailbox_us, peer, n, part + 1});
          });
        before += n;
      }
      here.sent = begin + send.fixed_us + all * send.row_us;
      std::stable_sort(posts.begin(), posts.end(), [](const Posted& a, const Posted& b) { return a.at < b.at; });
      for (const Posted& post : posts) simulation.post(post.at, post.message);
      posts.clear();
      std::stable_sort(here.mail.begin(), here.mail.end(), [](const Mail& a, const Mail& b) { return a.at < b.at; });
      if (!here.mail.empty()) wake_for(here, here.mail.front().at);
    }
  }

  // visit(part, before which row it begins, before which it ends), of a block of n rows; one that is whole is a part.
  template <typename Visit>
  void for_each_part(const Rank& here, std::uint32_t n, const Visit& visit) const {
    const PartSizes sizes = part_sizes(here.config, op);
    const std::uint32_t parts = here.heap.in_parts ? sizes.count(n) : 1;
    for (std::uint32_t part = 0; part < parts; ++part)
      visit(part, part == 0 ? 0 : sizes.begin(part), part + 1 == parts ? n : sizes.begin(part + 1));
  }

  // A put with a signal, of the rows [first, end). The warp that completes a part posts it, so no warp waits for another's post.
  void post_by_gpu(Rank& here, std::uint32_t peer, std::uint32_t part, std::uint32_t first, std::uint32_t end, double at) {
    const BlockLayout layout = block_layout(config_of(shape, here.config.rank), op);
    Message message;
    message.source = here.config.rank;
    message.target = peer;
    message.nic = peer % simulation.costs().nics;
    message.bytes = layout.bytes(end) - (part == 0 ? 0 : layout.row_at(first));
    message.context = end - first;
    posts.push_back({at, message});
    here.fabric.last_post = std::max(here.fabric.last_post, at);
    ++writes_by_gpu;
    bytes_by_gpu += message.bytes;
  }

  void landed(double now, const Message& message) override {
    if (costs.by_gpu) {
      Rank& here = *ranks[message.target];
      const std::uint32_t n = rows(op, message.source, message.target);
      const std::uint32_t parts = here.heap.in_parts ? part_sizes(here.config, op).count(n) : 1;
      here.take(now + costs.signal_us, static_cast<std::uint32_t>(message.context), ++here.parts[message.source] == parts);
      return;
    }
    Completion completion;
    completion.kind = Completion::Kind::Arrived;
    completion.immediate = message.immediate;
    notify(now, message.target, completion);
  }
  void acknowledged(double now, const Message& message) override {
    if (costs.by_gpu) return;
    Completion completion;
    completion.context = message.context;
    notify(now, message.source, completion);
  }
  void notify(double now, std::uint32_t rank, const Completion& completion) {
    Rank& here = *ranks[rank];
    here.fabric.inbox.push_back(completion);
    if (here.running) return;
    here.running = true;
    wake_for(here, now);
  }
  // An idle thread that polls is on average half a round away from looking.
  void wake_for(const Rank& here, double at) {
    simulation.wake(std::max(at + round_us(here) / 2, here.fabric.clock), here.config.rank);
  }
  double scan_us(const Rank& here) const { return costs.word_us * kOps * here.remote; }
  double round_us(const Rank& here) const { return scan_us(here) + simulation.costs().poll_us * simulation.costs().nics; }

  // One step of the production proxy. It takes the time that its calls take.
  void woken(double now, std::uint32_t rank) override {
    Rank& here = *ranks[rank];
    if (here.running && now < here.fabric.clock) return;   // a mail's wake, while the thread is at work
    for (; here.announced < here.mail.size() && here.mail[here.announced].at <= now; ++here.announced) {
      const Mail& mail = here.mail[here.announced];
      std::uint64_t last = 0;   // as a block that is never written again
      announce<HostAtomics>(mailbox_entry(here.heap, here.config, here.pages.data(), kStep, op, mail.peer), 1,
                            {kStep, mail.rows, false, mail.parts}, last);
    }
    here.fabric.clock = now + scan_us(here);
    here.fabric.seen.clear();
    const bool moved = here.proxy.step();
    here.busy_us += here.fabric.clock - now;
    for (const auto& [immediate, at] : here.fabric.seen) raise(here, unpack(immediate), at);
    here.running = moved || !here.fabric.inbox.empty();
    if (here.running)
      simulation.wake(here.fabric.clock, rank);
    else if (here.announced < here.mail.size())
      wake_for(here, here.mail[here.announced].at);
  }

  // The kernel hears what the proxy has raised: a block's arrival word, if this immediate was its last shard's, or a count of
  // parts.
  void raise(Rank& here, const Immediate& immediate, double at) {
    const std::uint32_t n = rows(immediate.op, immediate.source, here.config.rank);
    if (here.heap.in_parts) {
      const PartSizes sizes = part_sizes(here.config, immediate.op);
      const std::uint64_t counted =
          *word(here, here.heap.count_at(here.config, here.heap.pieces, 0, immediate.op, immediate.source));
      const std::uint32_t there = pieces_in(counted, 1, kStep), all = sizes.count(n);
      for (std::uint32_t& known = here.parts[immediate.source]; known < there; ++known) {
        const std::uint32_t end = known + 1 == all ? n : sizes.begin(known + 1);
        here.take(at + costs.arrival_us, end - std::min(n, sizes.begin(known)), known + 1 == all);
      }
      return;
    }
    std::uint64_t& raised = *word(here, here.heap.arrival_at(here.config, 0, signal_of(immediate.op), immediate.source));
    if (raised != arrival_word(1, kStep)) return;
    raised = 0;   // ours alone to read, so that a block counts once
    here.take(at + costs.arrival_us, n, true);
  }

  // The same GPU receives rows as they come, once it has sent its own.
  double finish(Rank& here) {
    const KernelTime recv = op == Op::Dispatch ? costs.dispatch_recv : costs.combine_recv;
    std::sort(here.arrivals.begin(), here.arrivals.end(), [](const Arrival& a, const Arrival& b) { return a.at < b.at; });
    double busy = here.sent;
    for (const Arrival& arrival : here.arrivals) busy = std::max(busy, arrival.at) + arrival.rows * recv.row_us;
    return busy + recv.fixed_us - begin;
  }

  Result run(Op which) {
    Result result;
    writes_by_gpu = bytes_by_gpu = 0;
    const std::vector<std::uint64_t> before = bytes_in(simulation, shape.ranks);
    for (const std::unique_ptr<Rank>& rank : ranks) {
      rank->mail.clear();
      rank->arrivals.clear();
      rank->blocks = 0;
      rank->announced = 0;
      rank->parts.assign(shape.ranks, 0);
      rank->busy_us = 0;
      result.writes -= rank->proxy.stats().writes;
      result.again -= rank->proxy.stats().again;
      result.bytes_posted -= rank->proxy.stats().bytes;
    }
    start(which, end + 1);
    end = simulation.run(*this);
    for (const std::unique_ptr<Rank>& rank : ranks) {
      result.finished.push_back(finish(*rank));
      result.posted = std::max(result.posted, rank->fabric.last_post - begin);
      result.writes += rank->proxy.stats().writes;
      result.again += rank->proxy.stats().again;
      result.bytes_posted += rank->proxy.stats().bytes;
      result.host_us = std::max(result.host_us, rank->busy_us);
      arrived += rank->blocks;
    }
    result.writes += writes_by_gpu;
    result.bytes_posted += bytes_by_gpu;
    result.free = *std::max_element(result.finished.begin(), result.finished.end());
    note_bytes(result, before, bytes_in(simulation, shape.ranks));
    if (arrived != std::uint64_t{shape.ranks} * shape.ranks) throw std::logic_error("a block did not arrive");
    arrived = 0;
    return result;
  }

  const Shape shape;
  const Routing& routing;
  const OurCosts costs;
  Simulation simulation;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<Posted> posts;   // posts of a rank's kernels, in the order of these times
  Op op = Op::Dispatch;
  double begin = 0, end = 0;
  std::uint64_t arrived = 0, writes_by_gpu = 0, bytes_by_gpu = 0;
};

Ours::Ours(const Shape& shape, const Routing& routing, const FabricCosts& fabric, const OurCosts& costs)
    : world_(std::make_unique<World>(shape, routing, fabric, costs)) {}
Ours::~Ours() = default;
Result Ours::dispatch() { return world_->run(Op::Dispatch); }
Result Ours::combine() { return world_->run(Op::Combine); }

}  // namespace pplx::model
