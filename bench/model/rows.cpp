#include "rows.h"

#include <random>
#include <stdexcept>

namespace pplx::model {
namespace {

constexpr std::uint64_t kCountBytes = 8;

struct World final : Ranks {
  struct Rank {
    std::uint32_t expected = 0, come = 0;   // puts from other nodes
    double last = 0;                        // when the last of them had landed
    double sent = 0;
  };

  World(const Shape& s, const Routing& r, const FabricCosts& f, const RowsCosts& c, bool d, std::uint64_t seed)
      : shape(s), routing(r), kernel(d ? c.dispatch : c.combine), costs(c), dispatch(d), simulation(f, s.ranks), ranks(s.ranks),
        random(seed) {}

  // FP8 with a float scale per 128 and 16 bytes of header; bfloat16 back.
  std::uint64_t row_bytes() const {
    return dispatch ? shape.hidden + shape.hidden / 128 * 4 + 16 : std::uint64_t{shape.hidden} * 2;
  }
  std::uint32_t rows(std::uint32_t from, std::uint32_t to) const {
    return dispatch ? routing.copies_to(from, to) : routing.copies_to(to, from);
  }
  std::uint32_t experts_of(std::uint32_t rank) const { return local_experts(config_of(shape, rank), rank); }

  // The targets of a rank's rows, in the order in which they leave.
  std::vector<std::uint32_t> order(std::uint32_t from) {
    std::vector<std::uint32_t> targets;
    for (std::uint32_t to = 0; to < shape.ranks; ++to) targets.insert(targets.end(), rows(from, to), to);
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
    result.posted = std::max(result.posted, at);
  }

  void send(std::uint32_t from) {
    double at = kernel.fixed_us / 2;
    for (const std::uint32_t to : order(from)) {
      at += kernel.row_us / 2;
      put(at, from, to, row_bytes());
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

  Result run() {
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) send(rank);
    simulation.run(*this);
    for (std::uint32_t rank = 0; rank < shape.ranks; ++rank) {
      std::uint32_t received = 0;
      for (std::uint32_t from = 0; from < shape.ranks; ++from) received += rows(from, rank);
      const Rank& here = ranks[rank];
      if (here.come != here.expected) throw std::logic_error("a rank did not get all");
      // Rows are taken out as they come; those of the last moment are few.
      const double busy = here.sent + received * kernel.row_us / 2;
      result.finished.push_back(std::max(busy, here.last) + kernel.fixed_us / 2);
    }
    result.bytes_landed = simulation.bytes_landed();
    return result;
  }

  const Shape& shape;
  const Routing& routing;
  const KernelTime kernel;
  const RowsCosts& costs;
  const bool dispatch;
  Simulation simulation;
  std::vector<Rank> ranks;
  std::mt19937_64 random;
  Result result;
  std::uint32_t puts = 0;
};

}  // namespace

Result run_rows(const Shape& shape, const Routing& routing, const FabricCosts& fabric, const RowsCosts& costs, Op op,
                std::uint64_t seed) {
  return World(shape, routing, fabric, costs, op == Op::Dispatch, seed).run();
}

}  // namespace pplx::model
