#include "garden.h"

#include <stdexcept>

#include "writer.h"

namespace pplx::model {
namespace {

enum class Kind : std::uint32_t { Route, Dispatch, Combine, Barrier };

constexpr std::uint64_t kImmediateOnly = 0;

struct World final : Ranks {
  struct Rank {
    explicit Rank(Writer thread) : writer(std::move(thread)) {}
    Writer writer;
    std::uint32_t counts[4] = {};     // immediates read, by kind
    bool known = false;               // the routes are
    double routed = 0;                // and since when
    double payload = 0;               // when the last payload was read
    std::uint32_t expected = 0;       // payload writes
    double finished = 0;
  };

  World(const Shape& s, const Routing& r, const FabricCosts& f, const GardenCosts& c, Kind k)
      : shape(s), routing(r), costs(c), kind(k), simulation(f, s.ranks) {
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
    m.immediate = static_cast<std::uint32_t>(kind);
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

  void start() {
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      Rank& here = ranks[rank];
      const std::vector<std::uint32_t> peers = remote(rank);
      const double at = costs.first_us;
      if (kind == Kind::Combine) {
        here.known = true;
        here.expected = static_cast<std::uint32_t>(peers.size()) * simulation.costs().nics;
        submit(rank, at, by_bytes(rank, peers, Kind::Combine,
                                  [&](std::uint32_t peer) { return routing.copies_to(peer, rank) * combine_row(); }));
        continue;
      }
      for (const std::uint32_t peer : peers) here.expected += 1 + (overflow(peer, rank) > 0 ? simulation.costs().nics : 0);
      submit(rank, at, by_peers(rank, others(rank), Kind::Route, [&](std::uint32_t) { return std::uint64_t{shape.experts} * 4; }));
      submit(rank, at, by_peers(rank, peers, Kind::Dispatch, [&](std::uint32_t peer) {
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
    const std::uint32_t count = ++here.counts[static_cast<int>(what)];
    if (what == Kind::Route && count == shape.ranks - 1) route(rank, at);
    if (what == kind) here.payload = at;
    if (what != Kind::Barrier && here.finished == 0 && here.known && here.counts[static_cast<int>(kind)] == here.expected) {
      const double tail = kind == Kind::Dispatch ? costs.dispatch_tail_us : costs.combine_tail_us;
      here.finished = std::max(here.payload, here.routed) + costs.flag_us + tail;
      WriteList barrier(simulation.costs().nics);
      for (const std::uint32_t peer : others(rank)) barrier[0].push_back(message(rank, peer, 0, Kind::Barrier, kImmediateOnly));
      submit(rank, here.finished + costs.flag_us, std::move(barrier));
    }
  }

  void route(std::uint32_t rank, double at) {
    std::uint64_t received = 0;
    for (std::uint32_t source = 0; source < shape.ranks; ++source) received += routing.copies_to(source, rank);
    ranks[rank].known = true;
    ranks[rank].routed = at + static_cast<double>(received) * costs.route_row_us;
    std::vector<std::uint32_t> peers;
    for (const std::uint32_t peer : remote(rank))
      if (overflow(rank, peer) > 0) peers.push_back(peer);
    if (!peers.empty())
      submit(rank, ranks[rank].routed,
             by_bytes(rank, peers, Kind::Dispatch, [&](std::uint32_t peer) { return overflow(rank, peer) * dispatch_row(); }));
  }

  Result run() {
    start();
    simulation.run(*this);
    Result result;
    for (const Rank& rank : ranks) {
      if (rank.finished == 0) throw std::logic_error("a rank did not finish");
      result.finished.push_back(rank.finished);
      result.posted = std::max(result.posted, rank.writer.last_post);
      result.writes += rank.writer.writes;
      result.bytes_posted += rank.writer.bytes;
      result.host_us = std::max(result.host_us, rank.writer.busy_us);
    }
    result.bytes_landed = simulation.bytes_landed();
    return result;
  }

  const Shape& shape;
  const Routing& routing;
  const GardenCosts& costs;
  const Kind kind;
  Simulation simulation;
  std::vector<Rank> ranks;
};

}  // namespace

Result run_garden(const Shape& shape, const Routing& routing, const FabricCosts& fabric, const GardenCosts& costs, Op op) {
  return World(shape, routing, fabric, costs, op == Op::Dispatch ? Kind::Dispatch : Kind::Combine).run();
}

}  // namespace pplx::model
