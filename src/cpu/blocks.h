// The blocks that this rank sends and receives, and the words about them: in its own heap, and in those of the ranks that it has
// mapped.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "../host/atomic.h"
#include "../host/counters.h"
#include "../host/notices.h"
#include "../host/peer_order.h"
#include "../protocol/heap_layout.h"
#include "../protocol/mailbox.h"
#include "../protocol/nodes.h"
#include "../protocol/plan.h"
#include "phase.h"

namespace pplx::cpu {

struct Memory {
  char* own = nullptr;
  std::vector<char*> peers;      // indexed by rank: the peer's heap, mapped; for this rank its own; null behind the proxy
  std::vector<char*> rails = {};  // indexed by rank: the RailArea of a rank of this node; empty without node_ranks
  Nodes nodes = {};
};

class Blocks {
 public:
  Blocks(const Config& config, Memory memory, bool counts = true);

  const Config& config() const { return config_; }
  const Heap& heap() const { return heap_; }
  // Empty where sums do not depend on them.
  const Nodes& nodes() const { return memory_.nodes; }
  std::uint32_t generation() const { return generation_; }
  const std::vector<bool>& alive() const { return alive_; }
  const Rails& rails() const { return rails_; }
  // The living peers, in the order in which a rank visits them: rank + 1 first, itself last. They send this rank rows.
  const std::vector<std::uint32_t>& peers() const { return order_; }
  // Those of them to which this rank sends rows: with node_ranks its own node's, and its relays.
  const std::vector<std::uint32_t>& targets() const { return targets_; }
  // Other living ranks that hold the same tokens.
  const std::vector<std::uint32_t>& replicas() const { return replicas_; }
  void reset(std::uint32_t generation, const std::vector<bool>& alive);
  // With node_ranks, before the first step of a generation: RailAreas of this node's living ranks, indexed by rank.
  void lay_relays(std::vector<char*> areas) { memory_.rails = std::move(areas); }
  // Bytes of a rank's that this one maps: of its own all, of a mate's the part that mates write into.
  std::uint64_t relay_bytes(std::uint32_t rank) const {
    return rank == config_.rank ? areas_[rank].bytes : areas_[rank].mapped_bytes;
  }

  // Memory that the network reads, and writes up to shared_bytes.
  struct Region {
    char* memory;
    std::uint64_t bytes, shared_bytes;
  };
  Region region() const { return {network(), areas_[config_.rank].bytes, areas_[config_.rank].shared_bytes}; }
  // Returns, by word_index, where this rank's blocks for remote peers begin in the peers' regions.
  std::vector<std::uint64_t> targets_there() const;
  // The living ranks with which this one exchanges blocks over the network, with node_ranks its rails alone.
  std::vector<std::uint32_t> network_peers() const;

  // True if this rank's sums for a peer go to the peer's relay on this node.
  bool relayed(std::uint32_t peer) const { return config_.node_ranks != 0 && !mapped(peer); }
  bool mapped(std::uint32_t peer) const { return memory_.peers[peer] != nullptr; }
  char* own_slot(std::uint32_t set, Op op, std::uint32_t peer) const { return slot(config_.rank, set, op, peer); }
  // A peer's block of a dispatch, or of its weights: in this rank's memory, or in that of the peer's relay here.
  const char* incoming(std::uint32_t set, Op op, std::uint32_t peer) const { return slot(rails_.holder[peer], set, op, peer); }
  char* slot_at_peer(std::uint32_t set, Op op, std::uint32_t peer) const { return slot(peer, set, op, config_.rank); }
  // A mate's sums for a source, in the memory of the source's relay on this node.
  char* relay_slot(std::uint32_t set, std::uint32_t source, std::uint32_t mate) const {
    return returned(source) + area(source).relay.block_at(set, rails_.nth[source], rails_.number[mate]);
  }
  char* own_slice(std::uint32_t set, std::uint32_t replica) const { return memory_.own + heap_.slice_at(config_, set, replica); }
  char* slice_at_peer(std::uint32_t set, std::uint32_t replica) const {
    return memory_.peers[replica] + heap_.slice_at(config_, set, config_.rank);
  }
  char* send_area(std::uint32_t set, Op op) const { return network() + areas_[config_.rank].send_at(set, op); }
  // Where this rank writes its block for a peer of an AllToAll in pieces: in the peer's slot, or in its own send area.
  char* outgoing_slot(std::uint32_t set, Op op, std::uint32_t peer) const {
    return mapped(peer) ? slot_at_peer(set, op, peer) : memory_.own + heap_.spaced_send_at(config_, set, op, remote_before_[peer]);
  }
  char* staging(std::uint32_t set) { return staging_[set].data(); }
  // The abort word of this rank, or of a rank that it has mapped.
  std::uint64_t* abort_of(std::uint32_t rank) const { return word(memory_.peers[rank], Heap::abort_at(generation_)); }

