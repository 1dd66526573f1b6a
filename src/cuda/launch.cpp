// The calls of an Exchange that launch: from what Python gives to what a kernel takes.
#include <algorithm>

#include "exchange.h"
#include "on_device.h"

namespace pplx::cuda {
namespace {

template <typename T>
void point(T*& to, char* buffer, std::uint64_t at) {
  to = reinterpret_cast<T*>(buffer + at);
}

template <typename T>
void point(T*& to, char* buffer, const OutputPart& part) {
  to = part.exists() ? reinterpret_cast<T*>(buffer + part.at) : nullptr;
}

ReceivedView received_view(const BufferLayout& b, char* buffer) {
  ReceivedView r;
  point(r.step, buffer, b.step);
  point(r.overflowed, buffer, b.overflowed);
  point(r.rows_begin, buffer, b.rows_begin);
  point(r.choices, buffer, b.choices);
  point(r.place, buffer, b.place);
  if (b.weight != 0) point(r.weight, buffer, b.weight);
  return r;
}

PlanView plan_view(const Config& c, std::uint64_t tokens, char* plan) {
  PlanView p;
  const std::uint64_t choices = 4 * align_up(tokens * c.top_k, 4);
  p.counts = reinterpret_cast<std::uint32_t*>(plan);
  p.rows = reinterpret_cast<std::uint32_t*>(plan + plan_rows_at(c));
  p.ids_digest = reinterpret_cast<std::uint64_t*>(plan + plan_digest_at(c));
  p.weights = reinterpret_cast<float*>(plan + plan_weights_at(c));
  char* at = plan + plan_weights_at(c) + choices;
  p.ids = reinterpret_cast<std::int32_t*>(at);
  p.index = reinterpret_cast<std::uint32_t*>(at + choices);
  p.token_rows = reinterpret_cast<std::uint32_t*>(at + 2 * choices);
  return p;
}

}  // namespace

std::uint32_t Exchange::dispatch(const Launch& launch, const Tokens& tokens, const Outputs& outputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Config& c = common_.c;
  const OnDevice on(device_);
  const cudaStream_t stream = launch.stream;
  Launches::Sequence& here = launches_.on(stream);
  if ((launch.halves & kSend) != 0 && here.open_steps() == c.in_flight)
    throw Misuse(too_many_open_text("a step", c.in_flight));
  // A dispatch notes how many thread blocks the combine of its step will have, so that number stays while a step is open.
  if (sms_ != wanted_sms_ && here.open_steps() == 0 && launches_.eager().open_steps() == 0) {
    sms_ = wanted_sms_;
    common_.combine_blocks = sms_ * kCombineBlocksPerSm;
  }
  const Slice& slice = common_.slice;
  if ((launch.halves & kSend) != 0 && slice.tokens(tokens.count) > common_.most_rows)
    throw Misuse(too_many_tokens_text(tokens.count, slice.of, common_.most_rows));
  const BufferLayout& b = layout_;
  DispatchArguments a;
  a.common = common_;
  a.x = tokens.x;
  a.x_stride = tokens.stride;
  a.scales = tokens.scales;
  a.scale = tokens.scale;
  a.ids = tokens.ids;
  a.wide_ids = tokens.wide_ids;
  a.send = (launch.halves & kSend) != 0;
  a.recv = (launch.halves & kRecv) != 0;
  a.tokens = tokens.count;
  a.own = slice.tokens(a.tokens);
  a.weights = tokens.weights;
  a.plan = plan_view(c, tokens.count, launch.plan);
  a.received = received_view(b, launch.buffer);
  point(a.out.x, launch.buffer, b.x);
  point(a.out.scales, launch.buffer, b.scale);
  a.out.scale = scale_strides(c);
  point(a.out.counts, launch.buffer, b.counts);
  point(a.out.offsets, launch.buffer, b.offsets);
  point(a.out.weights, launch.buffer, b.weights);
  point(a.out.src_rank, launch.buffer, b.src_rank);
  point(a.out.src_token, launch.buffer, b.src_token);
  point(a.out.topk_ids, launch.buffer, b.topk_ids);
  point(a.out.topk_weights, launch.buffer, b.topk_weights);
  point(a.out.num_rows, launch.buffer, b.num_rows);
  if (outputs.x != nullptr) {
    a.out.x = outputs.x;
    a.out.scales = outputs.scales;
    (c.layout == LayoutKind::Compact ? a.out.topk_weights : a.out.weights) = outputs.weights;
  }
  const std::uint32_t blocks = sms_ * kDispatchBlocksPerSm;
  a.tokens_per_unit = tokens_per_unit(a.own, blocks);
  a.units = common_.living + ceil_div(a.own, a.tokens_per_unit);
  here.follow(stream, a.send);
  if (a.send) here.after_received(stream);
  check(launch_dispatch(a, blocks, stream), "launching dispatch");
  if (!a.recv) here.note_send(stream);
  if (!a.send) return 0;
  here.open(launch.buffer);
  return here.eager() ? steps_.open() : steps_.next();
}

void Exchange::combine(const Launch& launch, const ExpertOutputs& outputs, const Result& result) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const OnDevice on(device_);
  const cudaStream_t stream = launch.stream;
  Launches::Sequence& here = launches_.on(stream);
  Launches::Sequence& opened = launches_.open_with(here, launch.buffer);
  CombineArguments a;
  a.common = common_;
  a.expert_out = outputs.expert_out;
  a.expert_stride = outputs.stride;
  a.expert_rows = outputs.rows;
  a.weighted = outputs.weighted;
  a.uses_weights = outputs.uses_weights;
  a.release = outputs.release;
  a.weights = outputs.weights;
  a.has_tail = result.has_tail;
  a.tail = outputs.tail;
  a.tail_rows = outputs.tail_rows;
  a.tail_out = result.tail;
  a.accumulate = result.accumulate;
  a.send = (launch.halves & kSend) != 0;
  a.recv = (launch.halves & kRecv) != 0;
  a.tokens = result.tokens;
  a.own = common_.slice.tokens(a.tokens);
  a.plan = plan_view(common_.c, result.tokens, launch.plan);
  a.received = received_view(layout_, launch.buffer);
  a.y = result.y;
  a.y_stride = result.stride;
  const std::uint64_t rows = std::uint64_t{a.tokens} * std::min(common_.c.world, common_.c.top_k);
  const SentStrips few(common_.row_bytes, kSentVectorsOfFew);
  a.sent = is_plain(a) && sends_few(rows, few.strips, common_.combine_blocks) ? few : SentStrips(common_.row_bytes, kSentVectors);
  here.follow(stream, a.send);
  check(launch_combine(a, common_.combine_blocks, stream), "launching combine");
  if (!a.recv) {
    here.note_send(stream);
    return;
  }
  if (!a.send) here.note_received(stream);
  opened.close(launch.buffer);
  if (here.eager()) steps_.close();
}

}  // namespace pplx::cuda
