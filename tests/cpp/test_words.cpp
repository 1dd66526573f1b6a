// Words, steps, immediates and the places of everything in the heap.
#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../../proxy/arrivals.h"
#include "../../src/cuda/host/buffer_layout.h"
#include "../../src/protocol/abort.h"
#include "../../src/protocol/immediate.h"
#include "../../src/protocol/mailbox.h"
#include "../../src/protocol/heap_layout.h"
#include "../../src/protocol/signals.h"
#include "check.h"

using namespace pplx;

namespace {

constexpr std::uint32_t kAroundZero[] = {0, 1, 2, 5, 0x7fffffffu, 0x80000000u, 0u - 5u, 0u - 2u, 0u - 1u};

void check_steps(check::Random& random) {
  CHECK(step_reached(5, 5) && step_reached(6, 5) && !step_reached(4, 5));
  CHECK(step_reached(2, 0u - 3u) && !step_reached(0u - 3u, 2));   // across the wrap
  for (std::uint32_t in_flight : {1u, 2u, 4u, 8u})
    for (std::uint32_t first : kAroundZero) {
      Config c;
      c.in_flight = in_flight;
      c.first_step = first;
      // Consecutive steps take the sets in turn, across the wrap too.
      for (std::uint32_t i = 0; i < 20; ++i) CHECK_EQ(set_of(c, first + i + 1), (set_of(c, first + i) + 1) % in_flight);
      for (std::uint32_t set = 0; set < in_flight; ++set) {
        const std::uint32_t step = first_step_of_set(c, set);
        CHECK_EQ(set_of(c, step), set);
        CHECK(step - first < in_flight);
      }
    }
  for (int i = 0; i < 100000; ++i) {
    const auto a = static_cast<std::uint32_t>(random.bits());
    const auto d = static_cast<std::uint32_t>(random.integer(0, 0x7fffffff));
    CHECK(step_reached(a + d, a));
    if (d != 0) CHECK(!step_reached(a, a + d));
  }
}

// A step has 32 bits, a turn of its set 64. After 2^32 steps the turn is still the step's, however many turns a rank has missed.
void check_turns(check::Random& random) {
  for (std::uint32_t in_flight : {1u, 2u, 4u, 8u})
    for (std::uint32_t first : kAroundZero) {
      Config c;
      c.in_flight = in_flight;
      c.first_step = first;
      for (std::uint32_t i = 0; i < in_flight; ++i) CHECK_EQ(turn_of(c, first + i, 0), 1u);
      for (int i = 0; i < 2000; ++i) {
        const auto nth = static_cast<std::uint64_t>(random.integer(0, 1ll << 40));   // number among all steps
        const std::uint32_t step = first + static_cast<std::uint32_t>(nth);
        const std::uint64_t turn = (nth - (first_step_of_set(c, set_of(c, step)) - first)) / in_flight + 1;
        const auto apart = static_cast<std::uint64_t>(random.integer(0, 1 << 20));
        CHECK_EQ(turn_of(c, step, turn), turn);
        CHECK_EQ(turn_of(c, step, turn - std::min(apart, turn)), turn);
        CHECK_EQ(turn_of(c, step, turn + apart), turn);
      }
    }
}

// Each has a word of its own, where a reset rebases them: in front of the counts.
void check_signals() {
  for (const bool pieces : {false, true})
    for (std::uint32_t in_flight : {1u, 4u}) {
      Config c;
      c.world = 3;
      c.num_experts = 6;
      c.top_k = 2;
      c.hidden = 64;
      c.max_tokens = 2000;
      c.in_flight = in_flight;
      c.on_gpu = true;
      c.part_bytes = 4096;
      if (pieces) c.slot_bytes = least_slot_bytes(c);
      const Heap heap = heap_of(c);
      CHECK(heap.in_pieces == pieces && heap.in_parts == !pieces);
      std::set<std::uint64_t> words;
      std::size_t signals = 0;
      for (std::uint32_t set = 0; set < in_flight; ++set)
        for (const Op op : {Op::Dispatch, Op::Combine, Op::Weights})
          for (std::uint32_t nth = 0; nth < signals_of(heap, op); ++nth)
            for (std::uint32_t source = 0; source < c.world; ++source, ++signals) {
              const std::uint64_t at =
                  pieces ? piece_signal_at(heap, c, set, op, nth, source) : signal_at(heap, c, set, op, nth, source);
              CHECK(at >= heap.arrival && at + kWordBytes <= heap.counts && at % kWordBytes == 0);
              words.insert(at);
            }
      CHECK_EQ(signals, std::size_t{in_flight} * c.world * (pieces ? 7 : 17));
      CHECK_EQ(words.size(), signals);
    }
}

void check_arrivals(check::Random& random) {
  CHECK(!arrived(0, 1, 0) && !arrived(0, 1, 1) && !arrived(0, 1, 0u - 5u));   // fresh memory has reached nothing
  for (int i = 0; i < 100000; ++i) {
    const auto generation = static_cast<std::uint32_t>(random.integer(1, 5));
    const std::uint32_t step = random.chance(0.5) ? kAroundZero[random.integer(0, 8)] : static_cast<std::uint32_t>(random.bits());
    const auto ahead = static_cast<std::uint32_t>(random.integer(0, 100));
    const std::uint64_t word = arrival_word(generation, step + ahead);
    CHECK(arrived(word, generation, step));
    CHECK(!arrived(word, generation + 1, step));   // the word is older than a reset
    CHECK(!arrived(word, generation, step + ahead + 1));
    CHECK(reached(word, arrival_word(generation, step)) && !reached(word, arrival_word(generation, step + ahead + 1)));
    const bool in_pieces = random.chance(0.5);
    const auto rows = static_cast<std::uint32_t>(random.integer(0, in_pieces ? 0x3fffffff : kMailRows));
    const auto parts = in_pieces ? 0 : static_cast<std::uint32_t>(random.integer(0, kMostParts));
    const Mail sent{step, rows, in_pieces, parts}, m = read_mail(mail_word(sent));
    CHECK(mail_word(sent) != 0);   // 0 is what the proxy has seen of fresh memory
    CHECK(m.step == step && m.rows == rows && m.in_pieces == in_pieces && m.parts == parts);
    const auto pieces = static_cast<std::uint32_t>(random.integer(0, kMostPieces));
    const std::uint64_t count = pieces_word(generation, step, pieces);
    CHECK_EQ(pieces_in(count, generation, step), pieces);
    CHECK(pieces_in(count, generation + 1, step) == 0 && pieces_in(count, generation, step + 1 + ahead) == 0);
    CHECK_EQ(pieces_ahead(pieces & 7u, pieces), 0u);
    CHECK_EQ(pieces_ahead((pieces + 2) & 7u, pieces), 2u);
    CHECK(pieces_ahead((pieces - 1) & 7u, pieces) > kPlaces);
  }
}

void check_aborts() {
  for (auto reason : {AbortReason::Death, AbortReason::Timeout, AbortReason::Fabric, AbortReason::Protocol,
                      AbortReason::Interrupted, AbortReason::Closed, AbortReason::User, AbortReason::Refused})
    for (auto phase : {Phase::None, Phase::DispatchSend, Phase::DispatchRecv, Phase::CombineSend, Phase::CombineRecv,
                       Phase::Weights})
      for (std::uint32_t rank : {0u, 1u, 1023u, kNoRank})
        for (std::uint32_t step : kAroundZero) {
          const std::uint64_t word = abort_word({reason, phase, rank, kMaxRanks - 1, step});
          CHECK(word != 0);
          const Abort a = read_abort(word);
          CHECK(a.reason == reason && a.phase == phase);
          CHECK_EQ(a.origin, rank);
          CHECK_EQ(a.peer, kMaxRanks - 1);
          CHECK_EQ(a.step, step);
        }
}

void check_immediates() {
  for (auto op : {Op::Dispatch, Op::Combine, Op::Weights, Op::Credit})
    for (std::uint32_t object = 0; object < kMaxObjects; ++object)
      for (std::uint32_t source : {0u, 1u, 511u, kMaxRanks - 1})
        for (std::uint32_t step : {0u, 1u, 255u, 256u, 0xffffffffu})
          for (std::uint32_t shards = 1; shards <= kMaxShards; ++shards)
            for (std::uint32_t shard = 0; shard < shards; ++shard) {
              const std::uint32_t piece = step + shard;
              const Immediate i = unpack(pack({op, object, source, step, shard, shards, piece}));
              CHECK(i.op == op);
              CHECK_EQ(i.object, object);
              CHECK_EQ(i.source, source);
              CHECK_EQ(i.step, step & 0x1f);
              CHECK_EQ(i.piece, piece & 7);
              CHECK(same_step(step, i) && same_step(step + 32, i) && !same_step(step + 1, i) && !same_step(step + 16, i));
              CHECK_EQ(i.shard, shard);
              CHECK_EQ(i.shards, shards);
            }
}

// A block is complete exactly when each of its shards has come, in any order and any number of times.
void check_masks(check::Random& random) {
  for (int i = 0; i < 20000; ++i) {
    ShardMask mask;
    for (std::uint32_t step : {0u - 1u, 0u, 1u}) {
      const auto shards = static_cast<std::uint32_t>(random.integer(1, kMaxShards));
      std::vector<bool> come(shards, false);
      std::uint32_t missing = shards;
      while (missing > 0) {
        CHECK(!mask.complete(step));
        const auto shard = static_cast<std::uint32_t>(random.integer(0, shards - 1));
        const ShardMask::Outcome outcome = mask.add(step, shard, shards);
        if (come[shard]) {
          CHECK(outcome == ShardMask::Outcome::Duplicate);
          continue;
        }
        come[shard] = true;
        CHECK(outcome == (--missing == 0 ? ShardMask::Outcome::Complete : ShardMask::Outcome::Pending));
      }
      CHECK(mask.complete(step));
      CHECK(mask.add(step, 0, shards) == ShardMask::Outcome::Duplicate);
      if (shards < kMaxShards) CHECK(mask.add(step, 0, shards + 1) == ShardMask::Outcome::Inconsistent);
      CHECK(mask.complete(step));
    }
  }
}

struct Span {
  std::uint64_t begin, end;
  std::string what;
};

void apart(std::vector<Span> spans, std::uint64_t bytes) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  for (std::size_t i = 0; i < spans.size(); ++i) {
    if (spans[i].end > bytes) check::fail(__FILE__, __LINE__, spans[i].what + " ends after the heap");
    if (i > 0 && spans[i].begin < spans[i - 1].end)
      check::fail(__FILE__, __LINE__, spans[i].what + " overlaps " + spans[i - 1].what);
  }
}

