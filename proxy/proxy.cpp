#include "proxy.h"

#include <algorithm>

#include "../src/cpu/atomic.h"

namespace pplx {
namespace {

// A write's context: life (16) | object (8) | word index (32) | endpoint (8).
std::uint64_t context_of(std::uint32_t life, std::uint32_t object, std::uint32_t index) {
  return std::uint64_t{life & 0xffffffu} << 40 | std::uint64_t{object} << 32 | index;
}
std::uint32_t life_in(std::uint64_t context) { return static_cast<std::uint32_t>(context >> 40); }
std::uint32_t object_in(std::uint64_t context) { return static_cast<std::uint32_t>(context >> 32) & 0xffu; }
std::uint32_t index_in(std::uint64_t context) { return static_cast<std::uint32_t>(context); }

}  // namespace

void Proxy::attach(ProxyObject o) {
  auto object = std::make_unique<Object>();
  object->heap = heap_of(o.config);
  object->life = ++life_ & 0xffffffu;
  const std::size_t words = std::size_t{o.config.in_flight} * kOps * o.config.world;
  object->out.resize(words);
  object->in.resize(words);
  for (std::uint32_t set = 0; set < o.config.in_flight; ++set)
    for (std::uint32_t peer = 0; peer < o.config.world; ++peer)
      object->in[object->heap.word_index(o.config, set, Op::Dispatch, peer)].next = first_step_of_set(o.config, set);
  for (std::uint32_t i = 1; i < o.config.world; ++i) {
    const std::uint32_t peer = (o.config.rank + i) % o.config.world;
    if (o.peers[peer]) object->remote.push_back(peer);
  }
  object->o = std::move(o);
  // No more can be queued at once than there are words, so posting never allocates.
  queue_.reserve(queue_.capacity() + words);
  objects_[object->o.config.object] = std::move(object);
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
      if (out.begun && !in.mask.complete(out.step)) --awaited_;
    }
  objects_[number].reset();
}

std::uint32_t Proxy::outstanding(std::uint32_t number) const {
  const Object* object = objects_[number].get();
  if (object == nullptr) return 0;
  std::uint32_t n = object->outstanding;
  for (const Job& job : queue_) n += job.object == number;
  for (std::size_t index = 0; index < object->out.size(); ++index) {
    const std::uint64_t mail = load_acquire(word(*object, object->heap.mailbox + kWordBytes * index));
    n += mail != object->out[index].mail && read_mail(mail).final;
  }
  return n;
}

bool Proxy::step() {
  bool moved = take_mail();
  moved |= post();
  moved |= take_completions();
  return moved;
}

bool Proxy::take_mail() {
  bool moved = false;
  for (std::uint32_t number = 0; number < kMaxObjects; ++number) {
    if (!objects_[number]) continue;
    Object& object = *objects_[number];
    const Config& c = object.o.config;
    for (std::uint32_t set = 0; set < c.in_flight; ++set)
      for (std::uint32_t op = 0; op < kOps; ++op) {
        const BlockLayout layout = block_layout(c, Op(op));
        for (std::uint32_t peer : object.remote) {
          const auto index = static_cast<std::uint32_t>(object.heap.word_index(c, set, Op(op), peer));
          Outgoing& out = object.out[index];
          const std::uint64_t mail = load_acquire(word(object, object.heap.mailbox + kWordBytes * index));
          if (mail == out.mail) continue;
          out.mail = mail;
          const Mail m = read_mail(mail);
          if (!m.final) continue;
          out.begun = true;
          out.step = m.step;
          out.source = *word(object, object.heap.outgoing + kWordBytes * index);
          out.bytes = layout.bytes(m.rows);
          const std::uint64_t pieces = (out.bytes + shard_bytes_ - 1) / shard_bytes_;
          const auto most = static_cast<std::uint64_t>(fabric_.endpoints());
          out.shards = out.unsent = static_cast<std::uint32_t>(pieces < most ? pieces : most);
          out.posted = 0;
          if (Op(op) == Op::Dispatch) ++awaited_;
          queue_.push_back({number, index, peer, Op(op)});
          moved = true;
        }
      }
  }
  return moved;
}

// A peer that cannot take more waits in the queue; the others go on.
bool Proxy::post() {
  bool moved = false;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    const Job job = queue_[i];
    Object& object = *objects_[job.object];
    moved |= post_shards(object, job);
    if (object.out[job.index].posted < object.out[job.index].shards) queue_[kept++] = job;
  }
  queue_.resize(kept);
  return moved;
}

