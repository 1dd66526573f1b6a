#include "proxy.h"

#include <algorithm>
#include <atomic>
#include <iterator>

#include "../src/host/atomic.h"
#include "../src/host/trace.h"

namespace pplx {
namespace {

// A write's context: life (24) | object (8) | word index (32).
std::uint64_t context_of(std::uint32_t life, std::uint32_t object, std::uint32_t index) {
  return std::uint64_t{life & 0xffffffu} << 40 | std::uint64_t{object} << 32 | index;
}
std::uint32_t life_in(std::uint64_t context) { return static_cast<std::uint32_t>(context >> 40); }
std::uint32_t object_in(std::uint64_t context) { return static_cast<std::uint32_t>(context >> 32) & 0xffu; }
std::uint32_t index_in(std::uint64_t context) { return static_cast<std::uint32_t>(context); }

Phase phase_of(Op op) { return op == Op::Dispatch ? Phase::DispatchRecv : op == Op::Combine ? Phase::CombineRecv : Phase::Weights; }

// Eight words at once. Most looks at a mailbox find nothing, and without a branch per word they cost a cycle each.
bool differ(const std::uint64_t* mail, const std::uint64_t* seen) {
  std::uint64_t difference = 0;
  for (int i = 0; i < 8; ++i) difference |= __atomic_load_n(mail + i, __ATOMIC_RELAXED) ^ seen[i];
  return difference != 0;
}

}  // namespace

Abort ProxyFailure::abort(std::uint32_t rank) const {
  if (peer != kNoRank) return {AbortReason::Fabric, phase_of(op), rank, peer, step};
  // A rank that lost its whole fabric blames itself, so that every rank names the same one.
  return {AbortReason::Fabric, Phase::None, rank, rank, 0};
}

std::string ProxyFailure::text(std::uint32_t rank) const {
  std::string text = "rank " + std::to_string(rank) + " lost the network";
  if (peer != kNoRank) text += " to rank " + std::to_string(peer) + " (" + op_name(op) + " of step " + std::to_string(step) + ")";
  return text + ": " + message;
}

void Proxy::attach(ProxyObject o) {
  detach(o.config.object);
  auto object = std::make_unique<Object>();
  object->heap = heap_of(o.config);
  object->life = ++life_ & 0xffffffu;
  const std::size_t words = std::size_t{o.config.in_flight} * kOps * o.config.world, mail = object->heap.mailbox_words(o.config);
  for (std::uint32_t op = 0; op < kOps; ++op) {
    object->layout[op] = network_block(o.config, Op(op));
    object->parts[op] = part_sizes(o.config, Op(op));
  }
  object->words = static_cast<std::uint32_t>(words);
  for (std::uint32_t row = 0, world = o.config.world; o.targets.size() < words; ++row)
    o.targets.resize(o.targets.size() + world, object->heap.remote_slot_at(row / kOps, Op(row % kOps), o.config.rank));
  object->seen.resize(align_up(mail, kBatch));   // the heap has that much room behind the mailbox
  object->out.resize(words * object->places() + (mail - words));
  if (object->places() > 1) object->senders.resize(words);
  object->in.resize(words);
  for (std::uint32_t set = 0; set < o.config.in_flight; ++set)
    for (std::uint32_t peer = 0; peer < o.config.world; ++peer)
      object->in[object->heap.word_index(o.config, set, Op::Dispatch, peer)].next = first_step_of_set(o.config, set);
  for (std::uint32_t i = 1; i < o.config.world; ++i) {
    const std::uint32_t peer = (o.config.rank + i) % o.config.world;
    if (o.peers[peer]) object->remote.push_back(peer);
  }
  object->o = std::move(o);
  objects_[object->o.config.object] = std::move(object);
  // At most one job per word can be queued, so posting never allocates.
  std::size_t all = 0;
  for (const std::unique_ptr<Object>& each : objects_) all += each ? each->out.size() : 0;
  queue_.reserve(all);
}

void Proxy::detach(std::uint32_t number) {
  Object* object = objects_[number].get();
  if (object == nullptr) return;
  std::size_t kept = 0;
  for (const Job& job : queue_)
    if (job.object != number) queue_[kept++] = job;
  queue_.resize(kept);
  outstanding_ -= object->outstanding;
  for (std::uint32_t set = 0; set < object->o.config.in_flight; ++set)
    for (std::uint32_t peer : object->remote) {
      const Outgoing& out = object->out[object->heap.word_index(object->o.config, set, Op::Dispatch, peer)];
      const Incoming& in = object->in[object->heap.word_index(object->o.config, set, Op::Combine, peer)];
      if (out.begun && !(in.begun && in.step == out.step && in.done > 0)) --awaited_;
    }
  objects_[number].reset();
}

bool Proxy::unused() const {
  return std::none_of(std::begin(objects_), std::end(objects_),
                      [](const std::unique_ptr<Object>& each) { return each != nullptr; });
}

std::uint32_t Proxy::outstanding(std::uint32_t number) const {
  const Object* object = objects_[number].get();
  if (object == nullptr) return 0;
  std::uint32_t n = object->outstanding;
  for (const Job& job : queue_) n += job.object == number;
  for (std::size_t index = 0; index < object->heap.mailbox_words(object->o.config); ++index) {
    n += load_mail<HostAtomics>(mailbox_entry(object->heap, object->o.memory, index)) != object->seen[index];
  }
  return n;
}

bool Proxy::step() {
  bool moved = retry();
  moved |= take_mail();
  moved |= take_completions();
  return moved;
}

// Blocks for a peer that cannot take more stay in the queue; the others go on.
bool Proxy::retry() {
  if (queue_.empty()) return false;
  const std::size_t waiting = queue_.size();
  bool moved = false;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < waiting; i += kBatch) {
    const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(kBatch, waiting - i));
    moved |= post(&queue_[i], count);
    for (std::uint32_t j = 0; j < count; ++j) {
      const Job job = queue_[i + j];
      const Outgoing& out = objects_[job.object]->out[job.index];
      if (out.posted < out.shards) queue_[kept++] = job;
    }
  }
  queue_.resize(kept);
  return moved;
}