void check_block(const Config& c) {
  for (auto op : {Op::Dispatch, Op::Combine, Op::Weights}) {
    const BlockLayout b = block_layout(c, op);
    CHECK_EQ(b.header_bytes % 16, 0u);
    CHECK_EQ(b.row_bytes % 16, 0u);
    CHECK(b.header_bytes >= sizeof(BlockHeader));
    CHECK_EQ(b.row_at(3), b.header_bytes + 3ull * b.row_bytes);
    CHECK_EQ(b.bytes(0), b.header_bytes);
    if (c.on_gpu && op != Op::Weights && b.row_bytes >= 2048) CHECK(b.row_bytes % 128 == 0 && b.header_bytes % 128 == 0);
  }
  const std::uint64_t x = std::uint64_t{c.hidden} * (quantised(c.wire) ? 1 : dtype_bytes(c.dtype));
  const std::uint64_t block = c.wire == Wire::MXFP8 ? 32 : 128;
  const std::uint64_t blocks = c.wire == Wire::Native ? 0 : (c.hidden + block - 1) / block;
  const BlockLayout d = dispatch_block(c);
  CHECK(d.header_bytes >= sizeof(BlockHeader) + 4 * experts_per_rank(c));
  CHECK(d.scales_at >= x && d.scales_at % 16 == 0);
  CHECK(d.route_at >= d.scales_at + blocks * (c.wire == Wire::MXFP8 ? 1 : 4) && d.route_at % 16 == 0);
  CHECK(d.arrival_at >= d.route_at + route_bytes(c) && route_bytes(c) >= 8 + 8 * c.top_k && d.arrival_at % 8 == 0 &&
        d.arrival_at + 8 <= d.row_bytes);
  const BlockLayout back = combine_block(c);
  CHECK(back.tail_at >= std::uint64_t{c.hidden} * dtype_bytes(c.dtype));
  CHECK(back.arrival_at >= back.tail_at + 4 * c.top_k && back.arrival_at + 8 <= back.row_bytes);
  CHECK(weights_block(c).row_bytes >= 4 * c.top_k);
}

