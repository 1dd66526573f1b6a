// The calls of an Exchange that launch: from what Python gives to what a kernel takes.
#include <algorithm>

#include "../../host/trace.h"
#include "../../protocol/hooks.h"
#include "../large/tuning.h"
#include "exchange.h"

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
  point(r.many, buffer, b.many);
  point(r.choices, buffer, b.choices);
  point(r.out_row, buffer, b.place);
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

DispatchHooks dispatch_hooks(const Common& k, std::uint32_t* words) {
  return {words, words + hook_arrived_at(k.c), hook_words(k.c), k.parts};
}

// Rows that a rank receives, if all send it the number of tokens that it sends.
std::uint64_t likely_rows(const CombineArguments& a) {
  return std::uint64_t{a.tokens} * std::min(a.common.c.world, a.common.c.top_k);
}

}  // namespace

std::uint32_t Exchange::large_dispatch() const {
  if (chunk_memory_ == nullptr) return kNone;
  if (common_.heap.in_pieces) return common_.word_rows;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(std::uint64_t{kLargeDispatch} * common_.word_rows, kNone));
}

bool Exchange::is_large(const Launch& launch, const DispatchArguments& a) const {
  const auto fits = [](const void* at) { return reinterpret_cast<std::uintptr_t>(at) % 16 == 0; };
  if (fits(a.out.x) && fits(a.out.scales) && ((launch.halves & kSend) == 0 || fits(a.x))) return a.own >= large_dispatch();
  if (common_.heap.in_pieces) throw Misuse("dispatch: with slot_bytes= tensors must begin at multiples of 16 bytes");
  return false;
}

void Exchange::check_order(const std::optional<Launches::Sequence::Early>& early, const char* call) const {
  if (!early) return;
  const std::string why =
      common_.heap.in_pieces ? "slot_bytes=" + std::to_string(common_.c.slot_bytes) + " blocks go in pieces, and" : "dedup='node'";
  throw Misuse(std::string(call) + ": step " + std::to_string(early->step) + " before step " + std::to_string(early->before) +
               ", but with " + why + " steps are received in order");
}

PieceArguments Exchange::pieces_of(const Launch& launch) const {
  PieceArguments p;
  p.tokens = tokens_of_round(common_.c);
  p.most = most_rounds(common_.c);
  p.counts = round_counts_;
  p.remote = remote_rounds_;
  p.begins = (launch.halves & kSend) != 0;
  p.begin = p.begins ? 0 : kPlaces;
  point(p.begin_rows, launch.plan, plan_rounds_at(common_.c));
  point(p.kept, launch.buffer, layout_.rounds);
  return p;
}

// Small steps have narrower strips, and rows of Compact may have longer ones.
Strips Exchange::sent_strips(const CombineArguments& a) const {
  const std::uint64_t rows = likely_rows(a);
  const std::uint32_t bytes = common_.row_bytes, blocks = common_.combine_blocks;
  const bool copied = common_.c.layout == LayoutKind::Compact, mapped_only = is_mapped_only(a);
  const Strips few(bytes, kSentVectorsOfFew);
  if ((copied || (mapped_only && !common_.heap.in_pieces)) && sends_few(rows, few.strips, blocks)) return few;
  if (!copied || !mapped_only) return Strips(bytes, kSentVectors);
  const int vectors = copied_vectors(rows, bytes, blocks);
  return Strips(bytes, vectors, copies_together(vectors, blocks));
}

void Exchange::add_nodes(CombineArguments& a) const {
  a.by_node = !memory_.nodes.empty();
  std::copy(memory_.nodes.begin(), memory_.nodes.end(), a.node_of);
}

// A send half never waits: it sends only the rounds that have room from the start.
void Exchange::cut(DispatchArguments& a) const {
  PieceArguments& p = a.pieces;
  while (p.tokens % a.tokens_per_chunk != 0) --a.tokens_per_chunk;
  a.chunks = ceil_div(a.own, a.tokens_per_chunk);
  p.chunks = p.tokens / a.tokens_per_chunk;
  p.end_chunk = a.recv ? a.chunks : std::min(a.chunks, kPlaces * p.chunks);
  if (a.send) return;
  a.ids = nullptr;  // the plan is there
  a.send = p.begin * p.chunks < a.chunks;
}

DispatchArguments Exchange::arguments_of(const Launch& launch, const Tokens& tokens, const Outputs& outputs) const {
  const Config& c = common_.c;
  const BufferLayout& b = layout_;
  DispatchArguments a;
  static_cast<Tokens&>(a) = tokens;
  a.common = common_;
  if (a.unread) only_beginnings(a.common);
  a.send = (launch.halves & kSend) != 0;
  a.recv = (launch.halves & kRecv) != 0;
  a.own = common_.slice.tokens(a.tokens);
  a.plan = plan_view(c, a.tokens, launch.plan);
  a.received = received_view(b, launch.buffer);
  a.relays = relays_;
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
  return a;
}

