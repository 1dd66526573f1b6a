// A network in memory that keeps only the promises of fabric.h. Ports (one per SimFabric) post writes; each write is read from
// its source and lands at its target in pieces and at times that the seed chooses, and then its completions are due.
//
// It also finds mistakes that only a network can see: a source that changes before its local completion, a write outside of
// registered memory, a post to a peer that was never inserted.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "../fabric.h"
#include "../../src/protocol/immediate.h"
#include "clock.h"
#include "faults.h"
#include "log.h"
#include "random.h"

namespace pplx::sim {

// The character of one seed's network. Chances are per write.
struct Profile {
  explicit Profile(Random& random);

  Time latency;
  double ns_per_byte;
  double late_sent = 0.1, late_read, split, delayed, duplicated, replayed, stranger, busy;
  std::uint32_t queue_depth;        // a port's limit of writes in flight
  std::uint32_t completions;        // a port's completion queue holds that many
  // A target that has not inserted the initiator: EAGAIN; else the write is dropped and tried again
  bool refuses_unknown;
  bool offsets;                     // targets are named by offsets, else by addresses
};

// A failure to plant once, into the next write of a rank that fits.
struct Trap {
  enum class Kind : std::uint8_t { None, FailedWrite, FailedSomewhere, FailedPost, CompletionsLost, Corrupt };
  using Fits = std::function<bool(const Immediate& immediate, std::uint32_t peer, const BlockHeader& header, std::size_t bytes)>;
  using Damage = std::function<void(const Immediate& immediate, char* block)>;

  Kind kind = Kind::None;
  std::uint32_t rank = 0;           // CompletionsLost: the owner of the queue; else: the poster
  Fits fits;                        // asked about writes that start with a header; unused for CompletionsLost
  Damage damage;                    // Corrupt: how the header changes on its way
  bool fired = false;
  std::uint32_t peer = 0;           // the write's target
  Immediate immediate;              // the immediate that it carried
};

class Network final : public Clock::Task {
 public:
  struct Region {
    char* base = nullptr;
    std::uint64_t bytes = 0;
    std::uint64_t shared_bytes = 0;
    std::uint64_t key = 0;
  };
  // The blocks, or the credits, of one peer, op and AllToAll are a stream. Where an immediate stands in it: in numbers that do not
  // begin anew.
  struct Arrival {
    std::uint32_t immediate = 0;
    std::uint64_t step = 0, piece = 0;
  };
  struct Due {
    Completion completion;
    char* source = nullptr;                              // Sent: memory that is no longer read
    std::size_t bytes = 0;
    std::uint64_t key = 0;                               // the key of the region it lies in
    bool repeated = false;                               // Arrived: this is
    Arrival repeats;
  };
  using Pieces = std::map<std::uint64_t, std::uint64_t>;   // step -> newest piece, for a stream's last few steps
  struct Port {
    std::uint32_t number = 0, rank = 0;
    int endpoints = 1;
    bool open = true;
    bool dead = false;                                   // its process is gone or stopped: it accepts nothing
    std::map<int, std::uint32_t> peers;                  // inserted: rank to port
    std::map<std::uint64_t, Region> regions;             // registered, by key
    std::vector<Due> ready;
    std::deque<Due> held;                                // completions for which the queue has no room
    std::uint32_t under_way = 0;
    std::uint64_t posted[kMaxObjects] = {};              // bytes
    bool overran = false;
    std::unordered_map<int, Time> busy_until;            // indexed by peer
    std::deque<Arrival> history;                         // candidates for replay
    std::unordered_map<std::uint32_t, std::uint64_t> steps;   // the newest of each source and AllToAll
    std::unordered_map<std::uint32_t, Pieces> streams;
    std::function<void()> on_ready;
  };

  Network(Clock& clock, Log& log, Totals& totals, std::uint64_t seed)
      : clock_(clock), log_(log), totals_(totals), random_(seed), profile_(random_) {}