// Nothing overlaps, and what peers write into lies at the same place on ranks that differ in their number of remote peers.
void check_heap(const Config& c) {
  const Heap h = heap_of(c);
  std::vector<Span> spans{{Heap::abort_at(0), Heap::kAborts * kWordBytes, "aborts"}};
  std::vector<Span> mapped{{0, h.counts + h.counts_bytes * c.in_flight, "words"}};   // another memory on GPUs
  for (std::uint32_t set = 0; set < c.in_flight; ++set)
    for (std::uint32_t peer = 0; peer < c.world; ++peer) {
      for (std::uint32_t s = 0; s < kSignals; ++s) {
        const std::uint64_t at = h.arrival_at(c, set, Signal(s), peer);
        CHECK_EQ(at % 8, 0u);
        spans.push_back({at, at + 8, "arrival"});
      }
      for (std::uint32_t op = 0; op < kOps; ++op) {
        const std::uint32_t most = c.max_tokens / c.replicas + (c.max_tokens % c.replicas != 0);
        const BlockLayout block = block_layout(c, Op(op));
        const bool in_pieces = h.in_pieces && op < kPieceOps;
        const auto add_slot = [&](std::vector<Span>& to, std::uint64_t at) {
          CHECK_EQ(at % (c.on_gpu ? 128 : 64), 0u);
          if (!in_pieces) to.push_back({at, at + block.bytes(most), "slot"});
          for (std::uint32_t place = 0; in_pieces && place < kPlaces; ++place) {
            CHECK_EQ(h.piece_at(Op(op), place) % 64, 0u);
            const std::uint64_t from = at + h.piece_at(Op(op), place);
            to.push_back({from, from + block.bytes(h.piece_rows), "place"});
          }
        };
        const std::uint64_t slot = h.slot_at(c, set, Op(op), peer), remote = h.remote_slot_at(set, Op(op), peer);
        if (peer - c.mapped_first < h.mapped_slots) add_slot(c.on_gpu ? mapped : spans, slot);
        if (c.on_gpu && peer < h.remote_slots) add_slot(spans, remote);
        CHECK(c.on_gpu || remote == slot);
        if (in_pieces) {
          for (std::uint64_t words : {h.pieces, h.consumed, h.left}) {
            const std::uint64_t word = h.count_at(c, words, set, Op(op), peer);
            spans.push_back({word, word + 8, "count"});
          }
          const std::uint64_t credit = h.mailbox + 8 * h.credit_index(c, set, Op(op), peer);
          spans.push_back({credit, credit + 8, "credit"});
          CHECK(block.bytes(h.slot_rows) <= h.slot_bytes[op]);
        }
        for (std::uint64_t words : {h.mailbox, h.outgoing, h.sent}) {
          const std::uint64_t word = words + 8 * h.word_index(c, set, Op(op), peer);
          spans.push_back({word, word + 8, "word"});
        }
      }
    }
  const std::uint32_t finished = c.max_tokens / c.replicas + (c.max_tokens % c.replicas != 0);   // tokens of one replica
  for (std::uint32_t set = 0; set < c.in_flight && c.replicas > 1; ++set)
    for (std::uint32_t rank = 0; rank < c.replicas; ++rank) {
      const std::uint64_t at = h.slice_at(c, set, rank);
      CHECK_EQ(at % 64, 0u);
      (c.on_gpu ? mapped : spans).push_back({at, at + combine_block(c).bytes(finished), "slice"});
      CHECK_EQ(at, h.slice_at(c, set, c.world - c.replicas + rank));   // the same in every group
    }
  for (std::uint32_t set = 0; set < c.in_flight; ++set)
    for (std::uint32_t op = 0; op < kOps; ++op) {
      CHECK_EQ(h.send_at(set, Op(op)) % 64, 0u);
      spans.push_back({h.send_at(set, Op(op)), h.send_at(set, Op(op)) + h.send_bytes[op], "send area"});
    }
  apart(spans, h.bytes);
  apart(mapped, h.mapped_bytes);

  Config other = c;
  other.remote_peers = (c.remote_peers + 1) % c.world;
  other.rank = c.world - 1;
  const Heap theirs = heap_of(other);
  for (std::uint32_t op = 0; op < kOps; ++op)
    CHECK(h.slot_at(c, c.in_flight - 1, Op(op), 0) == theirs.slot_at(other, c.in_flight - 1, Op(op), 0) &&
          h.remote_slot_at(c.in_flight - 1, Op(op), 0) == theirs.remote_slot_at(c.in_flight - 1, Op(op), 0));
  CHECK_EQ(h.arrival_at(c, 0, Signal::Combine, 0), theirs.arrival_at(other, 0, Signal::Combine, 0));
}

