// The counts of a carrier that kernels drive, as the host sees them between two generations.
#ifdef PPLX_CARRIER
#include <memory>

#include "../../protocol/signals.h"
#include "exchange.h"

namespace pplx::cuda {

std::unique_ptr<PutCounts> Exchange::read_puts() const {
  const OnDevice on(device_);
  auto counts = std::make_unique<PutCounts>();
  copy_now(counts.get(), common_.puts, sizeof *counts, own_stream_);
  return counts;
}

// Reads all of them as they lie there, with the words between, which no put adds to.
std::vector<std::uint64_t> Exchange::read_signals() const {
  const OnDevice on(device_);
  std::vector<std::uint64_t> signals((common_.heap.counts - common_.heap.arrival) / sizeof(std::uint64_t));
  copy_now(signals.data(), common_.blocks + common_.heap.arrival, signals.size() * sizeof signals[0], own_stream_);
  return signals;
}

template <typename Visit>
void Exchange::for_each_signal(const Visit& visit) const {
  const Config& c = config();
  const auto signal_of = [&](std::uint32_t set, Op op, std::uint32_t nth, std::uint32_t peer) {
    return common_.heap.in_pieces ? piece_signal_at(common_.heap, c, set, op, nth, peer) : signal_at(common_.heap, c, set, op, nth, peer);
  };
  for (std::uint32_t set = 0; set < c.in_flight; ++set)
    for (std::uint32_t op = 0; op < kOps; ++op)
      for (std::uint32_t part = 0; part < signals_of(common_.heap, Op(op)); ++part)
        for (std::uint32_t peer = 0; peer < c.world; ++peer)
          visit(set, op, part, peer, (signal_of(set, Op(op), part, peer) - common_.heap.arrival) / sizeof(std::uint64_t));
}

std::vector<std::uint64_t> Exchange::posted() const {
  const auto counts = read_puts();
  std::vector<std::uint64_t> by_peer(config().world);
  for_each_signal([&](std::uint32_t set, std::uint32_t op, std::uint32_t part, std::uint32_t peer, std::size_t) {
    by_peer[peer] += counts->posted[set][op][part][peer];
  });
  return by_peer;
}

std::vector<std::uint64_t> Exchange::landed() const {
  const auto counts = read_puts();
  const std::vector<std::uint64_t> signals = read_signals();
  std::vector<std::uint64_t> by_source(config().world);
  for_each_signal([&](std::uint32_t set, std::uint32_t op, std::uint32_t part, std::uint32_t source, std::size_t number) {
    by_source[source] += signals[number] - counts->base[set][op][part][source];
  });
  return by_source;
}

void Exchange::rebase() {
  const std::vector<std::uint64_t> signals = read_signals();
  const auto counts = std::make_unique<PutCounts>();
  for_each_signal([&](std::uint32_t set, std::uint32_t op, std::uint32_t part, std::uint32_t source, std::size_t number) {
    counts->base[set][op][part][source] = signals[number];
  });
  const OnDevice on(device_);
  copy_now(common_.puts, counts.get(), sizeof *counts, own_stream_);
}

}  // namespace pplx::cuda
#endif