  std::uint64_t arrival(std::uint32_t set, Signal signal, std::uint32_t peer) const {
    const bool held = signal == Signal::Dispatch || signal == Signal::Weights;   // the proxy of the holder raises the word
    char* const memory = held ? memory_.peers[rails_.holder[peer]] : memory_.own;
    return load_acquire(word(memory, heap_.arrival_at(config_, set, signal, peer)));
  }
  bool has_arrived(std::uint32_t step, Signal signal, std::uint32_t peer) const {
    return arrived(arrival(set_of(config_, step), signal, peer), generation_, step);
  }
  // The last step of this generation whose block has come from a peer; below 0: none.
  std::int64_t last_heard(Signal signal, std::uint32_t peer) const;
  Waiting waiting_for(std::uint32_t step, Signal signal, std::uint32_t peer, const char* what) const;
  bool has_returned(std::uint32_t step, std::uint32_t source, std::uint32_t mate) const {
    return arrived(load_acquire(return_word(set_of(config_, step), source, mate)), generation_, step);
  }
  std::uint64_t turns(std::uint32_t mate) const { return load_acquire(word(memory_.peers[mate], heap_.turns)); }
  Waiting waiting_for_return(std::uint32_t step, std::uint32_t source, std::uint32_t mate) const;

  // Leading pieces that are here of a block that peer sends, in pieces or whole.
  std::uint32_t pieces_here(std::uint32_t step, Op op, std::uint32_t peer) const {
    if (!has_arrived(step, signal_of(op), peer)) return 0;
    return std::max(1u, count(heap_.pieces, step, op, peer));
  }
  // Pieces of a block that this rank sends: how many of them the peer has read, and how many have left for good.
  std::uint32_t pieces_consumed(std::uint32_t step, Op op, std::uint32_t peer) const {
    return count(heap_.consumed, step, op, peer);
  }
  std::uint32_t pieces_left(std::uint32_t step, Op op, std::uint32_t peer) const { return count(heap_.left, step, op, peer); }
  Waiting waiting_for_piece(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t piece) const;
  Waiting waiting_for_credit(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t piece) const;
  // Announces that the first `count` pieces are written.
  void publish_pieces(std::uint32_t step, Op op, std::uint32_t peer, const BlockShape& shape, std::uint32_t count);
  // Pieces that this rank has announced to the proxy in (set, op) so far, as a word, and whether all of them have left for good.
  std::uint64_t announced_pieces(std::uint32_t set, Op op, std::uint32_t peer) const;
  bool pieces_have_left(std::uint32_t set, Op op, std::uint32_t peer, std::uint64_t announced) const;
  // Tells the peer that leading pieces of its block have been read.
  void give_credit(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t count);

  // The blocks that this rank has announced to the proxy in (set, op) so far. Once have_left() says that they have left for good,
  // their memory may be used again.
  struct Announced {
    MailboxEntry entry;
    std::uint64_t last;
  };
  std::vector<Announced> announced(std::uint32_t set, Op op) const;
  static bool have_left(const std::vector<Announced>& blocks);
  // Announces a finished block: raises the peer's arrival word, or the proxy's mailbox word.
  void publish(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows, const char* block);
  // This rank's sums for a source are in its relay_slot().
  void publish_return(std::uint32_t step, std::uint32_t source, std::uint32_t rows);
  void raise_at_peer(std::uint32_t step, Signal signal, std::uint32_t peer);

