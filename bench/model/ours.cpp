#include "ours.h"

#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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
    message.target = targets[static_cast<std::uint32_t>(write.peer)];
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
  std::vector<std::uint32_t> targets;                       // indexed by peer

 private:
  Simulation& simulation_;
  const FabricCosts& costs_;
  const std::uint32_t rank_;
  const double write_us_;
};

// Peers are ranks, or by node nodes, each with this rank's relay there.
struct World final : Ranks {
  struct Mail {
    double at;
    std::uint32_t peer, rows, parts;
  };
  struct Posted {
    double at;
    Message message;
  };
  struct Arrival {
    double at, rows;
    bool pulled;
  };
  // A mate's partial sums for one source, stored at this relay row after row.
  struct Partials {
    double begin, hop_us;
    std::uint32_t rows;
  };
  // A rank in an operation.
  struct State {
    std::vector<Mail> mail;             // the kernel's announcements, in order
    std::size_t announced = 0;
    std::vector<std::uint32_t> parts;   // indexed by peer: parts of its block that the kernel has heard of
    std::vector<std::vector<Partials>> partials;   // indexed by node, of its rank of this rail
    std::vector<Arrival> arrivals;      // as the kernel sees them: of blocks, or of their parts
    std::uint32_t blocks = 0;           // that are there
    double sent = 0;                    // when the send kernel is done, a relay's work included
    double busy_us = 0;                 // the proxy's thread
  };
  struct Rank : State {
    Rank(World& world, std::uint32_t rank)
        : config(world.config_of_rank(rank)),
          heap(heap_of(config)),
          pages(heap.bytes),
          fabric(world.simulation, rank, world.simulation.costs().post_us + world.costs.block_us),
          proxy(fabric, world.costs.shard_bytes) {}

    void take(double at, double rows, bool completes, bool pulled = false) {
      arrivals.push_back({at, rows, pulled});
      blocks += completes ? 1 : 0;
    }

