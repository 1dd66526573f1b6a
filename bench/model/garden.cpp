#include "garden.h"

#include <stdexcept>

#include "writer.h"

namespace pplx::model {
namespace {

enum Kind : std::uint32_t { kRoute, kDispatch, kCombine, kBarrier };

constexpr std::uint64_t kImmediateOnly = 0;

}  // namespace

struct Garden::World final : Ranks {
  struct Rank {
    explicit Rank(Writer thread) : writer(std::move(thread)) {}
    Writer writer;
    std::uint32_t counts[4] = {};     // immediates read, by kind
    double routed = 0;                // when the routes were known; 0: not yet
    double payload = 0;               // when the last payload was read
    std::uint32_t expected = 0;       // payload writes
    double finished = 0;
    double free = 0;
  };

  World(const Shape& s, const Routing& r, const FabricCosts& f, const GardenCosts& c)
      : shape(s), routing(r), costs(c), simulation(f, s.ranks) {
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) ranks.emplace_back(Writer(simulation, rank));
  }

  // FP8 with a float scale per 128, bfloat16 back; a dispatch row has 16 bytes more.
  std::uint64_t dispatch_row() const { return shape.hidden + shape.hidden / 128 * 4 + 16; }
  std::uint64_t combine_row() const { return std::uint64_t{shape.hidden} * 2; }

  // Remote ranks, the next node first.
  std::vector<std::uint32_t> remote(std::uint32_t rank) const {
    std::vector<std::uint32_t> peers;
    const std::uint32_t nodes = shape.ranks / shape.node_size;
    for (std::uint32_t i = 1; i < nodes; ++i)
      for (std::uint32_t j = 0; j < shape.node_size; ++j)
        peers.push_back((rank / shape.node_size + i) % nodes * shape.node_size + j);
    return peers;
  }
  std::vector<std::uint32_t> others(std::uint32_t rank) const {
    std::vector<std::uint32_t> peers;
    for (std::uint32_t i = 1; i < shape.ranks; ++i) peers.push_back((rank + i) % shape.ranks);
    return peers;
  }
  Message message(std::uint32_t from, std::uint32_t to, std::uint32_t nic, Kind kind, std::uint64_t bytes) const {
    Message m;
    m.source = from;
    m.target = to;
    m.nic = nic;
    m.immediate = kind;
    m.bytes = bytes;
    return m;
  }
  // The first half of the peers by the first NIC, and so on.
  template <typename Bytes>
  WriteList by_peers(std::uint32_t rank, const std::vector<std::uint32_t>& peers, Kind kind, Bytes bytes) const {
    const std::uint32_t nics = simulation.costs().nics;
    const auto share = (peers.size() + nics - 1) / nics;
    WriteList list(nics);
    for (std::size_t i = 0; i < peers.size(); ++i) {
      const auto nic = static_cast<std::uint32_t>(i / share);
      list[nic].push_back(message(rank, peers[i], nic, kind, bytes(peers[i])));
    }
    return list;
  }
  template <typename Bytes>
  WriteList by_bytes(std::uint32_t rank, const std::vector<std::uint32_t>& peers, Kind kind, Bytes bytes) const {
    const std::uint32_t nics = simulation.costs().nics;
    WriteList list(nics);
    for (std::uint32_t nic = 0; nic < nics; ++nic)
      for (const std::uint32_t peer : peers) list[nic].push_back(message(rank, peer, nic, kind, bytes(peer) / nics));
    return list;
  }
  void submit(std::uint32_t rank, double at, WriteList list) { ranks[rank].writer.submit(at + costs.submit_us, std::move(list)); }

  std::uint32_t overflow(std::uint32_t from, std::uint32_t to) const {
    const std::uint32_t copies = routing.copies_to(from, to);
    return copies > costs.private_copies ? copies - costs.private_copies : 0;
  }