// Blocks, places and slots of more than 4 GiB, which no test maps. __int128: arithmetic in fewer bits is found.
void check_large(Config c, std::uint64_t slot_bytes) {
  c.slot_bytes = slot_bytes;
  CHECK(invalid(c) == nullptr && invalid_pieces(c) == nullptr);
  check_heap(c);
  const Heap h = heap_of(c);
  CHECK_EQ(h.in_pieces, slot_bytes != 0);
  const std::uint32_t last = c.world - 1, set = c.in_flight - 1;
  using Wide = unsigned __int128;
  for (std::uint32_t op = 0; op < kPieceOps; ++op) {
    const BlockLayout block = block_layout(c, Op(op));
    const std::uint32_t rows = h.in_pieces ? h.piece_rows : max_rows_of_block(c);
    const Wide row = block.header_bytes + Wide{rows - 1} * block.row_bytes,
        slot = Wide{h.slot_bytes[op]} * (Wide{c.world} * set + last);
    CHECK(row >> 32 != 0 && slot >> 32 != 0);
    CHECK(Wide{block.row_at(rows - 1)} == row && Wide{block.bytes(rows)} == row + block.row_bytes);
    CHECK(Wide{h.slot_at(c, set, Op(op), last)} == h.slots[op] + slot);
    CHECK(Wide{h.slot_bytes[op]} >= (h.in_pieces ? kPlaces : 1) * (row + block.row_bytes));
    if (h.in_pieces) CHECK(Wide{h.piece_at(Op(op), 1)} >= row + block.row_bytes);
    const Wide send = h.send[op] + Wide{h.send_bytes[op]} * set;
    CHECK(Wide{h.send_at(set, Op(op))} == send);
    if (c.on_gpu)
      CHECK(Wide{h.spaced_send_at(c, set, Op(op), c.remote_peers - 1)} >= send +
            Wide{c.remote_peers - 1} * (row + block.row_bytes));
  }
}

