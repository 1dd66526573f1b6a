// A network in memory that breaks every promise that the proxy must not rely on: writes land in any order and in pieces,
// completions are shuffled, immediates are repeated, posts are refused. Everything follows from one seed.
#pragma once

#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "check.h"
#include "plain_fabric.h"

namespace pplx::test {

class ShuffleFabric;

// Shared by all ranks of one network.
struct ShuffleNet {
  explicit ShuffleNet(std::uint64_t seed) : random(seed) {}

  struct Flight {
    ShuffleFabric* from;
    int to;
    Write write;
    std::size_t landed = 0;
  };

  bool chance(unsigned one_in) { return below(one_in) == 0; }
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(random.integer(0, static_cast<std::int64_t>(n) - 1)); }
  void deliver_some();
  void land(std::size_t which);

  check::Random random;
  std::vector<ShuffleFabric*> ranks;
  std::vector<Flight> flights;
  std::deque<std::pair<int, std::uint32_t>> old;   // immediates that arrived, for replay
  std::uint64_t refused = 0, repeated = 0, reordered = 0, replayed = 0;
};

class ShuffleFabric final : public PlainFabric {
 public:
  ShuffleFabric(ShuffleNet& net, int rank, int endpoints) : net_(net), rank_(rank), endpoints_(endpoints) {
    if (net.ranks.size() <= static_cast<std::size_t>(rank)) net.ranks.resize(rank + 1);
    net.ranks[rank] = this;
  }

  int endpoints() const override { return endpoints_; }
  Blob address() const override { return {static_cast<std::uint8_t>(rank_)}; }
  std::string describe_error(const Completion&) const override { return "planted failure"; }

  Post write(const Write& write) override {
    if (net_.chance(4)) {
      ++net_.refused;
      return Post::Again;
    }
    net_.flights.push_back({this, write.peer, write, 0});
    return Post::Accepted;
  }

  int poll(Completion* out, int capacity) override {
    net_.deliver_some();
    int n = 0;
    while (n < capacity && !ready.empty()) {
      const std::size_t which = net_.below(ready.size());
      if (which != 0) ++net_.reordered;
      out[n++] = ready[which];
      ready.erase(ready.begin() + static_cast<long>(which));
    }
    return n;
  }

  std::vector<Completion> ready;

 private:
  friend struct ShuffleNet;
  ShuffleNet& net_;
  int rank_, endpoints_;
};

inline void ShuffleNet::deliver_some() {
  for (std::size_t n = below(flights.size() + 1); n > 0 && !flights.empty(); --n) land(below(flights.size()));
  if (!old.empty() && chance(16)) {   // an old immediate arrives once more
    const auto [rank, bits] = old[below(old.size())];
    Completion c;
    c.kind = Completion::Kind::Arrived;
    c.immediate = bits;
    ranks[rank]->ready.push_back(c);
    ++replayed;
  }
}

inline void ShuffleNet::land(std::size_t which) {
  Flight& f = flights[which];
  const Write& w = f.write;
  // The source is read when the data leaves, a piece at a time; it may not be reused before Sent.
  const std::size_t n = chance(3) ? w.bytes - f.landed : below(w.bytes - f.landed + 1);
  if (n > 0)
    std::memcpy(reinterpret_cast<char*>(w.target->base + w.target_offset + f.landed),
                static_cast<const char*>(w.source->base) + w.source_offset + f.landed, n);
  f.landed += n;
  if (f.landed < w.bytes) return;
  Completion arrived;
  arrived.kind = Completion::Kind::Arrived;
  arrived.immediate = w.immediate;
  for (int times = chance(8) ? 2 : 1; times > 0; --times) {
    ranks[f.to]->ready.push_back(arrived);
    if (times == 2) ++repeated;
  }
  old.emplace_back(f.to, w.immediate);
  if (old.size() > 64) old.pop_front();   // eight bits of the step travel, so nothing older than 256 steps can be told apart
  Completion sent;
  sent.kind = Completion::Kind::Sent;
  sent.context = w.context;
  f.from->ready.push_back(sent);
  flights.erase(flights.begin() + static_cast<long>(which));
}

}  // namespace pplx::test
