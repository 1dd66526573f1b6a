// The steps that are open on this rank, and the next call of each.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "../host/counters.h"
#include "../host/failure.h"
#include "../host/standing.h"
#include "../host/step_book.h"
#include "../protocol/config.h"
#include "arguments.h"
#include "piece_sending.h"

namespace pplx::cpu {

struct OpenStep {
  enum class Progress : std::uint8_t { Closed, Sent, Received, Combining };
  Progress progress = Progress::Closed;
  std::uint32_t step = 0;
  double opened = 0, came = 0;                 // when it was, and when it came to `progress`
  Tokens input;
  std::shared_ptr<const Received> received;    // with node_ranks: it has the masks of relayed rows
  bool own_rows_in_x = false;
  bool overflowed = false;
  bool released = false;
  bool has_tail = false;
  std::uint32_t flags = 0;                     // BlockFlags of its combine
  bool receiving = false, adding = false;      // dispatch_recv has begun, combine_recv has
  std::shared_ptr<PieceSending> sending;       // in pieces: the operation whose rest the receive half sends

  void come_to(Progress next, double now) {
    progress = next;
    came = now;
  }
};

class OpenSteps {
 public:
  using Progress = OpenStep::Progress;

  explicit OpenSteps(const Config& config) : config_(config), book_(config), by_set_(config.in_flight) {}

  const StepBook& book() const { return book_; }
  std::uint32_t count() const {
    std::uint32_t n = 0;
    for (const OpenStep& open : by_set_) n += open.progress != Progress::Closed;
    return n;
  }
  OpenStep& of(std::uint32_t step) { return by_set_[set_of(config_, step)]; }

  OpenStep& open(const Tokens& input, double now) {
    OpenStep& open = of(book_.next());
    if (open.progress != Progress::Closed) throw Misuse(too_many_open_text("step " + std::to_string(open.step), config_.in_flight));
    open.progress = Progress::Sent;
    open.step = book_.open();
    open.opened = open.came = now;
    open.input = input;
    return open;
  }

  // The step, if `call` is what it has to do next.
  OpenStep& expect(std::uint32_t step, Progress expected, const char* call) {
    OpenStep& open = of(step);
    if (open.progress == Progress::Closed || open.step != step)
      throw Misuse(std::string(call) + ": step " + std::to_string(step) + " is not open (it was combined or released already)");
    if (open.progress != expected) {
      const char* next = open.progress == Progress::Sent       ? "dispatch_recv"
                         : open.progress == Progress::Received ? "combine_send (or release)"
                                                               : "combine_recv";
      throw Misuse(std::string(call) + ": out of order, step " + std::to_string(step) + " expects " + next + " next");
    }
    return open;
  }

  // Checks an AllToAll in pieces, or with relays: a receive half waits for the same one of other ranks, so all have one order.
  void check_order(std::uint32_t step, bool OpenStep::* begun, const char* call) const {
    for (const OpenStep& open : by_set_)
      if (open.progress != Progress::Closed && step_difference(open.step, step) < 0 && !(open.*begun))
        throw Misuse(std::string(call) + ": step " + std::to_string(step) + " before step " + std::to_string(open.step) +
                     (config_.node_ranks != 0
                          ? ", but with dedup='node' ranks of a node receive for each other"
                          : ", but with slot_bytes=" + std::to_string(config_.slot_bytes) + " blocks go in pieces") +
                     ", and steps are received in order");
  }

  void close(std::uint32_t step, double now) {
    last_[book_.closed() % kLastSteps] = {step, now - of(step).opened};
    of(step) = OpenStep();
    book_.close();
  }

  // Those that are open, and the last that were closed.
  void tell(Standing& s, double now) const {
    s.next_step = book_.next();
    for (const OpenStep& open : by_set_) {
      if (open.progress == Progress::Closed) continue;
      const Phase last = open.progress == Progress::Sent       ? Phase::DispatchSend
                         : open.progress == Progress::Received ? Phase::DispatchRecv
                                                               : Phase::CombineSend;
      s.open.push_back({open.step, phase_name(last), false, now - open.came, {}, ""});
    }
    for (std::uint64_t n = book_.closed() - std::min<std::uint64_t>(kLastSteps, book_.closed()); n < book_.closed(); ++n)
      s.last.push_back(last_[n % kLastSteps]);
  }

  void reset() {
    book_.reset();
    for (OpenStep& open : by_set_) open = OpenStep();
  }

 private:
  const Config& config_;
  StepBook book_;
  Standing::Ended last_[kLastSteps] = {};
  std::vector<OpenStep> by_set_;
};

}  // namespace pplx::cpu
