// Derives where an AllToAll stands on a GPU from the words in its memory, and in the proxy's: they say what has come, and so what has not.
#include <array>
#include <cstring>
#include <set>

#include "../../host/atomic.h"
#include "exchange.h"

namespace pplx::cuda {

Standing Exchange::standing() const {
  std::unique_lock<std::mutex> lock(mutex_);   // not for long: a call or a reset must not wait for what follows
  const Common k = common_;
  const Relays relays = relays_;
  const std::shared_ptr<SharedMemory> own = memory_.own;
  const std::shared_ptr<HostHeap> host = host_;
  lock.unlock();
  const Config& c = k.c;
  const Heap& h = k.heap;
  const OnDevice on(device_);
  const CaptureElsewhere capture;
  const auto control = std::make_unique<Control>();
  std::vector<char> memory(h.counts + h.counts_bytes * c.in_flight);
  std::vector<std::array<std::uint32_t, kNumbersOfVec16>> headers(std::size_t{c.in_flight} * c.world);
  const auto header_of = [&](std::uint32_t set, std::uint32_t peer) -> auto& { return headers[std::size_t{set} * c.world + peer]; };
  const auto copy = [&](void* to, const void* from, std::size_t bytes) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, own_stream_), "cudaMemcpyAsync");
  };
  copy(control.get(), k.control, sizeof *control);
  copy(memory.data() + h.arrival, own->data() + h.arrival, memory.size() - h.arrival);
  const auto mapped = [&](std::uint32_t peer) { return ((k.remote | k.dead) >> peer & 1) == 0; };
  for (std::uint32_t set = 0; set < c.in_flight; ++set)
    for (std::uint32_t peer = 0; peer < c.world; ++peer)
      if (mapped(peer)) copy(&header_of(set, peer), own->data() + h.slot_at(c, set, Op::Combine, peer), kVec16Bytes);
  check(cudaStreamSynchronize(own_stream_), "cudaStreamSynchronize");

  Standing s;
  s.device = "cuda";
  s.launches.emplace_back(1, explain(1));
  if (c.max_tokens > 1) s.launches.emplace_back(c.max_tokens, explain(c.max_tokens));
  s.generation = k.generation;
  s.next_step = static_cast<std::uint32_t>(control->step >> 32);
  const auto tagged = [&](std::uint32_t tag) {   // as an arrival word
    return tag == kBlank || tag == 0 ? 0 : arrival_word(k.generation, tag - tag_of(k.generation, 0));
  };
  // Notes a word that a rank of this node raised, or the proxy.
  const auto note_raised = [&](std::int64_t& last, std::uint32_t set, Signal signal, std::uint32_t peer) {
    const auto word = [&](const char* words) { return reinterpret_cast<const std::uint64_t*>(words + h.arrival_at(c, set, signal, peer)); };
    note_step(last, *word(memory.data()), k.generation);
    if (host != nullptr && (k.remote >> peer & 1) != 0)
      note_step(last, load_acquire(word(host->arrivals() != nullptr ? host->arrivals() : host->memory())), k.generation);
  };
  for (std::vector<std::int64_t>& heard : s.heard) heard.assign(c.world, -1);
  for (std::uint32_t set = 0; set < c.in_flight; ++set)
    for (std::uint32_t peer = 0; peer < c.world; ++peer) {
      std::array<std::uint32_t, kNumbersOfVec16> rows;
      std::memcpy(&rows, memory.data() + h.rows_at(c, set, peer), sizeof rows);
      note_step(s.heard[0][peer], tagged(rows.back()), k.generation);
      if (mapped(peer)) note_step(s.heard[1][peer], tagged(header_of(set, peer).back()), k.generation);
      note_raised(s.heard[0][peer], set, Signal::Dispatch, peer);
      note_raised(s.heard[1][peer], set, Signal::Combine, peer);
    }
  for (std::uint32_t set = 0; set < c.in_flight; ++set) {
    const std::uint64_t word = control->closed[set];
    const auto step = static_cast<std::uint32_t>(word >> 32);
    if (!is_open(word, step)) continue;
    // Returns the ranks from which it is to come: of a dispatch also relays of this node, for their sources.
    const auto missing = [&](Op op, std::uint64_t none) {
      const std::vector<std::int64_t>& heard = s.heard[op == Op::Combine];
      std::set<std::uint32_t> ranks;
      for (std::uint32_t peer = 0; peer < c.world; ++peer) {
        if (peer == c.rank || ((k.dead | none) >> peer & 1) != 0) continue;
        if (heard[peer] >= 0 && step_reached(static_cast<std::uint32_t>(heard[peer]), step)) continue;
        const bool passed_on = op == Op::Dispatch && c.node_ranks != 0 && (k.remote >> peer & 1) != 0;
        const std::uint32_t by = passed_on ? relays.rank[relays.holder[peer]] : peer;
        ranks.insert(by == c.rank ? peer : by);
      }
      return std::vector<std::uint32_t>(ranks.begin(), ranks.end());
    };
    Standing::Open open{step, phase_name(Phase::DispatchRecv), true, -1, missing(Op::Dispatch, 0), "the dispatch block"};
    const bool combines = (word & kClosing) != 0;
    if (open.peers.empty() && combines)
      open = {step, phase_name(Phase::CombineRecv), true, -1, missing(Op::Combine, relays.skipped), "the combine block"};
    open.running = combines || !open.peers.empty();
    s.open.push_back(std::move(open));
  }
  return s;
}

}  // namespace pplx::cuda