bool Proxy::take_mail() {
  bool moved = false;
  for (std::uint32_t number = 0; number < kMaxObjects; ++number) {
    if (!objects_[number]) continue;
    Object& object = *objects_[number];
    // Another proxy of this rank may add, too.
    if (object.heap.turns != 0) __atomic_fetch_add(word(object, object.heap.turns), 1, __ATOMIC_RELAXED);
    const std::uint64_t* const mail = word(object, object.heap.mailbox);
    const std::uint64_t* const seen = object.seen.data();
    const std::size_t words = object.seen.size();
    const std::uint32_t world = object.o.config.world;
    const auto rows = static_cast<std::uint32_t>(object.heap.mailbox_words(object.o.config) / world);
    for (std::size_t at = 0; at < words; at += kBatch) {
      if (!differ(mail + at, seen + at)) continue;
      const auto first = static_cast<std::uint32_t>(at / world), last = static_cast<std::uint32_t>((at + kBatch - 1) / world);
      for (std::uint32_t row = first; row <= last && row < rows; ++row) moved |= take_row(number, object, row);
    }
  }
  return moved;
}

// Looks at the mailbox, or the credits, of one op of one set. Posts blocks as it finds them, not after the whole look: a peer waits
// for the first write.
bool Proxy::take_row(std::uint32_t number, Object& object, std::uint32_t row) {
  const std::uint32_t world = object.o.config.world, rank = object.o.config.rank;
  const std::uint64_t* const mail = word(object, object.heap.mailbox) + std::size_t{row} * world;
  std::uint64_t* const seen = object.seen.data() + std::size_t{row} * world;
  const std::uint32_t rows = object.o.config.in_flight * kOps;
  const bool credits = row >= rows;
  const std::uint32_t first = credits ? object.words * object.places() + (row - rows) * world : row * world;   // in `out`
  Job batch[kBatch] = {};
  std::uint32_t count = 0;
  bool moved = false;
  const auto flush = [&] {
    post(batch, count);
    for (std::uint32_t i = 0; i < count; ++i)
      if (object.out[batch[i].index].posted < object.out[batch[i].index].shards) queue_.push_back(batch[i]);
    count = 0;
  };
  for (std::uint32_t i = 1; i < world; ++i) {
    const std::uint32_t peer = rank + i < world ? rank + i : rank + i - world;
    const std::uint64_t found = load_acquire(mail + peer);
    if (found == seen[peer]) continue;
    seen[peer] = found;
    if (!object.o.peers[peer]) continue;
    Job job{number, first + peer, peer, Op(credits ? (row - rows) % kPieceOps : row % kOps)};
    const auto take = [&] {
      moved = true;
      batch[count++] = job;
      if (count == kBatch) flush();
    };
    if (credits) {
      if (begin_credit(object, job, found)) take();
      continue;
    }
    const std::uint32_t word = job.index;
    const auto send = [&](const Cut& cut) {
      begin(object, job, word, cut);
      take();
    };
    const Mail mail = read_mail(found);
    if (mail.in_pieces)
      while (const std::optional<Cut> piece = next_piece(object, job, word, mail)) send(*piece);
    else if (object.goes_in_parts(job.op))
      while (const std::optional<Cut> part = next_part(object, job, word, mail)) send(*part);
    else
      send(whole(object, job, word, mail));
  }
  flush();
  return moved;
}

