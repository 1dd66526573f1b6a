#include "rows.h"

#include <random>
#include <stdexcept>

namespace pplx::model {
namespace {

constexpr std::uint64_t kCountBytes = 8;

}  // namespace

struct Rows::World final : Ranks {
  struct Rank {
    std::uint32_t expected = 0, come = 0;   // puts from other nodes
    double last = 0;                        // when the last of them had landed
    double sent = 0;
  };

  World(const Shape& s, const Routing& r, const FabricCosts& f, const RowsCosts& c, std::uint64_t seed)
      : shape(s), routing(r), costs(c), simulation(f, s.ranks), ranks(s.ranks), random(seed) {}

  // FP8 with a float scale per 128 and 16 bytes of header; bfloat16 back.
  std::uint64_t row_bytes(bool dispatch) const {
    return dispatch ? shape.hidden + shape.hidden / 128 * 4 + 16 : std::uint64_t{shape.hidden} * 2;
  }
  std::uint32_t rows(bool dispatch, std::uint32_t from, std::uint32_t to) const {
    return dispatch ? routing.copies_to(from, to) : routing.copies_to(to, from);
  }
  std::uint32_t experts_of(std::uint32_t rank) const { return local_experts(config_of(shape, rank), rank); }

  // The targets of a rank's rows, in the order in which they leave.
  std::vector<std::uint32_t> order(bool dispatch, std::uint32_t from) {
    std::vector<std::uint32_t> targets;
    for (std::uint32_t to = 0; to < shape.ranks; ++to) targets.insert(targets.end(), rows(dispatch, from, to), to);
    // Not std::shuffle: those differ
    for (std::size_t left = targets.size(); left > 1; --left) std::swap(targets[left - 1], targets[random() % left]);
    return targets;
  }

  void put(double at, std::uint32_t from, std::uint32_t to, std::uint64_t bytes) {
    if (shape.same_node(from, to)) return;
    Message m;
    m.source = from;
    m.target = to;
    m.nic = puts++ % simulation.costs().nics;
    m.bytes = bytes;
    simulation.post(at + costs.gpu_post_us, m);
    ++result.writes;
    result.bytes_posted += bytes;
    ++ranks[to].expected;
    result.posted = std::max(result.posted, at - begin);
  }

  void send(bool dispatch, std::uint32_t from) {
    const KernelTime& kernel = dispatch ? costs.dispatch : costs.combine;
    double at = begin + kernel.fixed_us / 2;
    for (const std::uint32_t to : order(dispatch, from)) {
      at += kernel.row_us / 2;
      put(at, from, to, row_bytes(dispatch));
    }
    // A count for each of the target's experts, or a flag for each of one's own.
    for (std::uint32_t to = 0; to < shape.ranks; ++to)
      for (std::uint32_t expert = experts_of(dispatch ? to : from); expert > 0; --expert) put(at, from, to, kCountBytes);
    ranks[from].sent = at;
  }

  void landed(double now, const Message& message) override {
    Rank& there = ranks[message.target];
    ++there.come;
    there.last = now + costs.signal_us;
  }
  void acknowledged(double, const Message&) override {}
  void woken(double, std::uint32_t) override {}

  Result run(bool dispatch) {
    const std::vector<std::uint64_t> before = bytes_in(simulation, shape.ranks);
    result = Result();
    ranks.assign(shape.ranks, Rank());
    begin = end + 1;
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) send(dispatch, rank);
    end = std::max(begin, simulation.run(*this));
    const KernelTime& kernel = dispatch ? costs.dispatch : costs.combine;
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      std::uint32_t received = 0;
      for (std::uint32_t from = 0; from < shape.ranks; ++from) received += rows(dispatch, from, rank);
      const Rank& here = ranks[rank];
      if (here.come != here.expected) throw std::logic_error("a rank did not get all");
      // Rows are taken out as they come; those of the last moment are few.
      const double busy = here.sent + received * kernel.row_us / 2;
      result.finished.push_back(std::max(busy, here.last) + kernel.fixed_us / 2 - begin);
    }
    result.free = *std::max_element(result.finished.begin(), result.finished.end());
    note_bytes(result, before, bytes_in(simulation, shape.ranks));
    return result;
  }

  const Shape shape;
  const Routing& routing;
  const RowsCosts costs;
  Simulation simulation;
  std::vector<Rank> ranks;
  std::mt19937_64 random;
  Result result;
  std::uint32_t puts = 0;
  double begin = 0, end = 0;
};

Rows::Rows(const Shape& shape, const Routing& routing, const FabricCosts& fabric, const RowsCosts& costs, std::uint64_t seed)
    : world_(std::make_unique<World>(shape, routing, fabric, costs, seed)) {}
Rows::~Rows() = default;
Result Rows::dispatch() { return world_->run(true); }
Result Rows::combine() { return world_->run(false); }

}  // namespace pplx::model