bool Proxy::post_shards(Object& object, const Job& job) {
  const Config& c = object.o.config;
  Outgoing& out = object.out[job.index];
  const std::uint32_t set = set_of(c, out.step);
  const std::uint64_t piece = align_up((out.bytes + out.shards - 1) / out.shards, 64);
  bool moved = false;
  while (out.posted < out.shards) {
    const std::uint64_t begin = std::min(out.bytes, piece * out.posted), end = std::min(out.bytes, begin + piece);
    Write w;
    w.endpoint = static_cast<int>((job.peer + out.posted) % static_cast<std::uint32_t>(fabric_.endpoints()));
    w.peer = static_cast<int>(job.peer);
    w.source = &object.o.region;
    w.source_offset = out.source + begin;
    w.bytes = end - begin;
    w.target = object.o.peers[job.peer].get();
    w.target_offset = object.heap.slot_at(c, set, job.op, c.rank) + begin;
    w.immediate = pack({job.op, c.object, c.rank, out.step, out.posted, out.shards});
    w.context = context_of(object.life, job.object, job.index);
    try {
      if (fabric_.write(w) == Post::Again) {
        ++stats_.again;
        return moved;
      }
    } catch (const FabricError& error) {
      out.posted = out.shards;
      if (object.o.on_failure) object.o.on_failure({job.peer, job.op, out.step, error.what()});
      return true;
    }
    ++out.posted;
    ++object.outstanding;
    ++outstanding_;
    ++stats_.writes;
    stats_.bytes += w.bytes;
    stats_.endpoint_bytes[w.endpoint] += w.bytes;
    moved = true;
  }
  return moved;
}

bool Proxy::take_completions() {
  Completion batch[64];
  const int n = fabric_.poll(batch, 64);
  for (int i = 0; i < n; ++i) switch (batch[i].kind) {
      case Completion::Kind::Arrived: arrived(batch[i].immediate); break;
      case Completion::Kind::Sent: sent(batch[i].context); break;
      case Completion::Kind::Failed: failed(batch[i]); break;
    }
  return n > 0;
}

// A dispatch may be one turn of its set ahead of this rank. A combine, and weights, answer a dispatch that this rank sent.
void Proxy::arrived(std::uint32_t bits) {
  const Immediate i = unpack(bits);
  Object* object = objects_[i.object].get();
  if (object == nullptr || static_cast<std::uint32_t>(i.op) >= kOps || i.source >= object->o.config.world ||
      !object->o.peers[i.source]) {
    ++stats_.dropped;
    return;
  }
  const Config& c = object->o.config;
  const std::uint32_t set = set_of(c, i.step);
  Incoming& in = object->in[object->heap.word_index(c, set, i.op, i.source)];
  const Outgoing& asked = object->out[object->heap.word_index(c, set, Op::Dispatch, i.source)];
  const std::uint32_t step = i.op == Op::Dispatch ? in.next : asked.step;
  const bool open = (i.op == Op::Dispatch || asked.begun) && (step & 0xffu) == i.step;
  if (!open) {
    ++stats_.dropped;
    return;
  }
  switch (in.mask.add(step, i.shard, i.shards)) {
    case ShardMask::Outcome::Pending: return;
    case ShardMask::Outcome::Duplicate: ++stats_.duplicates; return;
    case ShardMask::Outcome::Inconsistent: ++stats_.dropped; return;
    case ShardMask::Outcome::Complete: break;
  }
  if (i.op == Op::Dispatch) in.next += c.in_flight;
  if (i.op == Op::Combine) --awaited_;
  store_release(word(*object, object->heap.arrival_at(c, set, signal_of(i.op), i.source)), arrival_word(object->o.generation, step));
}

Proxy::Object* Proxy::owner_of(std::uint64_t context) {
  if (object_in(context) >= kMaxObjects) return nullptr;
  Object* object = objects_[object_in(context)].get();
  return object != nullptr && object->life == life_in(context) && index_in(context) < object->out.size() ? object : nullptr;
}

void Proxy::sent(std::uint64_t context) {
  Object* object = owner_of(context);
  if (object == nullptr) return;   // of an AllToAll that was closed
  --object->outstanding;
  --outstanding_;
  Outgoing& out = object->out[index_in(context)];
  if (--out.unsent == 0)
    store_release(word(*object, object->heap.sent + kWordBytes * index_in(context)), arrival_word(object->o.generation, out.step));
}

void Proxy::failed(const Completion& completion) {
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
  ProxyFailure failure;
  failure.peer = index % object->o.config.world;
  failure.op = Op(index / object->o.config.world % kOps);
  failure.step = object->out[index].step;
  failure.message = why;
  if (object->o.on_failure) object->o.on_failure(failure);
}

void Proxy::fail_all(const std::string& message) {
  for (const std::unique_ptr<Object>& object : objects_)
    if (object && object->o.on_failure) object->o.on_failure({kNoRank, Op::Dispatch, 0, message});
}

}  // namespace pplx