    Config config;
    Heap heap;
    Pages pages;
    ModelFabric fabric;
    Proxy proxy;
    bool running = false;               // a wake is to come, and the thread is busy until then
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
      object.peers.resize(peers());
      for (std::uint32_t peer = 0; peer < peers(); ++peer) {
        here.fabric.targets.push_back(costs.by_node ? peer * shape.node_size + rank % shape.node_size : peer);
        if (!shape.same_node(rank, here.fabric.targets[peer])) {
          object.peers[peer] = std::make_unique<RemoteRegion>();
          ++here.remote;
        }
      }
      here.proxy.attach(std::move(object));
    }
  }

  std::uint32_t peers() const { return costs.by_node ? shape.nodes() : shape.ranks; }
  std::uint32_t peer_of(std::uint32_t rank) const { return costs.by_node ? shape.node_of(rank) : rank; }

  // A heap where only the words matter. Whole blocks, whose size does not follow from a slot's, are of one row: so 1,024 heaps fit.
  Config config_of_rank(std::uint32_t rank) const {
    Config c = config_of(shape, peer_of(rank));
    c.world = peers();
    c.part_bytes = costs.part_bytes;
    if (c.part_bytes == 0) c.max_tokens = 1;
    return c;
  }

  // Rows that `from` makes for `to`, and those of the block that crosses the network.
  std::uint32_t rows(std::uint32_t from, std::uint32_t to) const {
    return op == Op::Dispatch ? routing.rows_to(from, to) : routing.rows_to(to, from);
  }
  std::uint32_t block_rows(std::uint32_t from, std::uint32_t to) const {
    if (!costs.by_node) return rows(from, to);
    return op == Op::Dispatch ? routing.rows_to_node(from, shape.node_of(to)) : routing.rows_to_node(to, shape.node_of(from));
  }
  std::uint64_t* word(Rank& rank, std::uint64_t at) const { return reinterpret_cast<std::uint64_t*>(rank.pages.data() + at); }

  // The send kernels. A dispatch stores token after token, so all blocks fill at one pace. A combine stores block after block: rank
  // + 1's first, its own last; by node, the next node's ranks first, its own node's last.
  void start() {
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      Rank& here = *ranks[rank];
      const bool relayed = costs.by_node && op == Op::Combine;
      const std::uint32_t first = costs.by_node ? (shape.node_of(rank) + 1) * shape.node_size : rank + 1;
      std::vector<std::pair<std::uint32_t, std::uint32_t>> to;   // ranks, and rows to store
      std::uint64_t all = 0, before = 0;
      for (std::uint32_t i = 0; i < shape.ranks; ++i) {
        const std::uint32_t peer = (first + i) % shape.ranks;
        const bool near = shape.same_node(rank, peer);
        if (costs.by_node && !relayed && !near && here.fabric.targets[peer_of(peer)] != peer) continue;
        to.emplace_back(peer, near || relayed ? rows(rank, peer) : block_rows(rank, peer));
        all += to.back().second;
      }
      for (const auto& block : to) {
        const std::uint32_t peer = block.first, n = block.second;
        const auto stored = [&](std::uint32_t of_it) {
          const double rows_before = op == Op::Combine ? before + of_it : n == 0 ? 0 : static_cast<double>(all) * of_it / n;
          return begin + send.fixed_us + rows_before * send.row_us;
        };
        if (shape.same_node(rank, peer)) {
          ranks[peer]->take(stored(n) + (peer == rank ? 0 : costs.mapped_us), n, true);
        } else if (relayed) {
          const std::uint32_t relay = shape.node_of(rank) * shape.node_size + peer % shape.node_size;
          ranks[relay]->partials[shape.node_of(peer)].push_back({stored(0), relay == rank ? 0 : costs.mapped_us, n});
        } else {
          for_each_part(here, n, [&](std::uint32_t part, std::uint32_t first_row, std::uint32_t end_row) {
            hand_over(here, peer, n, part, first_row, end_row, stored(end_row));
          });
        }
        before += n;
      }
      here.sent = begin + send.fixed_us + all * send.row_us;
    }
    if (costs.by_node && op == Op::Combine)
      for (const std::unique_ptr<Rank>& here : ranks) relay(*here);
    for (const std::unique_ptr<Rank>& here : ranks) {
      std::stable_sort(here->mail.begin(), here->mail.end(), [](const Mail& a, const Mail& b) { return a.at < b.at; });
      if (!here->mail.empty()) wake_for(*here, here->mail.front().at);
    }
    std::stable_sort(posts.begin(), posts.end(), [](const Posted& a, const Posted& b) { return a.at < b.at; });
    for (const Posted& post : posts) simulation.post(post.at, post.message);
  }

  // Once it has sent, a relay adds the partial sums of sources on other nodes, part by part as all mates have stored them.
  void relay(Rank& here) {
    struct Sum {
      double ready, partials;
      std::uint32_t node, part, first, end;
    };
    std::vector<Sum> sums;
    for (std::uint32_t node = 0; node < shape.nodes(); ++node) {
      if (here.partials[node].empty()) continue;
      const std::uint32_t n = block_rows(rank_of(here), here.fabric.targets[node]);
      for_each_part(here, n, [&](std::uint32_t part, std::uint32_t first, std::uint32_t end) {
        Sum sum{0, 0, node, part, first, end};
        for (const Partials& mate : here.partials[node]) {
          const double share = n == 0 ? 0 : static_cast<double>(mate.rows) / n;
          sum.ready = std::max(sum.ready, mate.begin + mate.hop_us + share * end * send.row_us);
          sum.partials += share * (end - first);
        }
        sums.push_back(sum);
      });
    }
    std::stable_sort(sums.begin(), sums.end(), [](const Sum& a, const Sum& b) { return a.ready < b.ready; });
    for (const Sum& sum : sums) {
      const std::uint32_t peer = here.fabric.targets[sum.node];
      here.sent = std::max(here.sent, sum.ready) + sum.partials * recv.row_us + (sum.end - sum.first) * send.row_us;
      hand_over(here, peer, block_rows(rank_of(here), peer), sum.part, sum.first, sum.end, here.sent);
    }
  }
  std::uint32_t rank_of(const Rank& here) const { return here.fabric.targets[here.config.rank]; }

  // To the proxy, or to the NIC: rows [first, end) of a block of n.
  void hand_over(Rank& here, std::uint32_t peer, std::uint32_t n, std::uint32_t part, std::uint32_t first, std::uint32_t end,
                 double at) {
    if (costs.by_gpu)
      post_by_gpu(here, peer, part, first, end, at + costs.gpu_post_us);
    else
      here.mail.push_back({at + costs.mailbox_us, peer_of(peer), n, part + 1});
  }

  // visit(part, before which row it begins, before which it ends), of a block of n rows; one that is whole is a part.
  template <typename Visit>
  void for_each_part(const Rank& here, std::uint32_t n, const Visit& visit) const {
    const PartSizes sizes = part_sizes(here.config, wire);
    const std::uint32_t parts = here.heap.in_parts ? sizes.count(n) : 1;
    for (std::uint32_t part = 0; part < parts; ++part)
      visit(part, part == 0 ? 0 : sizes.begin(part), part + 1 == parts ? n : sizes.begin(part + 1));
  }

  // A put with a signal, of the rows [first, end). The warp that completes a part posts it, so no warp waits for another's post.
  void post_by_gpu(Rank& here, std::uint32_t peer, std::uint32_t part, std::uint32_t first, std::uint32_t end, double at) {
    Config c = here.config;
    c.max_tokens = shape.tokens;
    const BlockLayout layout = block_layout(c, wire);
    Message message;
    message.source = rank_of(here);
    message.target = peer;
    message.nic = peer_of(peer) % simulation.costs().nics;
    message.bytes = layout.bytes(end) - (part == 0 ? 0 : layout.row_at(first));
    message.context = std::uint64_t{first} << 32 | end;
    posts.push_back({at, message});
    here.fabric.last_post = std::max(here.fabric.last_post, at);
    ++result.writes;
    result.bytes_posted += message.bytes;
  }

  void landed(double now, const Message& message) override {
    if (costs.by_gpu) {
      const auto first = static_cast<std::uint32_t>(message.context >> 32), end = static_cast<std::uint32_t>(message.context);
      arrived(*ranks[message.target], peer_of(message.source), first, end, now + costs.signal_us);
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
    simulation.wake(std::max(at + round_us(here) / 2, here.fabric.clock), rank_of(here));
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
      announce<HostAtomics>(mailbox_entry(here.heap, here.config, here.pages.data(), kStep, wire, mail.peer), 1,
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
    const std::uint32_t source = immediate.source;
    const std::uint32_t n = block_rows(here.fabric.targets[source], rank_of(here));
    if (here.heap.in_parts) {
      const PartSizes sizes = part_sizes(here.config, wire);
      const std::uint64_t counted = *word(here, here.heap.count_at(here.config, here.heap.pieces, 0, wire, source));
      const std::uint32_t there = pieces_in(counted, 1, kStep), all = sizes.count(n);
      for (std::uint32_t known = here.parts[source]; known < there; ++known)
        arrived(here, source, std::min(n, sizes.begin(known)), known + 1 == all ? n : sizes.begin(known + 1),
                at + costs.arrival_us);
      return;
    }
    std::uint64_t& raised = *word(here, here.heap.arrival_at(here.config, 0, signal_of(wire), source));
    if (raised != arrival_word(1, kStep)) return;
    raised = 0;   // ours alone to read, so that a block counts once
    arrived(here, source, 0, n, at + costs.arrival_us);
  }

  // Rows [first, end) of a peer's block are there. By node, a dispatch's are passed on: each mate pulls its share of them.
  void arrived(Rank& here, std::uint32_t peer, std::uint32_t first, std::uint32_t end, double at) {
    const std::uint32_t source = here.fabric.targets[peer], n = block_rows(source, rank_of(here));
    const bool completes = ++here.parts[peer] == (here.heap.in_parts ? part_sizes(here.config, wire).count(n) : 1);
    if (!costs.by_node || op == Op::Combine) return here.take(at, end - first, completes);
    for (std::uint32_t i = 0; i < shape.node_size; ++i) {
      const std::uint32_t mate = shape.node_of(rank_of(here)) * shape.node_size + i;
      const double share = n == 0 ? 0 : static_cast<double>(rows(source, mate)) / n;
      const bool pulled = mate != rank_of(here);
      ranks[mate]->take(at + (pulled ? costs.pass_on_us + costs.pull_us : 0), share * (end - first), completes, pulled);
    }
  }

  // The same GPU receives rows as they come, once it has sent its own.
  double finish(Rank& here) {
    std::sort(here.arrivals.begin(), here.arrivals.end(), [](const Arrival& a, const Arrival& b) { return a.at < b.at; });
    const double pull_us = std::max(recv.row_us, block_layout(config_of(shape, 0), wire).row_bytes / costs.pull_bytes_per_us);
    double busy = here.sent;
    for (const Arrival& arrival : here.arrivals)
      busy = std::max(busy, arrival.at) + arrival.rows * (arrival.pulled ? pull_us : recv.row_us);
    return busy + recv.fixed_us - begin;
  }

  Result run(Op what, Op by) {
    op = what;
    wire = by;
    send = op == Op::Dispatch ? costs.dispatch_send : costs.combine_send;
    recv = op == Op::Dispatch ? costs.dispatch_recv : costs.combine_recv;
    begin = end;
    result = {};
    posts.clear();
    for (const std::unique_ptr<Rank>& rank : ranks) {
      static_cast<State&>(*rank) = {};
      rank->parts.resize(peers());
      rank->partials.resize(shape.nodes());
      result.writes -= rank->proxy.stats().writes;
      result.bytes_posted -= rank->proxy.stats().bytes;
    }
    result.bytes_landed -= simulation.bytes_landed();
    start();
    end = simulation.run(*this);
    for (const std::unique_ptr<Rank>& rank : ranks) {
      result.finished.push_back(finish(*rank));
      result.posted = std::max(result.posted, rank->fabric.last_post - begin);
      result.writes += rank->proxy.stats().writes;
      result.bytes_posted += rank->proxy.stats().bytes;
      result.host_us = std::max(result.host_us, rank->busy_us);
      const std::uint32_t blocks = costs.by_node && op == Op::Combine ? shape.node_size + shape.nodes() - 1 : shape.ranks;
      if (rank->blocks != blocks) throw std::logic_error("a block did not arrive");
    }
    result.bytes_landed += simulation.bytes_landed();
    return result;
  }

  const Shape& shape;
  const Routing& routing;
  const OurCosts& costs;
  Op op = Op::Dispatch, wire = Op::Dispatch;   // wire: whose blocks cross the network
  KernelTime send, recv;
  double begin = 0, end = 0;
  Simulation simulation;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<Posted> posts;   // posts of kernels, in the order of these times
  Result result;
};

}  // namespace

std::vector<Result> run_ours(const Shape& shape, const Routing& routing, const FabricCosts& fabric, const OurCosts& costs) {
  World world(shape, routing, fabric, costs);
  Result dispatch = world.run(Op::Dispatch, Op::Dispatch);
  // A proxy takes a combine only behind its dispatch, but a dispatch at once.
  if (costs.combine_fp8) return {dispatch, World(shape, routing, fabric, costs).run(Op::Combine, Op::Dispatch)};
  return {dispatch, world.run(Op::Combine, Op::Combine)};
}

}  // namespace pplx::model