Proxy::Cut Proxy::whole(Object& object, const Job& job, std::uint32_t word, Mail mail) {
  if (object.heap.in_pieces) object.senders[word] = {mail.step, 1};
  return {mail.step, 0, 0, object.layout[std::uint32_t(job.op)].bytes(mail.rows)};
}

// The next part that the mail announces; none: all of them are in flight.
std::optional<Proxy::Cut> Proxy::next_part(Object& object, const Job& job, std::uint32_t word, Mail mail) {
  const PartSizes& sizes = object.parts[std::uint32_t(job.op)];
  const BlockLayout& layout = object.layout[std::uint32_t(job.op)];
  Sender& sender = object.senders[word];
  if (!object.out[word].begun || sender.step != mail.step) sender = {mail.step, 0, 0, sizes.count(mail.rows)};
  const std::uint32_t part = sender.begun;
  if (part == std::min(mail.parts, sender.parts)) return std::nullopt;
  ++sender.begun;
  const std::uint64_t at = part == 0 ? 0 : layout.row_at(sizes.begin(part));
  return Cut{mail.step, part, at, layout.bytes(std::min(sizes.begin(part + 1), mail.rows)) - at};
}

// The next piece that the mail announces, in its place; none: all of them are in flight. The device announces a piece when its
// place is free here and at the peer.
std::optional<Proxy::Cut> Proxy::next_piece(Object& object, const Job& job, std::uint32_t word, Mail mail) {
  const Config& c = object.o.config;
  const std::uint32_t rows = object.heap.piece_rows;
  Sender& sender = object.senders[word];
  if (!object.out[word].begun || sender.step != mail.step) sender = {mail.step};
  const std::uint32_t piece = sender.begun, from = piece * rows;
  if (mail.rows <= (c.on_gpu ? piece : from)) return std::nullopt;
  ++sender.begun;
  if (piece >= kPlaces && object.out[object.out_index(word, piece)].unsent != 0 && object.o.on_failure) {
    const std::string what = "piece " + std::to_string(piece) + " lies where piece " + std::to_string(piece - kPlaces) +
        " has yet to leave";
    object.o.on_failure({job.peer, job.op, mail.step, what});
  }
  const std::uint32_t its_rows =
      c.on_gpu ? rows_of_piece(object.heap, c, object.o.memory, mail.step, job.op, job.peer, piece) : mail.rows - from;
  return Cut{mail.step, piece, object.heap.piece_at(job.op, piece),
             object.layout[std::uint32_t(job.op)].bytes(std::min(rows, its_rows))};
}

// Splits what was cut into shards, and makes it the job's.
void Proxy::begin(Object& object, Job& job, std::uint32_t word, const Cut& cut) {
  job.index = object.out_index(word, cut.number);
  Outgoing& out = object.out[job.index];
  out.begun = true;
  out.step = cut.step;
  out.piece = cut.number;
  out.source = outgoing_of(mailbox_entry(object.heap, object.o.memory, word)) + cut.at;
  out.target = object.target_at(out.step, job.op, job.peer) + cut.at;
  out.bytes = cut.bytes;
  out.shards = 1;
  out.shard_bytes = out.bytes;
  if (out.bytes > shard_bytes_) {
    out.shards = static_cast<std::uint32_t>(std::min<std::uint64_t>((out.bytes + shard_bytes_ - 1) / shard_bytes_, endpoints_));
    out.shard_bytes = align_up((out.bytes + out.shards - 1) / out.shards, 64);
  }
  out.unsent = out.shards;
  out.posted = 0;
  if (cut.number == 0 && job.op == Op::Dispatch) ++awaited_;
}

