// One run: some ranks on some nodes, one or more AllToAlls, several generations of steps. If a generation ends in trouble, every
// survivor must name the cause in time; then they reset and go on. Everything follows from the seed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../proxy.h"
#include "sim_fabric.h"
#include "trouble.h"
#include "walker.h"

namespace pplx::sim {

// Names what is late in a steady world: a rank that begins each step later, or writes that land later.
struct Late {
  enum class What : std::uint8_t { None, Rank, Nic, Link };
  What what = What::None;
  std::uint32_t from = 0, to = 0;            // ranks; Nic: `from` is a node, whose writes to and from other nodes are late
  Time by = 0;
};

class World {
 public:
  World(std::uint64_t seed, bool log, Totals& totals);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  void run();                      // throws Violation
  // Steps without trouble. Returns how long each rank waited for each other one, in JSON: what Rank of pplx_comm/top.py has.
  std::string run_steady(std::uint32_t steps, const Late& late);
  std::string describe() const;    // the run in a line

 private:
  // Polls one rank's proxy, or its phases, now and then, and soon after an event.
  struct Actor final : Clock::Task {
    Actor(World& world, std::uint32_t rank, bool proxy) : world(world), rank(rank), proxy(proxy) {}
    void run(std::uint32_t what) override { if (what == epoch) proxy ? world.run_proxy(rank) : world.run_phases(rank); }
    World& world;
    const std::uint32_t rank;
    const bool proxy;
    std::uint32_t epoch = 0;       // events of earlier epochs are void
    Time due = 0, pause = 0;
  };
  // One AllToAll on one rank.
  struct Object {
    Config config;
    std::vector<std::uint64_t> memory;
    std::vector<std::vector<std::uint64_t>> rails;    // an area a generation; a rank that was left out still maps the old ones
    std::unique_ptr<cpu::Exchange> exchange;
    LocalRegion region;
    std::vector<std::unique_ptr<Walker>> walkers;
    std::shared_ptr<const Plan> plan;          // plan of the last step begun
    std::uint32_t begun = 0, closed = 0;       // in this generation
    bool may_overflow = false, overflowed = false, noticed = false;   // in some step begun; in one closed; and it was reported
    std::optional<PeerFailure> failure;
    char* base() { return reinterpret_cast<char*>(memory.data()); }
  };
  struct Rank {
    std::uint32_t number = 0, node = 0;
    bool alive = true;                         // in the survivors' view
    bool running = false;                      // its process does something
    bool left = false;
    bool broken = false;                       // its proxy's fabric threw
    Time slowness = 1;
    Time late = 0;                             // how long it does something else before each step
    std::optional<Time> begins;                // its next step
    std::unique_ptr<SimFabric> fabric;
    std::unique_ptr<Proxy> proxy;
    std::vector<Object> objects;
    std::optional<std::uint32_t> told;         // the rank that the control connections blame
    std::optional<std::uint32_t> port;         // this generation's
    std::uint64_t to_send[kMaxObjects] = {};   // bytes to other nodes, in the steps that all ranks have closed
    Actor* proxy_actor = nullptr;
    Actor* phases_actor = nullptr;
  };
  // An event that happens once.
  struct Moments final : Clock::Task {
    void run(std::uint32_t what) override { (*actions[what])(); actions[what].reset(); }
    std::vector<std::unique_ptr<std::function<void()>>> actions;
  };

  Config draw_config(std::uint32_t object, Random& replicas, Random& pieces);
  void draw_pieces(Config& config, Random& pieces) const;
  void draw_nodes(Random& relays);
  void add_rank(std::uint32_t number, std::uint32_t node);
  void build();
  void build_steady(const Late& late);
  void make_object(std::uint32_t number, const Config& config);
  void lay_relays(std::uint32_t number);
  void connect();                              // fabrics and proxies of a generation
  void start(Rank& rank);
  void run_proxy(std::uint32_t rank);
  void run_phases(std::uint32_t rank);
  bool begin_step(Rank& rank, Object& object);
  bool comes_late(Rank& rank);
  bool advance(Rank& rank, Object& object);
  void schedule(Actor& actor, bool progress);
  void wake(Actor& actor);
  void wake_node(const Rank& rank);
  void later(Time delay, std::function<void()> action);
  std::vector<Counters> counters() const;
  std::shared_ptr<Step> step_of(std::uint32_t object, std::uint32_t number);

  void plan_trouble();
  void strike();
  void failed(Rank& rank, Object& object, const PeerFailure& failure);
  void tell(Rank& rank, const Abort& abort, const std::string& message);
  void leave(Rank& rank);
  void stop_fabric(Rank& rank);
  void check_failure(const Rank& rank, const Object& object, const PeerFailure& failure);
  bool waits_for(std::uint32_t rank, std::uint32_t victim) const;
  static std::uint32_t holder_of(std::uint32_t rank, const Object& object, std::uint32_t peer);
  std::uint64_t count_at(const Config& config, std::uint32_t peer) const;
  void set_trap(Trap::Kind kind);
  void damage(Fault fault, const Immediate& immediate, char* block);
  void wake_too_late(Rank& rank);

  void finish_generation();
  void finish_in_trouble();
  void reset();
  void drain();
  void make_stale(Object& object);
  void check_noticed();
  void check_notices();
  void count_bytes(const Config& config, const Step& step);
  void check_bytes();
  bool steps_done() const;
  bool steps_done(const Rank& rank) const;
  bool pump(Time deadline, const std::function<bool()>& done);
  Rank& any_alive();

  Clock clock_;
  Log log_;
  Totals& totals_;
  Random random_;
  const std::uint64_t seed_;
  Network network_;
  Moments moments_;
  std::vector<std::unique_ptr<Actor>> actors_;
  std::vector<Rank> ranks_;
  std::vector<bool> alive_;
  bool long_ = false;                          // has more steps than the bits that travel can tell apart
  bool in_pieces_ = false;                     // some AllToAll is
  std::uint32_t replicas_ = 1;                 // in those AllToAlls that have any
  std::uint32_t node_ranks_ = 0;               // Config::node_ranks of AllToAlls that have whole blocks
  Nodes nodes_;                                // whose rows are added first: the ranks' nodes, or others
  std::uint32_t objects_ = 1, generation_ = 1, generations_ = 1, steps_ = 1;
  int endpoints_ = 1;
  std::uint64_t shard_bytes_ = 0;
  double timeout_ = 0, slow_ = 0;
  double begins_ = 0.5;                        // the chance that a rank begins a step as soon as it can
  Time gossip_ = 0;                            // the longest that the control connections take
  bool resetting_ = false;                     // no rank is in a phase
  bool leaves_ = false;                        // ranks leave in order once they are done
  std::vector<std::map<std::uint32_t, std::shared_ptr<Step>>> scripts_;   // indexed by object: the steps that some rank is still in

  Trouble trouble_ = Trouble::None;
  std::uint32_t victim_ = 0, trouble_step_ = 0, polls_left_ = 0;
  std::optional<Time> struck_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Time> node_raised_;   // (object, node) -> when the first of its ranks raised
  std::vector<bool> late_;                     // indexed by rank: rightly blamed, since it waited for the victim itself
};

}  // namespace pplx::sim
