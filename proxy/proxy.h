// The proxy carries finished blocks from this rank's mailboxes to remote peers, and raises this rank's arrival words when a peer's
// block is complete. It is a state machine: step() does all that can be done now, and the fabric comes from outside.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../src/protocol/abort.h"
#include "../src/protocol/heap_layout.h"
#include "../src/protocol/mailbox.h"
#include "arrivals.h"
#include "fabric.h"

namespace pplx {

struct ProxyFailure {
  std::uint32_t peer = kNoRank;     // none: the whole fabric of this rank
  Op op = Op::Dispatch;
  std::uint32_t step = 0;
  std::string message;

  // The message of `rank`, whose proxy this is, to the others.
  Abort abort(std::uint32_t rank) const;
  std::string text(std::uint32_t rank) const;
};

// Deals a rank's peers to `count` proxies or endpoints, by the sum of the digits of rank + peer to that base. Both ranks come to
// the same answer. The last digit alone would not do: rails of equal nodes differ by multiples of the node's size.
constexpr std::uint32_t dealt(std::uint32_t rank, std::uint32_t peer, std::uint32_t count) {
  std::uint32_t digits = 0;
  for (std::uint32_t sum = rank + peer; count > 1 && sum > 0; sum /= count) digits += sum % count;
  return digits % count;
}

// Index of the rank's proxy that carries to and from `peer`: each proxy has a fabric of its own. Endpoints are dealt by the same
// function, so the small blocks of two proxies take different NICs.
constexpr std::uint32_t proxy_of(std::uint32_t rank, std::uint32_t peer, std::uint32_t proxies) {
  return dealt(rank, peer, proxies);
}

// One AllToAll of this rank, as the proxy sees it.
struct ProxyObject {
  Config config;
  std::uint32_t generation = 1;
  char* memory = nullptr;                          // this rank's heap, which has the words
  char* arrivals = nullptr;                        // see Carried
  LocalRegion region;                              // that of the blocks, registered
  std::vector<std::unique_ptr<RemoteRegion>> peers;   // indexed by rank: those of remote peers; null: not carried by the proxy
  std::vector<std::uint64_t> targets;              // indexed by word_index: where this rank's slot begins in the peer's region.
                                                   // Empty: at its number in a heap
  std::function<void(const ProxyFailure&)> on_failure;
  std::shared_ptr<void> owner;                     // keeps the memory while writes may read it
};

struct ProxyStats {
  std::uint64_t writes = 0, bytes = 0;
  std::uint64_t again = 0;         // posts that the fabric asked to repeat
  std::uint64_t dropped = 0;       // immediates of no open step
  std::uint64_t duplicates = 0;    // shards that had landed already
  std::uint64_t errors = 0;        // posts and writes that failed
  std::uint64_t deepest = 0;       // the most writes that were in flight
  std::uint64_t endpoint_writes[kMaxEndpoints] = {}, endpoint_bytes[kMaxEndpoints] = {};   // indexed by endpoint
};

// Thrown by step(): the thread was told to stop while the provider had it. The memory may be another generation's by now.
struct LeftBehind {};

class Proxy {
 public:
  // stopped: true once nothing that the provider still brings may be told.
  explicit Proxy(Fabric& fabric, std::uint64_t shard_bytes = 256 * 1024, const std::atomic<bool>* stopped = nullptr)
      : fabric_(fabric), endpoints_(static_cast<std::uint32_t>(fabric.endpoints())), shard_bytes_(shard_bytes), stopped_(stopped) {}

  void attach(ProxyObject object);                 // at config.object, in the place of what was attached there
  void detach(std::uint32_t object);
  bool step();                                     // true if anything moved
  bool unused() const;                             // nothing is attached
  bool waiting() const { return awaited_ > 0 || outstanding_ > 0 || !queue_.empty(); }   // a step is open, or a write is in flight
  // Writes that are not complete, posted or not; blocks that were announced since the last step() count too.
  std::uint32_t outstanding(std::uint32_t object) const;
  void fail_all(const std::string& message);
  const ProxyStats& stats() const { return stats_; }