std::int64_t Exchange::dispatch(const Launch& launch, const Tokens& tokens, const Outputs& outputs) {
  TracedSpan traced((launch.halves & kSend) != 0 ? Traced::DispatchSend : Traced::DispatchRecv, config().object, kUnknownStep);
  const std::lock_guard<std::mutex> lock(mutex_);
  const Config& c = common_.c;
  const OnDevice on(device_);
  const cudaStream_t stream = launch.stream;
  Launches::Sequence& here = launches_.on(stream);
  if ((launch.halves & kSend) != 0 && here.open_steps() == c.in_flight)
    throw Misuse(too_many_open_text("a step", c.in_flight));
  const bool pieces = common_.heap.in_pieces, ordered = pieces || c.node_ranks != 0;
  if (ordered && launch.halves == kRecv)
    check_order(launches_.open_with(here, launch.buffer).early(launch.buffer, Op::Dispatch), "dispatch_recv");
  if (ordered && launch.halves == (kSend | kRecv)) check_order(here.opens_early(steps_.next()), "dispatch_recv");
  // A dispatch notes how many thread blocks the combine of its step will have, so that number stays while a step is open.
  if (sms_ != wanted_sms_ && here.open_steps() == 0 && launches_.eager().open_steps() == 0) {
    sms_ = wanted_sms_;
    common_.combine_blocks = sms_ * kCombineBlocksPerSm;
  }
  const Slice& slice = common_.slice;
  if ((launch.halves & kSend) != 0 && slice.tokens(tokens.tokens) > common_.most_rows)
    throw Misuse(too_many_tokens_text(tokens.tokens, slice.of, common_.most_rows));
  DispatchArguments a = arguments_of(launch, tokens, outputs);
  const std::uint32_t blocks = sms_ * kDispatchBlocksPerSm;
  a.tokens_per_unit = tokens_per_unit(a.own, blocks);
  a.units = common_.living + ceil_div(a.own, a.tokens_per_unit);
  const bool large = is_large(launch, a);
  if (large) {
    ++large_dispatches_;
    SendShare share{sending_share_, common_.living, a.own, c.layout != LayoutKind::Compact};
    if (pieces && share.percent == 0) share.percent = kSendingShareInRounds;
    a.stretches = a.recv && (pieces || (a.send && common_.living > 1)) ? sending_blocks(blocks, share) : blocks;
    a.tokens_per_chunk = tokens_of_chunk(a.own, c.top_k, a.stretches);
    a.chunks = ceil_div(a.own, a.tokens_per_chunk);
    a.chunk_counts = chunk_counts_;
    a.under_way = tokens_on_their_way(std::min(a.stretches, blocks), common_.dispatch.row_bytes, common_.living, c.top_k);
  }
  if (launch.hooks != nullptr) a.hooks = dispatch_hooks(a.common, launch.hooks);
  if (pieces) a.pieces = pieces_of(launch);
  if (pieces && large) cut(a);
  here.follow(stream, a.send);
  if ((launch.halves & kSend) != 0) here.after_received(stream);
  check(cuda::launch(choose(c, call_of(a, large)), a, blocks, stream), "launching dispatch");
  if (!a.recv) here.note_send(stream);
  if ((launch.halves & kSend) == 0) {
    if (ordered) launches_.open_with(here, launch.buffer).receive(launch.buffer);
    return 0;
  }
  const auto before = static_cast<std::uint32_t>(here.open_steps());
  const std::uint32_t step = here.eager() ? steps_.open() : steps_.next();
  if (here.eager()) traced.of(step);
  here.open(launch.buffer, here.eager() ? step : step + before, a.recv);
  return here.eager() ? std::int64_t{step} : -1;
}

