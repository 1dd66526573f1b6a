#include "blocks.h"

#include <algorithm>

#include "../protocol/deadlines.h"

namespace pplx::cpu {

Blocks::Blocks(const Config& config, Memory memory, bool counts)
    : config_(config), heap_(heap_of(config)), memory_(std::move(memory)), alive_(config.world, true), staging_(config.in_flight),
      mailed_(std::size_t{config.in_flight} * kOps * config.world, 0), announced_pieces_(mailed_),
      tally_(config.world, local_experts(config, config.rank), counts) {
  if (const char* what = invalid(config)) throw Misuse(what);
  if (const char* what = invalid_pieces(config)) throw Misuse(what);
  if (const char* what = invalid_nodes(config, memory_.nodes)) throw Misuse(what);
  if (!groups_sums(memory_.nodes)) memory_.nodes.clear();
  if (config.node_ranks != 0 && memory_.nodes.empty()) throw Misuse("node_ranks needs several nodes, and some with several ranks");
  if (config.node_ranks == 0 && config.combine_fp8) throw Misuse("combine_fp8 needs node_ranks");
  if (config.node_ranks != 0 && heap_.in_pieces) throw Misuse("node_ranks needs whole blocks");
  for (std::uint32_t peer = 0, remote = 0; peer < config_.world; remote += !mapped(peer++)) remote_before_.push_back(remote);
  if (quantised(config_.wire)) {
    const std::size_t row = dispatch_block(config_).route_at;
    for (std::vector<char>& staging : staging_) staging.resize(row * config_.max_tokens);
  }
  rebuild_order();
}

void Blocks::rebuild_order() {
  order_ = peer_order(config_, alive_);
  rails_ = make_rails(config_, memory_.nodes, alive_);
  areas_.assign(config_.world, rail_area(heap_));
  for (std::uint32_t mate : rails_.mates) {
    std::uint32_t sources = 0;
    for (std::uint32_t peer : order_) sources += relayed(peer) && rails_.holder[peer] == mate;
    areas_[mate] = rail_area(config_, count_nodes(memory_.nodes), sources);
  }
  targets_.clear();
  for (std::uint32_t peer : order_)
    if (!relayed(peer) || std::count(rails_.rep.begin(), rails_.rep.end(), peer) != 0) targets_.push_back(peer);
  replicas_ = other_replicas(config_, order_, [this](std::uint32_t peer) { return mapped(peer); });
}

void Blocks::reset(std::uint32_t generation, const std::vector<bool>& alive) {
  generation_ = generation;
  alive_ = alive;
  rebuild_order();
  std::fill(mailed_.begin(), mailed_.end(), 0);
  std::fill(announced_pieces_.begin(), announced_pieces_.end(), 0);
  empty_mailbox(heap_, config_, memory_.own);
}

std::vector<std::uint64_t> Blocks::targets_there() const {
  std::vector<std::uint64_t> targets;
  for (std::uint32_t set = 0; set < config_.in_flight; ++set)
    for (std::uint32_t op = 0; op < kOps; ++op)
      for (std::uint32_t nth : Op(op) == Op::Combine ? rails_.other_there : rails_.nth_there)
        targets.push_back(areas_[config_.rank].slot_at(set, Op(op), nth));
  return targets;
}

std::vector<std::uint32_t> Blocks::network_peers() const {
  std::vector<std::uint32_t> peers;
  for (std::uint32_t peer : order_)
    if (!mapped(peer) && (!relayed(peer) || rails_.rep[peer] == peer || rails_.holder[peer] == config_.rank)) peers.push_back(peer);
  return peers;
}

Waiting Blocks::waiting_for_return(std::uint32_t step, std::uint32_t source, std::uint32_t mate) const {
  Waiting w;
  w.peer = mate;
  w.expected = arrival_word(generation_, step);
  w.seen = load_acquire(return_word(set_of(config_, step), source, mate));
  w.what = "the combine rows for " + rank_text(source);
  w.longer = deadlines::kPassedOn.seconds;
  return w;
}

void Blocks::publish_return(std::uint32_t step, std::uint32_t source, std::uint32_t rows) {
  count_block(rails_.holder[source], rows, combine_block(config_).bytes(rows), true);
  store_release(return_word(set_of(config_, step), source, config_.rank), arrival_word(generation_, step));
}

std::int64_t Blocks::last_heard(Signal signal, std::uint32_t peer) const {
  std::int64_t last = -1;
  for (std::uint32_t set = 0; set < config_.in_flight; ++set) note_step(last, arrival(set, signal, peer), generation_);
  return last;
}

Waiting Blocks::waiting_for(std::uint32_t step, Signal signal, std::uint32_t peer, const char* what) const {
  Waiting w;
  w.peer = peer;
  w.signal = signal;
  w.expected = arrival_word(generation_, step);
  w.seen = arrival(set_of(config_, step), signal, peer);
  w.what = what;
  if (config_.node_ranks == 0) return w;
  if (relayed(peer) && signal != Signal::Combine && rails_.holder[peer] != config_.rank) w.by = rails_.holder[peer];
  // A rank of this node, or a relay here, may wait for another node itself.
  w.longer = deadlines::kAnswered.seconds + (mapped(peer) || w.by != kNoRank ? deadlines::kPassedOn.seconds : 0);
  return w;
}

std::uint64_t Blocks::announced_pieces(std::uint32_t set, Op op, std::uint32_t peer) const {
  return announced_pieces_[heap_.word_index(config_, set, op, peer)];
}

bool Blocks::pieces_have_left(std::uint32_t set, Op op, std::uint32_t peer, std::uint64_t announced) const {
  if (announced == 0) return true;
  const std::uint64_t left = load_acquire(word(memory_.own, heap_.count_at(config_, heap_.left, set, op, peer)));
  const auto step = static_cast<std::uint32_t>(announced);
  return pieces_in(left, generation_, step) >= pieces_in(announced, generation_, step);
}

std::vector<Blocks::Announced> Blocks::announced(std::uint32_t set, Op op) const {
  std::vector<Announced> blocks;
  for (std::uint32_t peer : order_) {
    const std::uint64_t index = heap_.word_index(config_, set, op, peer);
    if (!mapped(peer)) blocks.push_back({mailbox_entry(heap_, memory_.own, index), mailed_[index]});
  }
  return blocks;
}

bool Blocks::have_left(const std::vector<Announced>& blocks) {
  return std::all_of(blocks.begin(), blocks.end(),
                     [](const Announced& block) { return has_left<HostAtomics>(block.entry, block.last); });
}

void Blocks::raise_at_peer(std::uint32_t step, Signal signal, std::uint32_t peer) {
  raise_arrival<HostAtomics>(memory_.peers[peer], heap_, config_, signal, config_.rank, generation_, step);
}

void Blocks::publish(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows, const char* block) {
  if (op != Op::Weights)
    count_block(peer, rows, (mapped(peer) ? block_layout(config_, op) : network_block(config_, op)).bytes(rows), true);
  if (mapped(peer)) {
    raise_at_peer(step, signal_of(op), peer);
    return;
  }
  const std::uint64_t index = heap_.word_index(config_, set_of(config_, step), op, peer);
  const MailboxEntry entry = mailbox_entry(heap_, memory_.own, index);
  set_outgoing(entry, static_cast<std::uint64_t>(block - network()));
  announce<HostAtomics>(entry, generation_, {step, rows}, mailed_[index]);
}

void Blocks::publish_pieces(std::uint32_t step, Op op, std::uint32_t peer, const BlockShape& shape, std::uint32_t count) {
  if (count == shape.pieces) {
    const BlockLayout block = block_layout(config_, op);
    count_block(peer, shape.rows, std::uint64_t{shape.pieces} * block.header_bytes + std::uint64_t{shape.rows} * block.row_bytes,
                true);
  }
  const std::uint32_t set = set_of(config_, step), rows = shape.end(count - 1);
  if (mapped(peer)) {
    store_release(word(memory_.peers[peer], heap_.count_at(config_, heap_.pieces, set, op, config_.rank)),
                  pieces_word(generation_, step, count));
    raise_at_peer(step, signal_of(op), peer);
    return;
  }
  const std::uint64_t index = heap_.word_index(config_, set, op, peer);
  const MailboxEntry entry = mailbox_entry(heap_, memory_.own, index);
  // Once: with the next pieces' mail the proxy may read it at any time.
  if (pieces_in(announced_pieces_[index], generation_, step) == 0)
    set_outgoing(entry, static_cast<std::uint64_t>(outgoing_slot(set, op, peer) - memory_.own));
  announced_pieces_[index] = pieces_word(generation_, step, count);
  announce<HostAtomics>(entry, generation_, {step, rows, shape.pieces > 1}, mailed_[index]);
}

void Blocks::give_credit(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t count) {
  const std::uint32_t set = set_of(config_, step);
  std::uint64_t* const at = mapped(peer)
                                ? word(memory_.peers[peer], heap_.count_at(config_, heap_.consumed, set, op, config_.rank))
                                : word(memory_.own, heap_.mailbox + kWordBytes * heap_.credit_index(config_, set, op, peer));
  store_release(at, pieces_word(generation_, step, count));
}

Waiting Blocks::waiting_for_piece(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t piece) const {
  Waiting w = waiting_for(step, signal_of(op), peer, op == Op::Dispatch ? "the dispatch block" : "the combine block");
  w.piece = piece;
  w.seen = pieces_here(step, op, peer);
  return w;
}

Waiting Blocks::waiting_for_credit(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t piece) const {
  Waiting w = waiting_for_piece(step, op, peer, piece);
  w.seen = pieces_consumed(step, op, peer);
  w.to_be_read = true;
  return w;
}

BlockHeader Blocks::header(std::uint32_t step, std::uint32_t rows, std::uint32_t flags) const {
  BlockHeader h;
  h.step = step;
  h.generation = generation_;
  h.rows = rows;
  h.flags = flags;
  h.source = config_.rank;
  return h;
}

void Blocks::protocol_error(Phase phase, std::uint32_t step, std::uint32_t peer, const std::string& what) const {
  throw PeerFailure(rank_text(peer) + " sent an invalid message: " + what + " (" + phase_name(phase) + ", step " +
                        std::to_string(step) + "). Its memory or its program is damaged, or it runs another version.",
                    AbortReason::Protocol, peer, phase, step);
}

void Blocks::check_header(const BlockHeader& h, Phase phase, std::uint32_t step, Op op, std::uint32_t peer) const {
  const auto differs = [&](const char* field, std::uint64_t seen, std::uint64_t expected) {
    protocol_error(phase, step, peer, std::string(op_name(op)) + " header says " + field + " " + std::to_string(seen) +
                                          ", expected " + std::to_string(expected));
  };
  if (h.step != step) differs("step", h.step, step);
  if (h.generation != generation_) differs("generation", h.generation, generation_);
  if (h.source != peer) differs("source", h.source, peer);
  if (h.piece != 0) differs("piece", h.piece, 0);
  if (h.rows > max_rows_of_block(config_))
    protocol_error(phase, step, peer, std::to_string(h.rows) + " rows, more than max_tokens_per_rank=" +
                                          std::to_string(config_.max_tokens) +
                                          (config_.replicas > 1 ? " on " + std::to_string(config_.replicas) + " replicas" : ""));
}

void Blocks::check_pieces(const BlockHeader& h, Phase phase, Op op, std::uint32_t peer) const {
  const std::uint32_t expected = shape_of(heap_, h.rows).pieces;
  if (h.pieces != expected)
    protocol_error(phase, h.step, peer,
                   std::string(op_name(op)) + " header says pieces " + std::to_string(h.pieces) + ", expected " +
                                            std::to_string(expected));
}

void Blocks::check_piece(const BlockHeader& h, const BlockHeader& first, Phase phase, Op op, std::uint32_t peer,
                         std::uint32_t piece) const {
  const auto differs = [&](const char* field, std::uint64_t seen, std::uint64_t expected) {
    protocol_error(phase, first.step, peer,
                   std::string(op_name(op)) + " header of piece " + std::to_string(piece) + " says " + field + " " +
                                                std::to_string(seen) + ", expected " + std::to_string(expected));
  };
  if (h.step != first.step) differs("step", h.step, first.step);
  if (h.generation != first.generation) differs("generation", h.generation, first.generation);
  if (h.source != first.source) differs("source", h.source, first.source);
  if (h.piece != piece) differs("piece", h.piece, piece);
  if (h.pieces != first.pieces) differs("pieces", h.pieces, first.pieces);
  if (h.rows != first.rows) differs("rows", h.rows, first.rows);
  if (h.flags != first.flags) differs("flags", h.flags, first.flags);
}

void Blocks::check_replica(const BlockHeader& h, const Plan& plan, std::uint32_t step, std::uint32_t peer) const {
  if (h.tokens == plan.tokens && h.ids_digest == plan.ids_digest) return;
  throw PeerFailure(tokens_apart_text(step, {peer, h.tokens}, {config_.rank, plan.tokens}), AbortReason::Protocol, peer,
                    Phase::DispatchRecv, step);
}

void Blocks::count_block(std::uint32_t peer, std::uint64_t rows, std::uint64_t bytes, bool sent) {
  if (peer == config_.rank) return;
  tally_.count([&](Counters& counters) {
    PeerCounters& of = counters.peers[peer];
    (sent ? of.rows_sent : of.rows_received) += rows;
    (sent ? of.bytes_sent : of.bytes_received) += bytes;
  });
}

}  // namespace pplx::cpu
