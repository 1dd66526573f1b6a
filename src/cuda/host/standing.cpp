// Derives where an AllToAll stands on a GPU from the words in its memory, and in the proxy's: they say what has come, and so what has not.
#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include "../../host/atomic.h"
#include "exchange.h"

namespace pplx::cuda {
namespace {

// When halves of the steps from `first` on began and ended. Without counts nothing is known.
class Latest {
 public:
  Latest(std::vector<KeptStep> kept, std::uint32_t first, std::uint64_t now) : kept_(std::move(kept)), first_(first), now_(now) {}

  // Seconds since then; below 0: it has not, or that is not known.
  double since_begun(std::uint32_t step, Op op, bool sends) const {
    const KeptStep* const s = of(step);
    const std::uint32_t half = half_of(op, sends);
    return s != nullptr && s->has_begun(half) ? between(s->begun[half], now_) : -1;
  }
  double since_ended(std::uint32_t step, Op op, bool sends) const {
    const KeptStep* const s = of(step);
    const std::uint32_t half = half_of(op, sends);
    return s != nullptr && s->has_ended(half) ? between(s->ended[half], now_) : -1;
  }
  // From its dispatch until its combine had come.
  double took(std::uint32_t step) const {
    const KeptStep* const s = of(step);
    const std::uint32_t last = half_of(Op::Combine, false);
    return s != nullptr && s->has_ended(last) ? between(s->begun[0], s->ended[last]) : -1;
  }

 private:
  const KeptStep* of(std::uint32_t step) const {
    const std::uint32_t place = step - first_;
    return place < kept_.size() && kept_[place].number == step ? &kept_[place] : nullptr;
  }
  static double between(std::uint64_t from, std::uint64_t until) { return static_cast<double>(until - std::min(from, until)) / 1e9; }

  const std::vector<KeptStep> kept_;
  const std::uint32_t first_;
  const std::uint64_t now_;
};

}  // namespace

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
  check(cudaStreamSynchronize(own_stream_), "cudaStreamSynchronize");
  const auto next = static_cast<std::uint32_t>(control->step >> 32);
  // Before the words, so that what a half that has ended waited for is there in them.
  std::vector<KeptStep> kept(k.kept == nullptr ? 0 : kLastSteps);
  std::uint64_t made = 0;
  StreamEvent now(cudaEventDefault);
  if (!kept.empty()) {
    const std::uint32_t place = (next - kLastSteps) % kKeptSteps, before_end = std::min(kLastSteps, kKeptSteps - place);
    copy(kept.data(), k.kept + place, before_end * sizeof kept[0]);
    copy(kept.data() + before_end, k.kept, (kLastSteps - before_end) * sizeof kept[0]);
    copy(&made, &k.counters->made, sizeof made);
    now.record(own_stream_);
  }
  copy(memory.data() + h.arrival, own->data() + h.arrival, memory.size() - h.arrival);
  const auto mapped = [&](std::uint32_t peer) { return ((k.remote | k.dead) >> peer & 1) == 0; };
  for (std::uint32_t set = 0; set < c.in_flight; ++set)
    for (std::uint32_t peer = 0; peer < c.world; ++peer)
      if (mapped(peer)) copy(&header_of(set, peer), own->data() + h.slot_at(c, set, Op::Combine, peer), kVec16Bytes);
  check(cudaStreamSynchronize(own_stream_), "cudaStreamSynchronize");

  const std::uint64_t since_made = kept.empty() ? 0 : static_cast<std::uint64_t>(1e9 * now.seconds_since(*made_));
  const Latest latest(std::move(kept), next - kLastSteps, made + since_made);
  Standing s;
  s.device = "cuda";
  s.launches.emplace_back(1, explain(1));
  if (c.max_tokens > 1) s.launches.emplace_back(c.max_tokens, explain(c.max_tokens));
  s.generation = k.generation;
  s.next_step = next;
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
    const auto in_half = [&](Phase phase, Op op, bool sends) -> Standing::Open {
      const double ago = latest.since_ended(step, op, sends), since = latest.since_begun(step, op, sends);
      return {step, phase_name(phase), ago < 0 && since >= 0, ago < 0 ? since : ago, {}, ""};
    };
    const auto awaiting = [&](Phase phase, Op op, std::vector<std::uint32_t> peers, const char* what) -> Standing::Open {
      return {step, phase_name(phase), true, latest.since_begun(step, op, false), std::move(peers), what};
    };
    std::vector<std::uint32_t> blocks = missing(Op::Dispatch, 0);
    if (latest.since_begun(step, Op::Dispatch, true) >= 0 && latest.since_begun(step, Op::Dispatch, false) < 0)
      s.open.push_back(in_half(Phase::DispatchSend, Op::Dispatch, true));
    else if (!blocks.empty())
      s.open.push_back(awaiting(Phase::DispatchRecv, Op::Dispatch, std::move(blocks), "the dispatch block"));
    else if ((word & kClosing) != 0)
      s.open.push_back(awaiting(Phase::CombineRecv, Op::Combine, missing(Op::Combine, relays.skipped), "the combine block"));
    else if (latest.since_begun(step, Op::Combine, true) >= 0)
      s.open.push_back(in_half(Phase::CombineSend, Op::Combine, true));
    else
      s.open.push_back(in_half(Phase::DispatchRecv, Op::Dispatch, false));
  }
  for (std::uint32_t step = s.next_step - kLastSteps; step != s.next_step; ++step)
    if (const double took = latest.took(step); took >= 0) s.last.push_back({step, took});
  return s;
}

}  // namespace pplx::cuda