std::vector<ExplainedLaunch> Exchange::explain(std::uint32_t tokens) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Config& c = common_.c;
  const std::uint32_t own = common_.slice.tokens(tokens);
  if (own > common_.most_rows) throw Misuse(too_many_tokens_text(tokens, common_.slice.of, common_.most_rows));
  DispatchArguments d;
  d.common = common_;
  d.ids = &common_;  // a plan is made
  DispatchCall dispatch = call_of(d, own >= large_dispatch());
  dispatch.general = dispatch.general || has_hooks_;
  CombineArguments a;
  a.common = common_;
  a.tokens = tokens;
  add_nodes(a);
  a.sent = sent_strips(a);
  const CombineCall combine = call_of(a, own >= common_.word_rows);
  const auto size = [&](std::uint32_t from) {
    if (from == 0) return std::string("every step of this AllToAll in pieces is large");
    if (from == kNone) return std::string("no step of this AllToAll is large");
    const std::string tokens = std::to_string(own) + " tokens are ", least = std::to_string(from);
    return own >= from ? tokens + "large, from " + least + " on" : tokens + "fewer than " + least;
  };
  const auto peers = [](bool mapped_only, const char* general) { return std::string(mapped_only ? "; all peers are mapped" : general); };
  const std::string rows = c.wire == Wire::Native ? "; rows go as they are" : "; rows are quantised";
  const auto sending = choose(c, dispatch);
  const auto summing = choose(c, combine);
  return {{"dispatch", sending.name, sms_ * kDispatchBlocksPerSm, sending.block, sending.smem,
           size(large_dispatch()) + rows +
               peers(dispatch.mapped_only, "; remote or dead peers, replicas or more than 32 ranks take the general kernel")},
          {"combine", summing.name, common_.combine_blocks, summing.block, summing.smem,
           size(common_.word_rows) + (combine.few ? "; rows go in narrow strips" : "") +
               peers(combine.mapped_only, "; remote peers, replicas or sums by node take the general kernel")}};
}

void Exchange::clear_hooks(std::uint32_t* words, cudaStream_t stream) {
  const OnDevice on(device_);
  check(launch_clear_hooks(words, hook_words_in_all(common_.c), stream), "launching the clearing of hooks");
}

void Exchange::await_experts(const Launch& launch, std::uint32_t first, std::uint32_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const OnDevice on(device_);
  AwaitedExperts a;
  a.common = common_;
  a.hooks = dispatch_hooks(common_, launch.hooks);
  point(a.step, launch.buffer, layout_.step);
  point(a.counts, launch.buffer, layout_.counts);
  point(a.offsets, launch.buffer, layout_.offsets);
  a.first = first;
  a.count = count;
  check(launch_await_experts(a, launch.stream), "launching the wait for experts");
}

void Exchange::combine(const Launch& launch, const ExpertOutputs& outputs, const Result& result) {
  const TracedSpan traced((launch.halves & kSend) != 0 ? Traced::CombineSend : Traced::CombineRecv, config().object, kUnknownStep);
  const std::lock_guard<std::mutex> lock(mutex_);
  const OnDevice on(device_);
  const cudaStream_t stream = launch.stream;
  Launches::Sequence& here = launches_.on(stream);
  Launches::Sequence& opened = launches_.open_with(here, launch.buffer);
  const bool pieces = common_.heap.in_pieces;
  if ((pieces || common_.c.node_ranks != 0) && (launch.halves & kRecv) != 0)
    check_order(opened.early(launch.buffer, Op::Combine), "combine_recv");
  CombineArguments a;
  static_cast<ExpertOutputs&>(a) = outputs;
  static_cast<Result&>(a) = result;
  a.common = common_;
  a.send = (launch.halves & kSend) != 0;
  a.recv = (launch.halves & kRecv) != 0;
  a.own = common_.slice.tokens(a.tokens);
  a.plan = plan_view(common_.c, a.tokens, launch.plan);
  a.received = received_view(layout_, launch.buffer);
  point(a.counts, launch.buffer, layout_.counts);
  a.relays = relays_;
  add_nodes(a);
  a.sent = sent_strips(a);
  const std::uint64_t likely = likely_rows(a);
  if (sends_few(likely, a.sent.strips, common_.combine_blocks)) a.rows_ahead = static_cast<std::uint32_t>(likely);
  const bool large = (pieces || !a.release) && a.own >= common_.word_rows;
  a.received_in = Strips(common_.row_bytes, received_vectors(a.sent.vectors));
  const bool copied = common_.c.layout == LayoutKind::Compact && is_mapped_only(a);
  if (copied && !sends_few(a.own, a.received_in.strips, 2 * common_.combine_blocks))
    a.received_in = Strips(common_.row_bytes, kReceivedVectorsOfCopies);
  if (large) ++large_combines_;
  a.sums_own = large && is_mapped_only(a) && a.send && a.recv && !pieces;
  if (pieces) a.pieces = pieces_of(launch);
  if (pieces && !a.recv) a.pieces.end = kPlaces;
  here.follow(stream, a.send);
  check(cuda::launch(choose(common_.c, call_of(a, large)), a, common_.combine_blocks, stream), "launching combine");
  if (!a.recv) {
    here.note_send(stream);
    return;
  }
  if (!a.send) here.note_received(stream);
  opened.close(launch.buffer);
  if (here.eager()) steps_.close();
}

}  // namespace pplx::cuda
