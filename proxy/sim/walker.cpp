#include "walker.h"

#include <algorithm>
#include <cstring>

namespace pplx::sim {

using namespace cpu;

namespace {

constexpr int kPoison = 0xa5;
constexpr std::uint64_t kEnough = 2048;

template <typename T>
void poison(std::vector<T>& memory) {
  if (!memory.empty()) std::memset(memory.data(), kPoison, memory.size() * sizeof(T));
}

template <typename T>
std::vector<T> poisoned(std::size_t n) {
  std::vector<T> v(n);
  poison(v);
  return v;
}

bool same_bits(float a, float b) { return std::memcmp(&a, &b, 4) == 0; }

}  // namespace

Walker::Walker(Exchange& exchange, std::shared_ptr<Step> step, std::shared_ptr<const Plan> plan, Totals& totals)
    : e_(exchange),
      c_(exchange.config()),
      step_(std::move(step)),
      role_(step_->roles[c_.rank]),
      plan_(std::move(plan)),
      totals_(totals) {}

void Walker::wrong(const std::string& what) const {
  throw Violation("rank " + std::to_string(c_.rank) + ", object " + std::to_string(c_.object) + ", step " +
                  std::to_string(number_) + " (" + std::to_string(step_->number) + " of its generation): " + what);
}

Walker::Progress Walker::advance() {
  Progress progress = Progress::None;
  if (!run_) {
    begin();
    begun_ = e_.now();
    waited_.assign(stage_ % 2 == 1 ? c_.world : 0, 0.0);
    progress = Progress::Some;
  } else if (!waited_.empty()) {
    run_->add_wait(e_.now() - polled_, waited_);
  }
  polled_ = e_.now();
  if (phase_ == Phase::CombineRecv) poison_relayed();
  if (!e_.poll(*run_, phase_, number_, begun_)) return progress;
  run_.reset();
  e_.count(phase_, e_.now() - begun_, waited_);
  finish();
  return ++stage_ == 4 ? Progress::Closed : Progress::Some;
}

void Walker::begin() {
  switch (stage_) {
    case 0: return begin_dispatch_send();
    case 1: return begin_dispatch_recv();
    case 2: return begin_combine_send();
    default: return begin_combine_recv();
  }
}

// Overwrites tensors after a half, as a rank may. In pieces they stay until the receive half is done.
void Walker::poison_tokens() {
  poison(scales_in_);
  poison(weights_);
  if (!step_->keep_own || (quantised(c_.wire) && !step_->quantised)) poison(x_);
}

void Walker::poison_expert_outputs() {
  if (step_->late) poison_slots(Op::Weights);
  poison(expert_out_);
  poison(late_weights_);
  poison(tail_);
}

void Walker::finish() {
  const bool in_pieces = e_.blocks().heap().in_pieces;
  switch (stage_) {
    case 0:
      if (!in_pieces) poison_tokens();
      return;
    case 1:
      e_.finish_dispatch_recv(number_, received_);
      poison_slots(Op::Dispatch);
      poison_tokens();
      poison(x_);
      check_dispatch();
      run_experts();
      if (step_->has_tail) attach_tail();
      poison(out_);
      return;
    case 2:
      e_.finish_combine_send(number_);
      if (!in_pieces) poison_expert_outputs();
      return;
    default:
      e_.finish_combine_recv(number_);
      if (in_pieces) poison_expert_outputs();
      poison_slots(Op::Combine);
      poison_slices();
      if (!step_->released) check_combine();
      if (step_->has_tail) check_tail();
  }
}

// ---- the phases ------------------------------------------------------------------------------------------------------------

void Walker::begin_dispatch_send() {
  if (!plan_) {
    std::vector<std::int64_t> ids(role_.ids.begin(), role_.ids.end());
    for (std::int64_t& id : ids)
      if (id < -1) id = -id - 2;   // an expert of a dead rank; the caller does not know that it is dead
    plan_ = std::make_shared<const Plan>(make_plan(c_, ids.data(), role_.tokens, &e_.blocks().alive(), &e_.blocks().rails().rep));
  }
  const std::size_t row = std::size_t{c_.hidden} * (step_->quantised ? 1 : dtype_bytes(c_.dtype)), stride = row + kGap;
  x_.resize(role_.tokens * stride);
  for (std::uint32_t t = 0; t < role_.tokens; ++t) std::memcpy(x_.data() + t * stride, role_.x.data() + t * row, row);
  scales_in_ = role_.scales;
  weights_ = role_.weights;
  late_weights_ = role_.late_weights;
  Tokens in;
  in.plan = plan_;
  in.x = {x_.data(), stride};
  // A rank without tokens has an empty tensor, which is not the same as none.
  static const char none = 0;
  if (step_->quantised) in.scales = scales_in_.empty() ? &none : scales_in_.data();
  in.scale.row = scale_bytes(c_);
  in.scale.scale = scale_bytes_each(c_.wire);
  in.weights = step_->unit_weights ? nullptr : weights_.data();
  in.keep_own_rows = step_->keep_own;
  phase_ = Phase::DispatchSend;
  run_ = e_.start_dispatch_send(in, &number_);
}

std::size_t Walker::output_rows() const {
  return c_.layout == LayoutKind::Padded ? std::size_t{local_experts(c_, c_.rank)} * c_.max_per_expert : c_.max_rows;
}

void Walker::begin_dispatch_recv() {
  const std::size_t rows = output_rows(), experts = local_experts(c_, c_.rank), scales = scales_per_row(c_),
                    each = scale_bytes_each(c_.wire);
  const std::size_t group = c_.layout == LayoutKind::Padded ? c_.max_per_expert : rows;
  scales_by_column_ = number_ % 2 == 0;
  out_ = poisoned<char>(rows * payload_bytes(c_));
  scales_ = poisoned<char>(rows * scale_bytes(c_));
  out_weights_ = poisoned<float>(rows);
  src_rank_ = poisoned<std::int32_t>(rows);
  src_token_ = poisoned<std::int32_t>(rows);
  counts_ = poisoned<std::int32_t>(experts);
  offsets_ = poisoned<std::int32_t>(experts + 1);
  if (c_.layout == LayoutKind::Compact) {
    topk_ids_ = poisoned<std::int32_t>(rows * c_.top_k);
    topk_weights_ = poisoned<float>(rows * c_.top_k);
  }
  DispatchOutput out;
  out.x = out_.data();
  out.scales = scales_.data();
  out.scale.row = scales_by_column_ ? each : scales * each;
  out.scale.scale = scales_by_column_ ? group * each : each;
  out.scale.group = group * scales * each;
  out.counts = counts_.data();
  out.offsets = offsets_.data();
  out.weights = out_weights_.data();
  out.src_rank = src_rank_.data();
  out.src_token = src_token_.data();
  out.topk_ids = topk_ids_.data();
  out.topk_weights = topk_weights_.data();
  out.num_rows = &num_rows_;
  received_ = std::make_shared<Received>();
  phase_ = Phase::DispatchRecv;
  run_ = e_.start_dispatch_recv(number_, out, received_);
}

void Walker::begin_combine_send() {
  ExpertOutputs in;
  in.release = step_->released;
  phase_ = Phase::CombineSend;
  if (!in.release) {
    in.received = received_;
    in.expert_out = {expert_out_.data(), std::uint64_t{c_.hidden} * dtype_bytes(c_.dtype) + kGap};
    in.weighted = step_->weighted;
    if (step_->late) {
      in.uses_weights = true;
      in.weights = late_weights_.data();
      in.plan = plan_;
      phase_ = Phase::Weights;
    }
    in.has_tail = step_->has_tail;
    in.tail = tail_.data();
  }
  run_ = e_.start_combine_send(number_, in);
}

void Walker::begin_combine_recv() {
  const std::size_t row = std::size_t{c_.hidden} * dtype_bytes(c_.dtype), stride = row + kGap;
  y_ = poisoned<char>(role_.tokens * stride);
  if (step_->accumulate)
    for (std::uint32_t t = 0; t < role_.tokens; ++t) std::memcpy(y_.data() + t * stride, role_.before.data() + t * row, row);
  tail_out_ = poisoned<float>(role_.ids.size());
  phase_ = Phase::CombineRecv;
  run_ = e_.start_combine_recv(number_, {y_.data(), stride, step_->accumulate, tail_out_.data()});
}

// ---- what must come of it ----------------------------------------------------------------------------------------------------

const char* Walker::scale_at(std::uint64_t row, std::uint32_t i) const {
  const std::uint64_t scales = scales_per_row(c_), each = scale_bytes_each(c_.wire);
  const std::uint64_t group = c_.layout == LayoutKind::Padded ? c_.max_per_expert : output_rows();
  const std::uint64_t in_group = row % group;
  return scales_.data() +
         (row / group * group * scales + (scales_by_column_ ? i * group + in_group : in_group * scales + i)) * each;
}

void Walker::check_row(std::uint64_t row, std::uint64_t expert, const Choice& choice) const {
  const auto differs = [&](const char* what) {
    wrong(std::string("dispatch: ") + what + " of row " + std::to_string(row) + " (token " + std::to_string(choice.token) +
          " of rank " + std::to_string(choice.source) + " for local expert " + std::to_string(expert) + ") is wrong");
  };
  const Role& from = step_->roles[choice.source];
  const std::uint32_t payload = payload_bytes(c_), each = scale_bytes_each(c_.wire);
  const char* expected = from.payload.data() + std::size_t{choice.token} * (payload + scale_bytes(c_));
  if (src_rank_[row] != static_cast<std::int32_t>(choice.source)) differs("src_rank");
  if (src_token_[row] != static_cast<std::int32_t>(choice.token)) differs("src_token");
  if (std::memcmp(out_.data() + row * payload, expected, payload) != 0) differs("x");
  for (std::uint32_t i = 0; i < scales_per_row(c_); ++i)
    if (std::memcmp(scale_at(row, i), expected + payload + std::size_t{i} * each, each) != 0) differs("scale");
  totals_.outputs += payload;
  const std::size_t at = std::size_t{choice.token} * c_.top_k;
  if (c_.layout != LayoutKind::Compact) {
    if (!same_bits(out_weights_[row], from.weights[at + choice.k])) differs("weight");
    return;
  }
  for (std::uint32_t k = 0; k < c_.top_k; ++k) {
    const std::int32_t id = from.ids[at + k];
    const bool here = id >= 0 && static_cast<std::uint32_t>(id) / experts_per_rank(c_) == c_.rank;
    if (topk_ids_[row * c_.top_k + k] != (here ? id - static_cast<std::int32_t>(first_expert(c_, c_.rank)) : -1))
      differs("topk_ids");
    if (!same_bits(topk_weights_[row * c_.top_k + k], here ? from.weights[at + k] : 0.0f)) differs("topk_weights");
  }
}

void Walker::check_dispatch() const {
  const std::vector<std::vector<Choice>>& lists = step_->arrivals[c_.rank];
  if (c_.layout == LayoutKind::Compact) {
    const std::vector<Choice>& rows = lists[0];
    if (num_rows_ != static_cast<std::int32_t>(rows.size()))
      wrong("dispatch: num_rows is " + std::to_string(num_rows_) + ", not " + std::to_string(rows.size()));
    for (std::uint64_t i = 0; i < rows.size() && i < c_.max_rows; ++i) check_row(i, 0, rows[i]);
    std::vector<std::int32_t> counts(local_experts(c_, c_.rank), 0);
    for (const Role& role : step_->roles)
      for (std::size_t i = 0; i < role.ids.size(); ++i) {
        const std::int32_t id = role.ids[i];
        if (id < 0 || !sends(role, static_cast<std::uint32_t>(i / c_.top_k))) continue;
        if (static_cast<std::uint32_t>(id) / experts_per_rank(c_) == c_.rank)
          ++counts[id - static_cast<std::int32_t>(first_expert(c_, c_.rank))];
      }
    if (counts != counts_) wrong("dispatch: counts are wrong");
    return;
  }
  std::uint64_t start = 0;
  for (std::size_t e = 0; e < lists.size(); ++e) {
    const std::vector<Choice>& rows = lists[e];
    if (counts_[e] != static_cast<std::int32_t>(rows.size()))
      wrong("dispatch: the count of local expert " + std::to_string(e) + " is " + std::to_string(counts_[e]) + ", not " +
            std::to_string(rows.size()));
    const bool padded = c_.layout == LayoutKind::Padded;
    if (padded) start = e * c_.max_per_expert;
    if (!padded && offsets_[e] != static_cast<std::int32_t>(start))
      wrong("dispatch: the offset of local expert " + std::to_string(e) + " is " + std::to_string(offsets_[e]) + ", not " +
            std::to_string(start));
    for (std::uint64_t i = 0; i < rows.size(); ++i)
      if (padded ? i < c_.max_per_expert : start + i < c_.max_rows) check_row(start + i, e, rows[i]);
    if (padded) continue;
    const std::uint64_t next = align_up(start + rows.size(), c_.align);
    if (c_.zero_pad)
      for (std::uint64_t row = start + rows.size(); row < next && row < c_.max_rows; ++row) {
        bool zero = src_rank_[row] == -1 && src_token_[row] == -1 && same_bits(out_weights_[row], 0.0f);
        for (std::uint32_t i = 0; i < payload_bytes(c_); ++i) zero &= out_[row * payload_bytes(c_) + i] == 0;
        for (std::uint32_t i = 0; i < scale_bytes(c_); ++i)
          zero &= scale_at(row, i / scale_bytes_each(c_.wire))[i % scale_bytes_each(c_.wire)] == 0;
        if (!zero) wrong("dispatch: row " + std::to_string(row) + " lies between segments and is not zero");
      }
    start = next;
  }
  if (c_.layout == LayoutKind::Ragged && offsets_.back() != static_cast<std::int32_t>(start))
    wrong("dispatch: the last offset is wrong");
}

void Walker::run_experts() {
  const std::size_t size = dtype_bytes(c_.dtype), stride = c_.hidden * size + kGap;
  expert_out_ = poisoned<char>(output_rows() * stride);
  if (step_->released) return;
  std::vector<float> row(c_.hidden), value(c_.hidden), sum(c_.hidden);
  std::vector<char> scales(scale_bytes(c_));
  const auto read = [&](std::uint64_t at) {
    for (std::uint32_t i = 0; i < scales_per_row(c_); ++i)
      std::memcpy(scales.data() + std::size_t{i} * scale_bytes_each(c_.wire), scale_at(at, i), scale_bytes_each(c_.wire));
    decode_row(c_, out_.data() + at * payload_bytes(c_), scales.data(), row.data());
  };
  const std::uint32_t first = first_expert(c_, c_.rank);
  if (c_.layout == LayoutKind::Compact) {   // the caller sums over its experts
    for (std::uint64_t at = 0; at < std::min<std::uint64_t>(static_cast<std::uint64_t>(num_rows_), c_.max_rows); ++at) {
      read(at);
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (std::uint32_t k = 0; k < c_.top_k; ++k) {
        const std::int32_t id = topk_ids_[at * c_.top_k + k];
        if (id < 0) continue;
        expert_row(row.data(), c_.hidden, first + static_cast<std::uint32_t>(id), c_.dtype, value.data());
        for (std::uint32_t h = 0; h < c_.hidden; ++h) {
          const float term = topk_weights_[at * c_.top_k + k] * value[h];
          sum[h] = sum[h] + term;
        }
      }
      for (std::uint32_t h = 0; h < c_.hidden; ++h)
        store(expert_out_.data() + at * stride + h * size, rounded_to(sum[h], c_.dtype), c_.dtype);
    }
    return;
  }
  for (std::uint32_t e = 0; e < local_experts(c_, c_.rank); ++e) {
    const bool padded = c_.layout == LayoutKind::Padded;
    const std::uint64_t start = padded ? std::uint64_t{e} * c_.max_per_expert : static_cast<std::uint64_t>(offsets_[e]);
    const std::uint64_t most = padded ? start + c_.max_per_expert : c_.max_rows;
    for (std::uint64_t at = start; at < start + static_cast<std::uint64_t>(counts_[e]) && at < most; ++at) {
      read(at);
      expert_row(row.data(), c_.hidden, first + e, c_.dtype, value.data());
      for (std::uint32_t h = 0; h < c_.hidden; ++h) store(expert_out_.data() + at * stride + h * size, value[h], c_.dtype);
    }
  }
}

// Behind each row that has room, the number of its choice; all else stays poisoned.
void Walker::attach_tail() {
  const std::vector<std::vector<Choice>>& lists = step_->arrivals[c_.rank];
  const bool compact = c_.layout == LayoutKind::Compact, padded = c_.layout == LayoutKind::Padded;
  tail_ = poisoned<float>(output_rows() * (compact ? c_.top_k : 1));
  for (std::size_t e = 0; e < lists.size(); ++e) {
    const std::uint64_t start = padded ? e * c_.max_per_expert : compact ? 0 : static_cast<std::uint64_t>(offsets_[e]);
    for (std::uint64_t i = 0; i < lists[e].size() && (padded ? i < c_.max_per_expert : start + i < c_.max_rows); ++i) {
      const Choice& choice = lists[e][i];
      const float* numbers = step_->roles[choice.source].tail.data() + std::size_t{choice.token} * c_.top_k;
      if (!compact) tail_[start + i] = numbers[choice.k];
      for (std::uint32_t k = 0; compact && k < c_.top_k; ++k)
        if (topk_ids_[i * c_.top_k + k] >= 0) tail_[i * c_.top_k + k] = numbers[k];
    }
  }
}

void Walker::check_tail() const {
  for (std::size_t i = 0; i < tail_out_.size(); ++i)
    if (!same_bits(tail_out_[i], role_.fits[i] != 0 ? role_.tail[i] : 0.0f))
      wrong("combine: the tail of token " + std::to_string(i / c_.top_k) + ", choice " + std::to_string(i % c_.top_k) +
            " is wrong");
}

void Walker::check_combine() const {
  const std::vector<char> expected = combined(c_, *step_, c_.rank);
  const std::size_t size = dtype_bytes(c_.dtype), row = c_.hidden * size, stride = row + kGap;
  for (std::uint32_t t = 0; t < role_.tokens; ++t) {
    const char* seen = y_.data() + t * stride;
    const char* wanted = expected.data() + t * row;
    if (std::memcmp(seen, wanted, row) == 0) continue;
    std::uint32_t h = 0;
    while (std::memcmp(seen + h * size, wanted + h * size, size) == 0) ++h;
    char text[96];
    std::snprintf(text, sizeof text, "y[%u, %u] is %.9g, not %.9g", t, h, static_cast<double>(load(seen + h * size, c_.dtype)),
                  static_cast<double>(load(wanted + h * size, c_.dtype)));
    wrong(std::string("combine: ") + text);
  }
  for (std::uint32_t t = 0; t + 1 < role_.tokens; ++t)
    for (std::size_t i = row; i < stride; ++i)
      if (y_[t * stride + i] != static_cast<char>(kPoison)) wrong("combine: wrote behind row " + std::to_string(t));
  totals_.outputs += expected.size();
}

// ---- memory that may not be read any more --------------------------------------------------------------------------------------

// Poisons the blocks of a step that this rank has read, except those that its mates read as well. The start of a slot is enough to
// reveal a second or late read.
void Walker::poison_slots(Op op) {
  const std::uint32_t set = set_of(c_, number_);
  const Blocks& b = e_.blocks();
  for (std::uint32_t peer : b.peers()) {
    const std::uint64_t slot = b.relayed(peer) ? network_block(c_, op).bytes(max_rows_of_block(c_))
                                               : b.heap().slot_bytes[static_cast<std::uint32_t>(op)];
    if (op == Op::Combine || !b.relayed(peer)) std::memset(b.own_slot(set, op, peer), kPoison, std::min(kEnough, slot));
  }
  totals_.count(Fault::Poisoned, b.peers().size());
  if (op != Op::Combine) return;
  for (std::uint32_t source : b.rails().sources)
    for (std::uint32_t mate : b.rails().mates)
      std::memset(b.relay_slot(set, source, mate), kPoison, std::min(kEnough, combine_block(c_).bytes(max_rows_of_block(c_))));
}

// Poisons a block that ranks of this node read here, once all have returned its rows. Then only its routes are read, for tails.
void Walker::poison_relayed() {
  const Blocks& b = e_.blocks();
  const std::uint32_t set = set_of(c_, number_);
  const BlockLayout block = dispatch_block(c_);
  relayed_.resize(b.rails().sources.size());
  for (std::size_t i = 0; i < relayed_.size(); ++i) {
    const std::uint32_t source = b.rails().sources[i];
    const auto returned = [&](std::uint32_t mate) { return b.has_returned(number_, source, mate); };
    if (relayed_[i] || !std::all_of(b.rails().mates.begin(), b.rails().mates.end(), returned)) continue;
    relayed_[i] = true;
    char* const at = b.own_slot(set, Op::Dispatch, source);
    std::memset(at, kPoison, block.header_bytes);
    for (std::uint32_t row = 0; row < max_rows_of_block(c_); ++row)
      std::memset(at + block.row_at(row), kPoison, step_->has_tail ? block.route_at : block.row_bytes);
    if (step_->late) std::memset(b.own_slot(set, Op::Weights, source), kPoison, std::min(kEnough, b.heap().slot_bytes[2]));
    totals_.count(Fault::Relayed);
  }
}

void Walker::poison_slices() {
  for (std::uint32_t replica : e_.blocks().replicas())
    std::memset(e_.blocks().own_slice(set_of(c_, number_), replica), kPoison, e_.blocks().heap().slice_bytes);
  if (!step_->released && !e_.blocks().replicas().empty()) totals_.count(Fault::Finished, plan_->slice.tokens(plan_->tokens));
}

}  // namespace pplx::sim