  void start(Kind which) {
    kind = which;
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      Rank& here = ranks[rank];
      here.expected = 0;
      here.routed = here.payload = here.finished = here.free = 0;
      for (std::uint32_t& count : here.counts) count = 0;
      here.writer.busy_us = 0;
      const std::vector<std::uint32_t> peers = remote(rank);
      const double at = begin + costs.first_us;
      if (kind == kCombine) {
        here.routed = begin;
        here.expected = static_cast<std::uint32_t>(peers.size()) * simulation.costs().nics;
        submit(rank, at, by_bytes(rank, peers, kCombine,
                                  [&](std::uint32_t peer) { return routing.copies_to(peer, rank) * combine_row(); }));
        continue;
      }
      for (const std::uint32_t peer : peers) here.expected += 1 + (overflow(peer, rank) > 0 ? simulation.costs().nics : 0);
      submit(rank, at, by_peers(rank, others(rank), kRoute, [&](std::uint32_t) { return std::uint64_t{shape.experts} * 4; }));
      submit(rank, at, by_peers(rank, peers, kDispatch, [&](std::uint32_t peer) {
               return std::min(routing.copies_to(rank, peer), costs.private_copies) * dispatch_row();
             }));
    }
  }

  void landed(double now, const Message& message) override { ranks[message.target].writer.completed(now, message, true); }
  void acknowledged(double now, const Message& message) override { ranks[message.source].writer.completed(now, message, false); }
  void woken(double now, std::uint32_t rank) override {
    for (const Writer::Read& read : ranks[rank].writer.step(now))
      if (read.landed) arrived(rank, static_cast<Kind>(read.message.immediate), read.at);
  }

  void arrived(std::uint32_t rank, Kind what, double at) {
    Rank& here = ranks[rank];
    const std::uint32_t count = ++here.counts[what];
    if (what == kRoute && count == shape.ranks - 1) route(rank, at);
    if (what == kind) here.payload = at;
    if (what == kBarrier && count == shape.ranks - 1) here.free = at;
    if (what != kBarrier && here.finished == 0 && here.routed > 0 && here.counts[kind] == here.expected) {
      const double tail = kind == kDispatch ? costs.dispatch_tail_us : costs.combine_tail_us;
      here.finished = std::max(here.payload, here.routed) + costs.flag_us + tail;
      WriteList barrier(simulation.costs().nics);
      for (const std::uint32_t peer : others(rank)) barrier[0].push_back(message(rank, peer, 0, kBarrier, kImmediateOnly));
      submit(rank, here.finished + costs.flag_us, std::move(barrier));
    }
  }

  void route(std::uint32_t rank, double at) {
    std::uint64_t received = 0;
    for (std::uint32_t source = 0; source < shape.ranks; ++source) received += routing.copies_to(source, rank);
    ranks[rank].routed = at + static_cast<double>(received) * costs.route_row_us;
    std::vector<std::uint32_t> peers;
    for (const std::uint32_t peer : remote(rank))
      if (overflow(rank, peer) > 0) peers.push_back(peer);
    if (!peers.empty())
      submit(rank, ranks[rank].routed,
             by_bytes(rank, peers, kDispatch, [&](std::uint32_t peer) { return overflow(rank, peer) * dispatch_row(); }));
  }

  Result run(Kind which) {
    Result result;
    const std::vector<std::uint64_t> before = bytes_in(simulation, shape.ranks);
    for (const Rank& rank : ranks) {
      result.writes -= rank.writer.writes;
      result.bytes_posted -= rank.writer.bytes;
    }
    begin = end + 1;
    start(which);
    end = simulation.run(*this);
    for (const Rank& rank : ranks) {
      if (rank.finished == 0) throw std::logic_error("a rank did not finish");
      result.finished.push_back(rank.finished - begin);
      result.posted = std::max(result.posted, rank.writer.last_post - begin);
      result.free = std::max(result.free, rank.free - begin);
      result.writes += rank.writer.writes;
      result.bytes_posted += rank.writer.bytes;
      result.host_us = std::max(result.host_us, rank.writer.busy_us);
    }
    note_bytes(result, before, bytes_in(simulation, shape.ranks));
    return result;
  }

  const Shape shape;
  const Routing& routing;
  const GardenCosts costs;
  Simulation simulation;
  std::vector<Rank> ranks;
  Kind kind = kDispatch;
  double begin = 0, end = 0;
};

Garden::Garden(const Shape& shape, const Routing& routing, const FabricCosts& fabric, const GardenCosts& costs)
    : world_(std::make_unique<World>(shape, routing, fabric, costs)) {}
Garden::~Garden() = default;
Result Garden::dispatch() { return world_->run(kDispatch); }
Result Garden::combine() { return world_->run(kCombine); }

}  // namespace pplx::model