// A credit for each piece that has been read, even if a later one says more: one that is overtaken by six others would count again,
// but none can be, for without it no piece goes that the others are for. True if a job is to be made: there is one in the queue
// until all credits have been posted.
bool Proxy::begin_credit(Object& object, const Job& job, std::uint64_t mail) {
  Outgoing& out = object.out[job.index];
  const bool queued = out.begun && out.posted < out.shards;
  const auto step = static_cast<std::uint32_t>(mail);
  if (!out.begun || out.step != step) out.posted = 0;
  out.begun = true;
  out.step = step;
  out.target = object.target_at(step, job.op, job.peer);
  out.shards = pieces_in(mail, object.o.generation, step);
  return !queued;
}

// `more` is set only when another write on the endpoint is certain: the next shard of every block is tried, later ones only if the
// fabric takes it.
bool Proxy::post(const Job* jobs, std::uint32_t count) {
  std::uint32_t to_come[kMaxEndpoints] = {};
  for (std::uint32_t i = 0; i < count; ++i) ++to_come[endpoint_of(jobs[i])];
  bool moved = false;
  for (std::uint32_t i = 0; i < count; ++i) {
    Object& object = *objects_[jobs[i].object];
    --to_come[endpoint_of(jobs[i])];
    moved |= post_shards(object, jobs[i], to_come);
  }
  return moved;
}

bool Proxy::post_shards(Object& object, const Job& job, const std::uint32_t* to_come) {
  const Config& c = object.o.config;
  Outgoing& out = object.out[job.index];
  const bool credit = object.is_credit(job.index);
  Write w;
  w.peer = static_cast<int>(job.peer);
  w.source = &object.o.region;
  w.target = object.o.peers[job.peer].get();
  w.context = context_of(object.life, job.object, job.index);
  bool moved = false;
  while (out.posted < out.shards) {
    const std::uint64_t begin = std::min(out.bytes, out.shard_bytes * out.posted);
    const std::uint64_t end = std::min(out.bytes, begin + out.shard_bytes);
    const std::uint32_t endpoint = endpoint_of(job);
    w.endpoint = static_cast<int>(endpoint);
    w.source_offset = out.source + begin;
    w.bytes = end - begin;
    w.target_offset = out.target + begin;
    w.immediate = credit ? pack({Op::Credit, c.object, c.rank, out.step, std::uint32_t(job.op), 1, out.posted})
                         : pack({job.op, c.object, c.rank, out.step, out.posted, out.shards, out.piece});
    w.more = to_come[endpoint] > 0;
    Trace& trace = Trace::of_module();
    const std::uint64_t begun = trace.on() ? Trace::now() : 0;
    try {
      const Post post = fabric_.write(w);
      go_on();
      if (post == Post::Again) {
        ++stats_.again;
        return moved;
      }
    } catch (const FabricError& error) {
      go_on();
      out.posted = out.shards;
      ++stats_.errors;
      if (object.o.on_failure) object.o.on_failure({job.peer, job.op, out.step, error.what()});
      return true;
    }
    ++out.posted;
    ++object.outstanding;
    ++outstanding_;
    stats_.deepest = std::max<std::uint64_t>(stats_.deepest, outstanding_);
    ++stats_.writes;
    stats_.bytes += w.bytes;
    ++stats_.endpoint_writes[endpoint];
    stats_.endpoint_bytes[endpoint] += w.bytes;
    if (begun != 0) {
      const std::uint64_t flow = credit ? 0 : flow_of(job.peer, out.step, w.immediate);
      trace.add({begun, Trace::now(), flow, w.bytes, Traced::Posted, c.object, out.step, job.peer, endpoint, std::uint32_t(job.op)});
    }
    moved = true;
  }
  return moved;
}