void check_large_heaps() {
  for (const bool on_gpu : {false, true})
    for (const std::uint32_t replicas : {1u, 2u}) {
      Config c;
      c.replicas = replicas;
      c.world = 4;
      c.num_experts = 256;
      c.top_k = 2;
      c.hidden = 28672;
      c.max_tokens = kMaxChoices / c.top_k;
      c.in_flight = 2;
      c.remote_peers = 3;
      c.on_gpu = on_gpu;
      check_large(c, 0);
      check_large(c, 3 * bytes_of_slots(c, max_rows_of_block(c)) / 4);
    }
}

// Tensors that a dispatch fills, of more than 2^32 bytes, and the same number of bytes of scales.
void check_large_outputs() {
  for (const LayoutKind layout : {LayoutKind::Ragged, LayoutKind::Padded, LayoutKind::Compact})
    for (const Wire wire : {Wire::Native, Wire::FP8, Wire::MXFP8})
      for (const bool tma : {false, true}) {
        Config c;
        c.num_experts = 4;
        c.top_k = 8;
        c.hidden = 7168;
        c.layout = layout;
        c.wire = wire;
        c.scale_tma = tma;
        c.max_per_expert = 20'000'000;
        c.max_rows = 80'000'000;
        const cuda::BufferLayout gpu = cuda::buffer_layout(c);
        const OutputLayout cpu = cpu_output_layout(c);
        std::vector<Span> spans;
        for (const auto& [name, part] : kOutputParts) {
          const OutputPart& p = gpu.*part;
          if (p.exists()) spans.push_back({p.at, p.at + p.bytes, name});
          CHECK_EQ(p.bytes, (cpu.*part).bytes);
        }
        apart(spans, gpu.bytes);
        CHECK_EQ(gpu.x.bytes, 80'000'000ull * 7168 * (wire == Wire::Native ? 2 : 1));
        if (wire == Wire::Native) continue;
        const std::uint64_t scales = wire == Wire::MXFP8 ? 224 : 4 * 56;
        CHECK_EQ(gpu.scale.bytes, 80'000'000ull * scales);
        const ScaleStrides s = scale_strides(c);
        const std::uint64_t each = wire == Wire::MXFP8 ? 1 : 4, rows = layout == LayoutKind::Padded ? 20'000'000 : 80'000'000;
        CHECK_EQ(s.group, rows * scales);
        CHECK_EQ(s.row, tma ? each : scales);
        CHECK_EQ(s.scale, tma ? rows * each : each);
      }
}

