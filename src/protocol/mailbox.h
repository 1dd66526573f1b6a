// The mailbox: how a device hands blocks to its proxy, without a call and without a queue that could overflow. Three words for each
// set, op and peer, in memory that only this rank's device and proxy touch:
//
//   mail      mailbox[set][op][peer]: set (1) | in pieces (1) | parts (4) | rows of the block (26) | step (32). Written by the device, read
//             by the proxy. Of a block in parts: how many of them may go by now. The rows of one in pieces count over the whole step, in
//             30 bits: all that may go by now. A GPU's pieces differ in their number of rows, so in place of rows its mail counts
//             pieces; rows_in_pieces[set][op][peer], written before it, has the rows of the piece in either place, until the next one there.
//   outgoing  outgoing[set][op][peer]: where the block begins in the heap. Written by the device, on CUDA once by its host; read by
//             the proxy after the mail.
//   sent      sent[set][op][peer]: arrival_word of the last block that has left. Written by the proxy, read by the device.
//
// The mail is stored with release: the block, and where it begins, are there for its reader. The proxy polls all of it, and a word
// that differs from what it saw last is a block that is to go: fresh memory is 0, and a set's steps differ. A block is written
// again only when the last one has left: until then the network may still read it. Which one that was, the device keeps in memory
// of its own. Of a block in pieces `left` says how many have left (pieces.h).
//
// Behind the mail lie the credits that the device gives to remote peers, credits[set][op][peer], in the form of pieces_word(): the
// proxy sends one for each piece.
#pragma once

#include <cstring>

#include "arrival.h"

namespace pplx {

struct Mail {
  std::uint32_t step = 0;
  std::uint32_t rows = 0;
  bool in_pieces = false;
  std::uint32_t parts = 0;
};
inline constexpr std::uint32_t kMailRows = 0x3ffffffu;
static_assert(kMaxChoices <= kMailRows, "the rows of a block fit");
constexpr std::uint64_t mail_word(Mail mail) {
  const std::uint32_t what = mail.in_pieces ? mail.rows & 0x3fffffffu : (mail.parts & 15u) << 26 | (mail.rows & kMailRows);
  return 1ull << 63 | std::uint64_t{mail.in_pieces} << 62 | std::uint64_t{what} << 32 | mail.step;
}
constexpr Mail read_mail(std::uint64_t word) {
  const std::uint32_t step = static_cast<std::uint32_t>(word), what = static_cast<std::uint32_t>(word >> 32) & 0x3fffffffu;
  if ((word >> 62 & 1u) != 0) return {step, what, true};
  return {step, what & kMailRows, false, what >> 26};
}

// The words of one block, in a heap as its user has it mapped.
struct MailboxEntry {
  char* mail;
  char* outgoing;
  char* sent;
};
constexpr MailboxEntry mailbox_entry(const Heap& heap, char* memory, std::uint64_t index) {
  const std::uint64_t at = kWordBytes * index;
  return {memory + heap.mailbox + at, memory + heap.outgoing + at, memory + heap.sent + at};
}
constexpr MailboxEntry mailbox_entry(const Heap& heap, const Config& c, char* memory, std::uint32_t step, Op op, std::uint32_t peer) {
  return mailbox_entry(heap, memory, heap.word_index(c, set_of(c, step), op, peer));
}

// Before the mail. The proxy reads it after the mail, so neither needs an order of its own.
inline void set_outgoing(const MailboxEntry& entry, std::uint64_t at) { *reinterpret_cast<std::uint64_t*>(entry.outgoing) = at; }
inline std::uint64_t outgoing_of(const MailboxEntry& entry) { return *reinterpret_cast<const std::uint64_t*>(entry.outgoing); }

// Device: what has been stored may go. `last` is what has_left() asks about.
template <typename Atomics>
PPLX_BOTH void announce(const MailboxEntry& entry, std::uint32_t generation, Mail mail, std::uint64_t& last) {
  last = arrival_word(generation, mail.step);
  Atomics::store_release(entry.mail, mail_word(mail));
}

// Addresses the rows of a piece. A GPU writes them before the mail that announces it.
PPLX_BOTH inline std::uint32_t& rows_of_piece(const Heap& heap, const Config& c, char* memory, std::uint32_t step, Op op,
                                              std::uint32_t peer, std::uint32_t piece) {
  return reinterpret_cast<std::uint32_t*>(memory + heap.rows_in_pieces_at(c, set_of(c, step), op, peer))[piece % kPlaces];
}

// Device: whether the block may be written again. Reached, not equal: a later one may have been announced, and have left.
constexpr bool has_left(std::uint64_t sent, std::uint64_t last) { return last == 0 || reached(sent, last); }
template <typename Atomics>
PPLX_BOTH bool has_left(const MailboxEntry& entry, std::uint64_t last) {
  return has_left(Atomics::load_acquire(entry.sent), last);
}

// Proxy: what has been announced.
template <typename Atomics>
PPLX_BOTH std::uint64_t load_mail(const MailboxEntry& entry) {
  return Atomics::load_acquire(entry.mail);
}

// Proxy: the block has left for good.
template <typename Atomics>
PPLX_BOTH void say_sent(const MailboxEntry& entry, std::uint32_t generation, std::uint32_t step) {
  Atomics::store_release(entry.sent, arrival_word(generation, step));
}

// Both, while neither is at work: the proxy of the next generation finds nothing.
inline void empty_mailbox(const Heap& heap, const Config& c, char* memory) {
  const std::size_t bytes = kWordBytes * std::size_t{c.in_flight} * kOps * c.world;
  std::memset(memory + heap.mailbox, 0, kWordBytes * heap.mailbox_words(c));
  std::memset(memory + heap.sent, 0, bytes);
}

}  // namespace pplx
