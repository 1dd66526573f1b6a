// A network of NICs under a virtual clock: the costs of a write in flight from one rank's memory to another's.
//
//   post (host CPU) -> the NIC's message rate -> link out, by turns in chunks -> latency -> link in -> landed -> acknowledged
//
// The switches never block and never drop; a link is shared fairly. Times are microseconds.
#pragma once

#include <cstdint>
#include <deque>
#include <queue>
#include <vector>

namespace pplx::model {

struct FabricCosts {
  std::uint32_t nics = 1;             // NICs of one rank
  double bytes_per_us = 50'000;       // per NIC, each way
  double latency_us = 5;              // from the link to the target's completion queue, for the first byte
  double ack_us = 5;                  // from there back to the source's completion queue
  double nic_message_us = 0;          // a NIC starts, and takes in, at most one message in this time
  double post_us = 0.1;               // host CPU per write
  double completion_us = 0.03;        // host CPU per completion
  double poll_us = 0.05;              // host CPU to find a NIC's completion queue empty
  std::uint32_t depth = 4096;         // writes in flight on one NIC
  std::uint32_t interleave = 0;       // how many messages a NIC sends by turns; 0: all that it has
  std::uint32_t chunk_bytes = 8192;   // bytes of one turn
};

struct Message {
  std::uint32_t source = 0, target = 0, nic = 0;   // a NIC writes to the one of its own number
  std::uint32_t immediate = 0;
  std::uint64_t bytes = 0, context = 0;
  std::uint64_t out = 0, in = 0;                   // bytes that have left, and that have landed
};

// The ranks' reactions.
class Ranks {
 public:
  virtual ~Ranks() = default;
  virtual void landed(double now, const Message& message) = 0;        // at the target
  virtual void acknowledged(double now, const Message& message) = 0;  // at the source
  virtual void woken(double now, std::uint32_t rank) = 0;             // at the time given to wake()
};

class Simulation {
 public:
  Simulation(const FabricCosts& costs, std::uint32_t ranks);

  const FabricCosts& costs() const { return costs_; }
  // A host's posts come in the order of their times.
  void post(double at, const Message& message);
  void wake(double at, std::uint32_t rank);
  double run(Ranks& ranks);   // runs all events; returns the time of the last

  std::uint32_t under_way(std::uint32_t rank, std::uint32_t nic) const { return at(rank, nic).under_way; }
  std::uint64_t bytes_landed() const { return bytes_landed_; }

 private:
  enum class Kind : std::uint32_t { Turn, FirstByte, Landed, Acknowledged, Wake };
  struct Event {
    double at;
    std::uint64_t order;   // events of equal times happen in the order in which they were made
    Kind kind;
    std::uint32_t what;    // a NIC, a message or a rank
    bool operator<(const Event& other) const { return at != other.at ? at > other.at : order > other.order; }
  };
  struct Ready {
    double at;
    std::uint32_t message;
  };
  struct Nic {
    std::deque<Ready> waiting;          // posted, in order
    std::deque<std::uint32_t> active;   // sent by turns
    bool turning = false;               // a Turn is to come
    double out_message_free = 0;        // when it can start another message
    double in_free = 0, in_message_free = 0;
    std::uint32_t under_way = 0;
  };

  const Nic& at(std::uint32_t rank, std::uint32_t nic) const { return nics_[rank * costs_.nics + nic]; }
  Nic& at(std::uint32_t rank, std::uint32_t nic) { return nics_[rank * costs_.nics + nic]; }
  void add(double at, Kind kind, std::uint32_t what) { events_.push({at, order_++, kind, what}); }
  void turn(double now, std::uint32_t nic);
  void first_byte(double now, std::uint32_t message);

  const FabricCosts costs_;
  std::vector<Nic> nics_;
  std::vector<Message> messages_;
  std::vector<std::uint32_t> free_;     // free entries of messages_
  std::priority_queue<Event> events_;
  std::uint64_t order_ = 0, bytes_landed_ = 0;
};

// An operation that all ranks begin together; times from there.
struct Result {
  std::vector<double> finished;         // indexed by rank: when the kernel would return
  double posted = 0;                    // when the last write was posted
  std::uint64_t writes = 0, bytes_posted = 0, bytes_landed = 0;
  double host_us = 0;                   // CPU time of the busiest host thread
};

}  // namespace pplx::model