  BlockHeader header(std::uint32_t step, std::uint32_t rows, std::uint32_t flags = 0) const;
  // Throws unless a checked header has the number of pieces that its rows make.
  void check_pieces(const BlockHeader& header, Phase phase, Op op, std::uint32_t peer) const;
  // Throws unless the header is that of a later piece of the block that `first` begins.
  void check_piece(const BlockHeader& header, const BlockHeader& first, Phase phase, Op op, std::uint32_t peer,
                   std::uint32_t piece) const;
  // Throws unless the header fits this step's block of that peer, and is that of its first piece.
  void check_header(const BlockHeader& header, Phase phase, std::uint32_t step, Op op, std::uint32_t peer) const;
  // Throws if the replica's dispatch header tells of other tokens than this rank has.
  void check_replica(const BlockHeader& header, const Plan& plan, std::uint32_t step, std::uint32_t peer) const;
  [[noreturn]] void protocol_error(Phase phase, std::uint32_t step, std::uint32_t peer, const std::string& what) const;

  void note_overflow(std::uint32_t rank) { pplx::note_overflow(notices_, rank); }
  void raise_notices() { pplx::raise_notices(notices_, config_); }
  void count_block(std::uint32_t peer, std::uint64_t rows, std::uint64_t bytes, bool sent);
  Tally& tally() { return tally_; }
  const Tally& tally() const { return tally_; }

 private:
  static std::uint64_t* word(char* heap, std::uint64_t at) { return reinterpret_cast<std::uint64_t*>(heap + at); }
  // Returns a peer's slot at a rank of this node: in that rank's heap, or in its RailArea if the peer is on another node.
  char* slot(std::uint32_t at, std::uint32_t set, Op op, std::uint32_t peer) const {
    if (!relayed(peer)) return memory_.peers[at] + heap_.slot_at(config_, set, op, rails_.number[peer]);
    return memory_.rails[at] + areas_[config_.rank].slot_at(set, op, (op == Op::Combine ? rails_.other : rails_.nth)[peer]);
  }
  char* network() const { return config_.node_ranks != 0 ? memory_.rails[config_.rank] : memory_.own; }
  char* returned(std::uint32_t source) const { return memory_.rails[rails_.holder[source]] + area(source).relay_at; }
  std::uint64_t* return_word(std::uint32_t set, std::uint32_t source, std::uint32_t mate) const {
    return word(returned(source), area(source).relay.arrival_at(set, rails_.nth[source], rails_.number[mate]));
  }
  const RailArea& area(std::uint32_t source) const { return areas_[rails_.holder[source]]; }
  void rebuild_order();
  std::uint32_t count(std::uint64_t words, std::uint32_t step, Op op, std::uint32_t peer) const {
    return pieces_in(load_acquire(word(memory_.own, heap_.count_at(config_, words, set_of(config_, step), op, peer))), generation_,
                     step);
  }

  const Config config_;
  const Heap heap_;
  Memory memory_;
  std::uint32_t generation_ = 1;
  std::vector<bool> alive_;
  Rails rails_;
  std::vector<RailArea> areas_;         // indexed by rank of this node
  std::vector<std::uint32_t> order_, targets_, replicas_;
  std::vector<std::uint32_t> remote_before_;   // indexed by peer: remote peers of lower rank
  std::vector<std::vector<char>> staging_;
  std::vector<std::uint64_t> mailed_;   // indexed by word_index: the arrival_word that `sent` must reach
  std::vector<std::uint64_t> announced_pieces_;   // indexed by word_index: the word that `left` must reach
  Notices notices_;
  Tally tally_;
};

}  // namespace pplx::cpu