 private:
  // A block, or a part or a piece of one, in flight from this rank to one peer, for one op of one set. Or the credits for a block
  // of that peer's: a shard each, without data.
  struct Outgoing {
    std::uint64_t source = 0, bytes = 0, shard_bytes = 0;   // shard_bytes: of every shard but the last
    std::uint64_t target = 0;                               // where it begins in the peer's region
    std::uint32_t step = 0, piece = 0;
    std::uint32_t shards = 0, posted = 0, unsent = 0;   // unsent: shards not yet complete, posted or not
    bool begun = false;
  };
  // Bytes of a block that are sent together: all of them, or a part or a piece. They lie at the same place in the peer's slot.
  struct Cut {
    std::uint32_t step, number;                             // number: of the part or the piece
    std::uint64_t at, bytes;
  };
  // How far a block in parts or in pieces has come.
  struct Sender {
    std::uint32_t step = 0;
    std::uint32_t begun = 0;         // pieces that have been announced
    std::uint32_t left = 0;          // leading pieces that have left for good
    std::uint32_t parts = 0;         // that the block has
    std::uint32_t consumed = 0;      // leading pieces that have a credit
    bool next_has_credit = false;    // the one behind those has come before it
  };
  struct Incoming {
    ShardMask masks[kMostParts];     // masks of the parts, or of the pieces in flight, by place
    std::uint32_t step = 0;          // whose they are
    std::uint32_t done = 0;          // leading ones of it that have landed
    std::uint32_t next = 0;          // dispatch: the step that comes next
    bool begun = false;
  };
  struct Object {
    ProxyObject o;
    Heap heap;
    BlockLayout layout[kOps];
    PartSizes parts[kOps];
    std::uint32_t life = 0;          // distinguishes completions of an earlier object of this number
    std::uint32_t words = 0;         // words of the mailbox, without credits
    std::vector<std::uint32_t> remote;
    std::uint64_t target_at(std::uint32_t step, Op op, std::uint32_t peer) const {
      return o.targets[heap.word_index(o.config, set_of(o.config, step), op, peer)];
    }
    std::vector<std::uint64_t> seen; // the mailbox at the last look, in whole cache lines
    std::vector<Outgoing> out;       // indexed by word_index, again for other parts, or the other place in pieces; then the credits
    std::vector<Sender> senders;     // indexed by word_index; only in an AllToAll in parts or in pieces
    std::vector<Incoming> in;
    std::uint32_t outstanding = 0;

    std::uint32_t places() const { return heap.in_pieces ? kPlaces : heap.in_parts ? kMostParts : 1; }
    bool goes_in_parts(Op op) const { return heap.in_parts && op != Op::Weights; }
    // A Cut's
    std::uint32_t out_index(std::uint32_t word, std::uint32_t number) const { return word + words * (number % places()); }
    bool is_credit(std::uint32_t index) const { return index >= words * places(); }
  };
  struct Job {
    std::uint32_t object, index, peer;   // index: in `out`
    Op op;                               // a credit's: whose pieces it counts
  };

  // Blocks posted in one go; also the words of a cache line.
  static constexpr std::uint32_t kBatch = 8;

  bool retry();
  bool take_mail();
  bool take_row(std::uint32_t number, Object& object, std::uint32_t row);
  static Cut whole(Object& object, const Job& job, std::uint32_t word, Mail mail);
  static std::optional<Cut> next_part(Object& object, const Job& job, std::uint32_t word, Mail mail);
  static std::optional<Cut> next_piece(Object& object, const Job& job, std::uint32_t word, Mail mail);
  void begin(Object& object, Job& job, std::uint32_t word, const Cut& cut);
  static bool begin_credit(Object& object, const Job& job, std::uint64_t mail);
  bool post(const Job* jobs, std::uint32_t count);
  bool post_shards(Object& object, const Job& job, const std::uint32_t* to_come);
  // Returns the endpoint of the job's next shard, from both ranks' numbers. An endpoint writes to the peer's endpoint of the same
  // number, so with the peer's number alone all small blocks for it would arrive through one. Parts too small for shards take the
  // endpoints in turn: one peer alone keeps all of them busy.
  std::uint32_t endpoint_of(const Job& job) const {
    const Object& object = *objects_[job.object];
    const Outgoing& out = object.out[job.index];
    return (dealt(object.o.config.rank, job.peer, endpoints_) + out.piece + out.posted) % endpoints_;
  }
  bool take_completions();
  // After each call of the provider.
  void go_on() const {
    if (stopped_ != nullptr && stopped_->load(std::memory_order_acquire)) throw LeftBehind();
  }
  void arrived(std::uint32_t immediate);
  bool count_arrived(Object& object, Incoming& in, const Immediate& i, std::uint32_t step);
  void credited(Object& object, const Immediate& credit);
  void sent(std::uint64_t context);
  void left(Object& object, std::uint32_t word);
  void failed(const Completion& completion);
  Object* owner_of(std::uint64_t context);
  static std::uint64_t* word(const Object& object, std::uint64_t at) {
    return reinterpret_cast<std::uint64_t*>(object.o.memory + at);
  }

  Fabric& fabric_;
  const std::uint32_t endpoints_;
  const std::uint64_t shard_bytes_;
  const std::atomic<bool>* const stopped_;
  std::unique_ptr<Object> objects_[kMaxObjects];
  std::vector<Job> queue_;           // blocks with shards that the fabric refused for now, oldest first
  std::uint32_t life_ = 0;
  std::uint32_t outstanding_ = 0;    // writes posted and not complete
  std::uint32_t awaited_ = 0;        // combines owed to this rank's dispatches
  ProxyStats stats_;
  Completion batch_[64];             // a member, so that idle steps need not clear it
};

}  // namespace pplx