// A block's pieces have all its rows, once and in order, and slots take what they may.
void check_pieces(const Config& c) {
  const Heap h = heap_of(c);
  const std::uint32_t most = max_rows_of_block(c);
  if (!h.in_pieces) {
    CHECK(c.slot_bytes == 0 || most <= c.whole_tokens || bytes_of_slots(c, most) <= c.slot_bytes);
    CHECK_EQ(shape_of(h, most).pieces, 1u);
    Config without = c;
    without.slot_bytes = 0;
    CHECK_EQ(h.bytes, heap_of(without).bytes);   // nothing changes
    return;
  }
  CHECK(invalid_pieces(c) == nullptr);
  CHECK(c.world * (h.slot_bytes[0] + h.slot_bytes[1]) <= c.slot_bytes);
  CHECK(h.slot_rows >= std::min(c.whole_tokens, most));
  for (std::uint32_t rows = 0; rows <= most; ++rows) {
    const BlockShape shape = shape_of(h, rows);
    CHECK_EQ(shape.pieces == 1, rows <= h.slot_rows);
    CHECK_EQ(shape.end(shape.pieces - 1), rows);
    for (std::uint32_t p = 0; p < shape.pieces; ++p) {
      CHECK_EQ(shape.begin(p), p == 0 ? 0u : shape.end(p - 1));
      if (shape.pieces > 1) CHECK(shape.end(p) > shape.begin(p) && shape.end(p) - shape.begin(p) <= h.piece_rows);
      for (std::uint32_t row = shape.begin(p); row < shape.end(p); ++row) CHECK_EQ(shape.piece_of(row), p);
    }
  }
}

