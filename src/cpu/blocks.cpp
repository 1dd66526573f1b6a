#include "blocks.h"

#include <algorithm>

namespace pplx::cpu {

Blocks::Blocks(const Config& config, Memory memory)
    : config_(config), heap_(heap_of(config)), memory_(std::move(memory)), alive_(config.world, true), staging_(config.in_flight),
      mailed_(std::size_t{config.in_flight} * kOps * config.world, 0) {
  if (const char* what = invalid(config)) throw Misuse(what);
  if (quantised(config_.wire)) {
    const std::size_t row = dispatch_block(config_).route_at;
    for (std::vector<char>& staging : staging_) staging.resize(row * config_.max_tokens);
  }
  rebuild_order();
}

void Blocks::rebuild_order() {
  order_ = peer_order(config_, alive_);
  replicas_ = other_replicas(config_, order_, [this](std::uint32_t peer) { return mapped(peer); });
}

void Blocks::reset(std::uint32_t generation, const std::vector<bool>& alive) {
  generation_ = generation;
  alive_ = alive;
  rebuild_order();
  std::fill(mailed_.begin(), mailed_.end(), 0);
  empty_mailbox(heap_, config_, memory_.own);
}

Waiting Blocks::waiting_for(std::uint32_t step, Signal signal, std::uint32_t peer, const char* what) const {
  Waiting w;
  w.peer = peer;
  w.signal = signal;
  w.expected = arrival_word(generation_, step);
  w.seen = arrival(set_of(config_, step), signal, peer);
  w.what = what;
  return w;
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
  return std::all_of(blocks.begin(), blocks.end(), [](const Announced& block) { return has_left<HostAtomics>(block.entry, block.last); });
}

void Blocks::raise_at_peer(std::uint32_t step, Signal signal, std::uint32_t peer) {
  raise_arrival<HostAtomics>(memory_.peers[peer], heap_, config_, signal, config_.rank, generation_, step);
}

void Blocks::publish(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows, const char* block) {
  count_block(peer, rows, block_layout(config_, op).bytes(rows), true);
  if (mapped(peer)) {
    raise_at_peer(step, signal_of(op), peer);
    return;
  }
  const std::uint64_t index = heap_.word_index(config_, set_of(config_, step), op, peer);
  const MailboxEntry entry = mailbox_entry(heap_, memory_.own, index);
  set_outgoing(entry, static_cast<std::uint64_t>(block - memory_.own));
  announce<HostAtomics>(entry, generation_, {step, rows}, mailed_[index]);
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
  throw PeerFailure(rank_text(peer) + " sent what it must not: " + what + " (" + phase_name(phase) + ", step " +
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
  if (h.rows > max_rows_of_block(config_))
    protocol_error(phase, step, peer, std::to_string(h.rows) + " rows, more than max_tokens_per_rank=" +
                                          std::to_string(config_.max_tokens) +
                                          (config_.replicas > 1 ? " on " + std::to_string(config_.replicas) + " replicas" : ""));
}

void Blocks::check_replica(const BlockHeader& h, const Plan& plan, std::uint32_t step, std::uint32_t peer) const {
  if (h.tokens == plan.tokens && h.ids_digest == plan.ids_digest) return;
  throw PeerFailure(tokens_apart_text(step, {peer, h.tokens}, {config_.rank, plan.tokens}), AbortReason::Protocol, peer,
                    Phase::DispatchRecv, step);
}

void Blocks::count_block(std::uint32_t peer, std::uint64_t rows, std::uint64_t bytes, bool sent) {
  if (peer == config_.rank) return;
  (sent ? rows_sent_ : rows_received_).fetch_add(rows, std::memory_order_relaxed);
  (sent ? bytes_sent_ : bytes_received_).fetch_add(bytes, std::memory_order_relaxed);
}

}  // namespace pplx::cpu
