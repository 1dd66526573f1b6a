// Wraps a fabric and breaks every promise that the proxy must not rely on: it delays, shuffles, splits, duplicates and replays,
// refuses posts, cuts links, and stands still. Everything follows from a seed and the order of calls. It knows the immediate, and
// nothing else of the protocol or the device.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fabric.h"

namespace pplx {

struct ChaosOptions {
  // A link, in both directions. Each side cuts it after it has posted that many writes to the other.
  struct Cut {
    int a = 0, b = 0;
    std::uint64_t after = 0;
    bool silent = false;        // writes never complete, and what the other side sent does not arrive; else writes fail
  };

  // The thread that drives that rank's fabric stands still for a second after it has taken that many writes; for two if named
  // twice.
  struct Stall {
    int rank = 0;
    std::uint64_t after = 0;
  };

  // Every write of a rank to another one leaves that much later.
  struct Late {
    int from = 0, to = 0;
    std::uint32_t us = 0;
  };

  std::uint64_t seed = 1;
  double delay = 0.2;           // share of writes, and again of completions, that wait up to delay_us
  std::uint32_t delay_us = 200;
  double shuffle = 0.5;         // share of writes and completions that overtake waiting ones
  double split = 0.3;           // share of blocks whose writes become two to four, each a shard of its own
  double duplicate = 0.1;       // share of arrivals that come twice
  double replay = 0.05;         // share of arrivals that bring an earlier one with them
  double again = 0.2;           // share of posts that are refused, and some after them
  std::vector<Cut> cuts;
  std::vector<Stall> stalls;
  std::vector<Late> lates;
};

// Parses "seed=7,delay=0.5,kill=0-2@100"; omitted settings keep their defaults. Throws std::invalid_argument that says what is
// wrong.
ChaosOptions parse_chaos(const std::string& text);
std::string to_text(const ChaosOptions& options);

// How often each kind of trouble happened.
struct ChaosCounts {
  std::uint64_t delayed = 0, shuffled = 0, split = 0, duplicated = 0, replayed = 0, refused = 0;
  std::uint64_t stalled = 0;
  std::uint64_t failed = 0, swallowed = 0, lost = 0;   // on cut links: writes that fail, that never complete; arrivals
};

class ChaosFabric final : public Fabric {
 public:
  using Clock = std::chrono::steady_clock;

  // `rank` is this process's own number.
  ChaosFabric(std::shared_ptr<Fabric> inner, const ChaosOptions& options, int rank,
              std::function<Clock::time_point()> now = Clock::now);

  std::string name() const override;
  int endpoints() const override { return inner_->endpoints(); }
  std::string endpoint_name(int endpoint) const override { return inner_->endpoint_name(endpoint); }
  Blob address() const override { return inner_->address(); }
  void insert_peer(int peer, const Blob& address) override { inner_->insert_peer(peer, address); }
  void remove_peer(int peer) override;
  LocalRegion register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) override;
  LocalRegion register_device_memory(const DeviceMemory& memory) override;
  void unregister_memory(const LocalRegion& region) override { inner_->unregister_memory(region); }
  RemoteRegion import_region(int peer, const Blob& description) const override { return inner_->import_region(peer, description); }
  Post write(const Write& write) override;
  int poll(Completion* out, int capacity) override;
  std::string describe_error(const Completion& failed) const override;

  const ChaosCounts& counts() const { return counts_; }

 private:
  void forget_past();
  void stand_still();
  // A write that the caller posted. Its regions are copies, because the caller may drop its own before a delayed piece leaves.
  struct Operation {
    Write write;
    LocalRegion source;
    RemoteRegion target;
    std::uint32_t pieces = 0;        // not ended yet
    bool swallowed = false;          // a mute link swallowed it
    int error = 0;
    std::string text;
  };
  struct Piece {
    std::uint64_t operation;         // the inner fabric's context
    std::size_t begin, bytes;
    std::uint32_t immediate;
    int endpoint;
    Clock::time_point due;
  };
  struct Held {
    Completion completion;
    Clock::time_point due;
    bool copy = false;               // a duplicate of an arrival
    std::uint64_t latest = 0;        // hand a copy out after this many arrivals at the latest
  };

  std::uint64_t random();
  bool chance(double probability);
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(random() % n); }
  Clock::time_point due_after(Clock::time_point now);
  std::chrono::microseconds late_to(int peer) const;
  const ChaosOptions::Cut* cut_to(int peer) const;
  std::uint32_t pieces_of(const Write& write) const;
  void divide(std::uint64_t id, Operation& operation);
  void post_pieces(Clock::time_point now);
  void end_piece(std::uint64_t id, int error, const std::string& text);
  void take(const Completion& completion, Clock::time_point now);
  void hold(const Completion& completion, Clock::time_point due);
  void hold_copy(std::uint32_t immediate, Clock::time_point due);
  int hand_out(Completion* out, int capacity, Clock::time_point now);

  const std::shared_ptr<Fabric> inner_;
  const ChaosOptions options_;
  const int rank_;
  const std::function<Clock::time_point()> now_;
  std::uint64_t state_;
  std::uint64_t next_id_ = 0;                          // writes accepted
  std::uint32_t refusals_ = 0;                         // still to come in this burst
  std::uint64_t arrivals_ = 0;                         // handed out
  std::unordered_map<std::uint64_t, Operation> operations_;
  std::unordered_map<int, std::uint64_t> written_;     // indexed by peer: writes accepted
  std::deque<Piece> pieces_;                             // not posted yet
  std::deque<Held> held_;
  std::deque<std::uint32_t> past_;                     // immediates that came lately
  std::deque<std::pair<std::uint64_t, std::string>> errors_;   // keyed by the caller's context
  ChaosCounts counts_;
};

}  // namespace pplx