  Port& open(std::uint32_t rank, int endpoints);
  void close(std::uint32_t port);                        // as when its process dies: writes on the wire still land
  Port& port(std::uint32_t number) { return *ports_[number]; }
  const Profile& profile() const { return profile_; }
  void calm();                                           // no trouble from now on but small differences between writes
  void delay(std::uint32_t from, std::uint32_t to, Time by) { late_[{from, to}] = by; }   // between ranks, on top of all else
  std::uint64_t new_key() { return ++last_key_; }

  Post post(Port& from, const Write& write);             // backs SimFabric::write()
  int poll(Port& at, Completion* out, int capacity);
  void push_arrival(Port& at, std::uint32_t immediate);  // an arrival that belongs to no write
  void repeat_arrival(Port& at, const Arrival& arrival);

  void set_trap(Trap trap) { trap_ = std::move(trap); }
  const Trap& trap() const { return trap_; }
  // A port's writes on the wire land no earlier than `then`.
  void hold_up(std::uint32_t port, Time then);

  void run(std::uint32_t what) override;

 private:
  static constexpr std::uint32_t kMostPieces = 4, kOpCodes = 8;
  enum Action : std::uint32_t { kRead, kLand = kMostPieces, kSent = 2 * kMostPieces, kArrive, kTryPeer, kRepeat, kActions = 16 };
  enum class Fate : std::uint8_t { Whole, Fails, FailsUnsaid, Corrupt };

  struct Piece {
    std::size_t begin = 0, end = 0;
    bool read = false;
  };
  struct Flight {
    std::uint32_t from = 0, to = 0;
    Write write;
    char* source = nullptr;
    std::uint64_t source_key = 0, key = 0;
    std::uint64_t target = 0;                            // an address, or an offset: see Profile::offsets
    Immediate immediate;
    std::vector<char> bytes;
    std::array<Piece, kMostPieces> pieces;
    std::uint32_t count = 0, unread = 0, unlanded = 0;
    std::uint32_t events = 0;                            // still to come; the flight ends with the last one
    std::uint64_t order = 0;                             // among its pair's writes
    Time not_before = 0;                                 // when the remaining pieces may land
    Arrival arrival;
    Time patience = 0;                                   // before the next try at a target that does not know the initiator
    Fate fate = Fate::Whole;
    bool lost = false;
  };
  struct Pair {
    std::uint64_t posted = 0, arrived = 0;
    std::array<std::uint32_t, kOpCodes> block{};         // the block whose shards arrived last, and the last of them
    std::array<std::uint32_t, kOpCodes> shard{};
  };

  bool refuses(Port& from, const Port& to, int peer, bool unknown);
  Flight& take_flight(std::uint32_t* number);
  bool trapped(Port& from, const Write& write, const Immediate& immediate, Fate* fate);
  void launch(std::uint32_t number);
  void schedule(std::uint32_t number, std::uint32_t action, Time delay);
  void read(Flight& flight, Piece& piece);
  void land(Flight& flight, const Piece& piece);
  void sent(Flight& flight);
  void arrive(std::uint32_t number, Flight& flight);
  void push(Port& at, const Due& due);
  static bool is_recent(const Port& port, const Arrival& arrival);
  Arrival note(Port& port, std::uint32_t immediate);
  std::string text(const Flight& flight) const;
  Pair& pair(std::uint32_t from, std::uint32_t to) { return pairs_[std::uint64_t{from} << 32 | to]; }

  Clock& clock_;
  Log& log_;
  Totals& totals_;
  Random random_;
  Profile profile_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, Time> late_;
  std::vector<std::unique_ptr<Port>> ports_;
  std::deque<Flight> flights_;
  std::vector<std::uint32_t> free_;
  std::unordered_map<std::uint64_t, Pair> pairs_;
  std::uint64_t last_key_ = 0;
  Trap trap_;
};

}  // namespace pplx::sim