// A name for each thing that is wrong, and null for what can work.
void check_validation() {
  const auto says = [](auto change, const char* what) {
    Config c;
    change(c);
    const char* seen = invalid(c);
    CHECK_EQ(std::string(seen != nullptr ? seen : "").find(what) != std::string::npos, true);
  };
  CHECK(invalid(Config{}) == nullptr);
  says([](Config& c) { c.world = 0; }, "world");
  says([](Config& c) { c.world = 1025; }, "world");
  says([](Config& c) { c.rank = 1; }, "rank");
  says([](Config& c) { c.num_experts = 0; }, "num_experts");
  says([](Config& c) { c.num_experts = 4097; }, "experts");
  says([](Config& c) { c.top_k = 0; }, "top_k");
  says([](Config& c) { c.top_k = 17; }, "top_k");
  says([](Config& c) { c.hidden = 0; }, "hidden");
  says([](Config& c) { c.hidden = 9; }, "hidden");
  says([](Config& c) { c.hidden = 12; }, "hidden");
  says([](Config& c) { c.max_tokens = 0; }, "max_tokens");
  says([](Config& c) { c.max_tokens = kMaxChoices + 1; }, "max_tokens");
  says([](Config& c) { c.in_flight = 3; }, "in_flight");
  says([](Config& c) { c.replicas = 0; }, "replicas");
  says([](Config& c) { c.world = 6, c.replicas = 4; }, "replicas");
  says([](Config& c) { c.in_flight = 0; }, "in_flight");
  says([](Config& c) { c.align = 0; }, "align");
  says([](Config& c) { c.object = 8; }, "8");
}

}  // namespace

int main() {
  check::Random random(check::seed());
  check_steps(random);
  check_turns(random);
  check_signals();
  check_arrivals(random);
  check_aborts();
  check_immediates();
  check_masks(random);
  check_validation();
  check_large_heaps();
  check_large_outputs();
  for (int i = 0; i < 2000; ++i) {
    Config c;
    c.replicas = random.chance(0.7) ? 1 : static_cast<std::uint32_t>(random.integer(2, 4));
    c.world = c.replicas * static_cast<std::uint32_t>(random.integer(1, 9));
    c.num_experts = static_cast<std::uint32_t>(random.integer(1, 300));
    c.top_k = static_cast<std::uint32_t>(random.integer(1, kMaxTopK));
    c.hidden = static_cast<std::uint32_t>(random.integer(1, 60)) * 8;
    c.max_tokens = static_cast<std::uint32_t>(random.integer(1, 100));
    c.in_flight = 1u << random.integer(0, 3);
    c.dtype = static_cast<Dtype>(random.integer(0, 2));
    c.wire = static_cast<Wire>(random.integer(0, 3));
    c.remote_peers = static_cast<std::uint32_t>(random.integer(0, c.world - 1));
    c.on_gpu = random.chance(0.5);
    if (c.on_gpu) {
      c.mapped_slots = static_cast<std::uint32_t>(random.integer(1, c.world));
      c.mapped_first = static_cast<std::uint32_t>(random.integer(0, c.world - c.mapped_slots));
      c.remote_slots = static_cast<std::uint32_t>(random.integer(0, c.world));
    }
    CHECK(invalid(c) == nullptr);
    check_block(c);
    check_heap(c);
    check_pieces(c);
    c.whole_tokens = static_cast<std::uint32_t>(random.integer(1, 50));
    c.slot_bytes = least_slot_bytes(c) + static_cast<std::uint64_t>(random.integer(0, 200)) * c.world * 64;
    check_heap(c);
    check_pieces(c);
    c.slot_bytes = least_slot_bytes(c) - 1;
    CHECK_EQ(invalid_pieces(c) != nullptr, in_pieces(c));
  }
}