bool Proxy::take_completions() {
  const int n = fabric_.poll(batch_, 64);
  go_on();
  for (int i = 0; i < n; ++i) switch (batch_[i].kind) {
      case Completion::Kind::Arrived: arrived(batch_[i].immediate); break;
      case Completion::Kind::Sent: sent(batch_[i].context); break;
      case Completion::Kind::Failed: failed(batch_[i]); break;
    }
  return n > 0;
}

// A peer's dispatch may be one turn of its set ahead of this rank. Its weights follow its own dispatch, whichever is here first; a
// combine answers a dispatch that this rank sent.
void Proxy::arrived(std::uint32_t bits) {
  const Immediate i = unpack(bits);
  Object* object = objects_[i.object].get();
  const bool is_credit = i.op == Op::Credit && object != nullptr && object->heap.in_pieces && i.shard < kPieceOps;
  if (object == nullptr || (static_cast<std::uint32_t>(i.op) >= kOps && !is_credit) || i.source >= object->o.config.world ||
      !object->o.peers[i.source]) {
    ++stats_.dropped;
    return;
  }
  if (is_credit) {
    credited(*object, i);
    return;
  }
  const Config& c = object->o.config;
  const std::uint32_t set = set_of(c, i.step);
  Incoming& in = object->in[object->heap.word_index(c, set, i.op, i.source)];
  const Outgoing& asked = object->out[object->heap.word_index(c, set, Op::Dispatch, i.source)];
  const Incoming& its = object->in[object->heap.word_index(c, set, Op::Dispatch, i.source)];
  const bool current = its.begun && same_step(its.step, i);   // the dispatch has begun
  const std::uint32_t step = i.op == Op::Combine ? asked.step : current ? its.step : its.next;
  const bool late = in.begun && step_difference(step, in.step) < 0;   // weights of the set's next step came before their dispatch
  const bool open = !late && (i.op != Op::Combine || asked.begun) && same_step(step, i);
  if (!open || i.shard >= i.shards) {
    ++stats_.dropped;
    return;
  }
  if (Trace::of_module().on()) {
    const std::uint64_t now = Trace::now();
    const std::uint64_t flow = flow_of(c.rank, step, bits);
    Trace::of_module().add({now, now, flow, 0, Traced::Arrived, c.object, step, i.source, 0, std::uint32_t(i.op)});
  }
  if (!in.begun || in.step != step) {
    in.begun = true;
    in.step = step;
    in.done = 0;
    if (i.op == Op::Dispatch) in.next = step + c.in_flight;
  }
  const bool first = in.done == 0;
  if (!count_arrived(*object, in, i, step)) return;
  char* const memory = object->o.arrivals == nullptr ? object->o.memory : object->o.arrivals;
  if (object->places() > 1 && i.op != Op::Weights)
    store_release(reinterpret_cast<std::uint64_t*>(memory + object->heap.count_at(c, object->heap.pieces, set, i.op, i.source)),
                  pieces_word(object->o.generation, step, in.done));
  if (first) {
    if (i.op == Op::Combine) --awaited_;
    raise_arrival<HostAtomics>(memory, object->heap, c, signal_of(i.op), i.source, object->o.generation, step);
  }
  if (object->o.arrivals != nullptr)
    // Or the processor would hold the store back, to combine it with its neighbours
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

// Notes a shard. Whether more of the leading parts, or pieces, have landed. A number of a part is all of it, that of a piece its
// low bits.
bool Proxy::count_arrived(Object& object, Incoming& in, const Immediate& i, std::uint32_t step) {
  const std::uint32_t places = object.places();
  const bool in_parts = object.goes_in_parts(i.op);
  const std::uint32_t piece = in_parts ? i.piece : in.done + pieces_ahead(i.piece, in.done);
  if (!in_parts && piece - in.done >= (object.heap.in_pieces ? kPlaces : 1)) {
    ++stats_.duplicates;
    return false;
  }
  switch (in.masks[piece % places].add(step, i.shard, i.shards, piece)) {
    case ShardMask::Outcome::Pending: return false;
    case ShardMask::Outcome::Duplicate: ++stats_.duplicates; return false;
    case ShardMask::Outcome::Inconsistent: ++stats_.dropped; return false;
    case ShardMask::Outcome::Complete: break;
  }
  const std::uint32_t before = in.done;
  while ((!in_parts || in.done < kMostParts) && in.masks[in.done % places].complete(step, in.done)) ++in.done;
  return in.done > before;
}

// The peer has read a piece of a block that this rank sends in pieces.
void Proxy::credited(Object& object, const Immediate& i) {
  const Config& c = object.o.config;
  const Op op = Op(i.shard);
  const std::uint32_t set = set_of(c, i.step), index = static_cast<std::uint32_t>(object.heap.word_index(c, set, op, i.source));
  Sender& sender = object.senders[index];
  if (!object.out[index].begun || !same_step(sender.step, i)) {
    ++stats_.dropped;
    return;
  }
  const std::uint32_t ahead = pieces_ahead(i.piece, sender.consumed);
  if (ahead >= kPlaces || sender.consumed + ahead >= sender.begun || (ahead == 1 && sender.next_has_credit)) {
    ++stats_.duplicates;
    return;
  }
  if (ahead == 1) {
    sender.next_has_credit = true;
    return;
  }
  sender.consumed += sender.next_has_credit ? 2 : 1;
  sender.next_has_credit = false;
  store_release(word(object, object.heap.count_at(c, object.heap.consumed, set, op, i.source)),
                pieces_word(object.o.generation, sender.step, sender.consumed));
}

Proxy::Object* Proxy::owner_of(std::uint64_t context) {
  if (object_in(context) >= kMaxObjects) return nullptr;
  Object* object = objects_[object_in(context)].get();
  return object != nullptr && object->life == life_in(context) && index_in(context) < object->out.size() ? object : nullptr;
}

void Proxy::sent(std::uint64_t context) {
  Object* object = owner_of(context);
  if (object == nullptr) return;   // its AllToAll was closed
  --object->outstanding;
  --outstanding_;
  const std::uint32_t index = index_in(context);
  if (object->is_credit(index)) return;
  Outgoing& out = object->out[index];
  const std::uint32_t word = index % object->words;
  if (Trace::of_module().on()) {
    const Config& c = object->o.config;
    const std::uint64_t now = Trace::now();
    Trace::of_module().add({now, now, 0, 0, Traced::Sent, c.object, out.step, word % c.world, 0, word / c.world % kOps});
  }
  if (--out.unsent == 0) left(*object, word);
}

// All shards of a block, or of one of its pieces, have left.
void Proxy::left(Object& object, std::uint32_t word) {
  const Config& c = object.o.config;
  const Op op = Op(word / c.world % kOps);
  if (object.heap.in_pieces || object.goes_in_parts(op)) {
    Sender& sender = object.senders[word];
    while (sender.left < sender.begun && object.out[object.out_index(word, sender.left)].unsent == 0) ++sender.left;
    if (object.heap.in_pieces && op != Op::Weights)
      store_release(Proxy::word(object, object.heap.count_at(c, object.heap.left, set_of(c, sender.step), op, word % c.world)),
                    pieces_word(object.o.generation, sender.step, sender.left));
    if (sender.left < std::max(sender.begun, sender.parts)) return;
  }
  say_sent<HostAtomics>(mailbox_entry(object.heap, object.o.memory, word), object.o.generation, object.out[word].step);
}

void Proxy::failed(const Completion& completion) {
  ++stats_.errors;
  const std::string why = fabric_.describe_error(completion) + " on " + fabric_.endpoint_name(completion.endpoint);
  if (!completion.has_context) {
    fail_all(why);
    return;
  }
  Object* object = owner_of(completion.context);
  if (object == nullptr) return;
  --object->outstanding;
  --outstanding_;
  const std::uint32_t index = index_in(completion.context);
  const std::uint32_t world = object->o.config.world, credits = object->words * object->places();
  ProxyFailure failure;
  failure.peer = index % world;
  failure.op = object->is_credit(index) ? Op((index - credits) / world % kPieceOps) : Op(index % object->words / world % kOps);
  failure.step = object->out[index].step;
  failure.message = why;
  if (object->o.on_failure) object->o.on_failure(failure);
}

void Proxy::fail_all(const std::string& message) {
  for (const std::unique_ptr<Object>& object : objects_)
    if (object && object->o.on_failure) object->o.on_failure({kNoRank, Op::Dispatch, 0, message});
}

}  // namespace pplx
