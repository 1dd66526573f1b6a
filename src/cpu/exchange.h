// One AllToAll on one rank, whose phases run on CPU threads. It keeps the heaps, the steps and failures; each phase is a file of its own.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../protocol/deadlines.h"
#include "../protocol/mailbox.h"
#include "arguments.h"
#include "../host/atomic.h"
#include "../host/failure.h"
#include "../host/first_failure.h"
#include "../host/lost_network.h"
#include "../host/peer_order.h"
#include "phase.h"
#include "thread_pool.h"
#include "vector/kernels.h"

namespace pplx::cpu {

struct Stats {
  std::uint64_t steps = 0;
  std::uint64_t rows_sent = 0, rows_received = 0;
  std::uint64_t bytes_sent = 0, bytes_received = 0;   // to and from other ranks, headers included
  double seconds[4] = {};                             // in each phase, waits included
};

class Exchange {
 public:
  struct Memory {
    char* own = nullptr;
    std::vector<char*> peers;      // by rank: the peer's heap, mapped; for this rank its own; null behind the proxy
  };

  // Monotonic seconds since any fixed moment, for timeouts. A simulation brings its own.
  using Clock = std::function<double()>;
  static double steady_clock();

  Exchange(const Config& config, Memory memory, unsigned threads, double timeout_seconds, Clock clock = steady_clock);

  const Config& config() const { return config_; }
  const Heap& heap() const { return heap_; }

  // The four phases. Each call blocks; `interrupted` is called every so often, and may throw.
  using Interrupted = std::function<void()>;
  std::uint32_t dispatch_send(const Tokens& input, const Interrupted& interrupted);
  std::shared_ptr<const Received> dispatch_recv(std::uint32_t step, const DispatchOutput& output, const Interrupted& interrupted);
  void combine_send(std::uint32_t step, const ExpertOutputs& input, const Interrupted& interrupted);
  void combine_recv(std::uint32_t step, const Result& output, const Interrupted& interrupted);

  // The phases for a caller that owns the clock and polls them. Call finish_...() once poll() has returned true. poll() latches and throws
  // what fails the phase, including a timeout that counts from `begun`.
  bool poll(PhaseRun& phase_run, Phase phase, std::uint32_t step, double begun);
  double now() const { return now_(); }
  std::unique_ptr<PhaseRun> start_dispatch_send(const Tokens& input, std::uint32_t* step);
  std::unique_ptr<PhaseRun> start_dispatch_recv(std::uint32_t step, const DispatchOutput& output,
                                                std::shared_ptr<Received> received);
  std::unique_ptr<PhaseRun> start_combine_send(std::uint32_t step, const ExpertOutputs& input);
  std::unique_ptr<PhaseRun> start_combine_recv(std::uint32_t step, const Result& output);
  void finish_dispatch_recv(std::uint32_t step, const std::shared_ptr<Received>& received);
  void finish_combine_send(std::uint32_t step);
  void finish_combine_recv(std::uint32_t step);

  // The first failure latches: every later call throws it. Safe from any thread, and from the proxy.
  void fail(const Abort& abort, const std::string& message);
  // Reports a failed write. It takes effect a little later: mostly a death is the cause, and the control connection names the dead rank.
  void lost_network(const Abort& abort, const std::string& message);
  void close() { closed_.store(true, std::memory_order_release); }   // calls that other threads wait in throw Closed, and all later ones
  void peer_left(std::uint32_t peer);            // it closed its Communicator in good order; its last blocks may still arrive
  void name_networks(std::vector<std::string> by_peer) { first_.name_networks(std::move(by_peer)); }   // for messages; before the first step
  // Throws the latched failure, if there is one; the arguments say what this rank was doing.
  void raise_failure(Phase phase = Phase::None, std::uint32_t step = 0);
  // Throws once if some rank reported an overflow at the end of a step; every rank's next call does.
  void raise_notice();

  void reset(std::uint32_t generation, const std::vector<bool>& alive);
  std::uint32_t generation() const { return generation_; }
  const std::vector<bool>& alive() const { return alive_; }
  std::uint32_t next_step() const { return next_step_; }
  std::uint32_t open_steps() const;
  Stats stats() const;

  // ---- for the phases ----
  bool mapped(std::uint32_t peer) const { return memory_.peers[peer] != nullptr; }
  char* own_slot(std::uint32_t set, Op op, std::uint32_t peer) const {
    return memory_.own + heap_.slot_at(config_, set, op, peer);
  }
  char* slot_at_peer(std::uint32_t set, Op op, std::uint32_t peer) const {
    return memory_.peers[peer] + heap_.slot_at(config_, set, op, config_.rank);
  }
  char* own_share(std::uint32_t set, std::uint32_t replica) const {
    return memory_.own + heap_.share_at(config_, set, replica);
  }
  char* share_at_peer(std::uint32_t set, std::uint32_t replica) const {
    return memory_.peers[replica] + heap_.share_at(config_, set, config_.rank);
  }
  char* send_area(std::uint32_t set, Op op) const { return memory_.own + heap_.send_at(set, op); }
  std::uint64_t arrival(std::uint32_t set, Signal signal, std::uint32_t peer) const {
    return load_acquire(own_word(heap_.arrival_at(config_, set, signal, peer)));
  }
  bool has_arrived(std::uint32_t step, Signal signal, std::uint32_t peer) const {
    return arrived(arrival(set_of(config_, step), signal, peer), generation_, step);
  }
  Waiting waiting_for(std::uint32_t step, Signal signal, std::uint32_t peer, const char* what) const;
  // The blocks that this rank has announced to the proxy in (set, op) so far. Once have_left() says that they have left for good, their
  // memory may be used again.
  struct Announced {
    MailboxEntry entry;
    std::uint64_t last;
  };
  std::vector<Announced> announced(std::uint32_t set, Op op) const;
  static bool have_left(const std::vector<Announced>& blocks);
  // Announces a finished block: raises the peer's arrival word, or the proxy's mailbox word.
  void publish(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows, const char* block);
  void raise_at_peer(std::uint32_t step, Signal signal, std::uint32_t peer);
  BlockHeader header(std::uint32_t step, std::uint32_t rows, std::uint32_t flags = 0) const;
  // The living peers, in the order in which a rank visits them: rank + 1 first, itself last.
  const std::vector<std::uint32_t>& peers() const { return order_; }
  // The other living ranks that hold the same tokens.
  const std::vector<std::uint32_t>& replicas() const { return replicas_; }
  // Throws unless the header fits this step's block of that peer.
  void check_header(const BlockHeader& header, Phase phase, std::uint32_t step, Op op, std::uint32_t peer) const;
  [[noreturn]] void protocol_error(Phase phase, std::uint32_t step, std::uint32_t peer, const std::string& what) const;
  void note_overflow(std::uint32_t peer) const;
  // Throws if the replica's dispatch header tells of other tokens than this rank has.
  void check_replica(const BlockHeader& header, const Plan& plan, std::uint32_t step, std::uint32_t peer) const;
  void count_block(std::uint32_t peer, std::uint64_t rows, std::uint64_t bytes, bool sent);
  std::uint32_t units_of(std::uint64_t rows, std::uint64_t row_bytes, std::uint32_t* rows_per_unit) const;
  char* staging(std::uint32_t set) { return staging_[set].data(); }

  enum class Progress : std::uint8_t { Closed, Sent, Received, Combining };
  struct Open {
    Progress progress = Progress::Closed;
    std::uint32_t step = 0;
    Tokens input;
    bool own_rows_in_x = false;
    bool overflowed = false;
    bool released = false;
    bool has_tail = false;
  };
  Open& open_step(std::uint32_t step, Progress expected, const char* call);

 private:
  std::uint64_t* abort_of(std::uint32_t rank) const {
    return reinterpret_cast<std::uint64_t*>((rank == config_.rank ? memory_.own : memory_.peers[rank]) + Heap::abort_at(generation_));
  }
  std::uint64_t* own_word(std::uint64_t at) const { return reinterpret_cast<std::uint64_t*>(memory_.own + at); }
  void run(PhaseRun& run, Phase phase, std::uint32_t step, const Interrupted& interrupted);
  void look_for_failure(PhaseRun& phase_run, Phase phase, std::uint32_t step, double left);
  // How long a blocking call has waited: time in which its thread did not run moves `begun`.
  struct Since {
    double begun = 0, last = 0;
  };
  bool poll(PhaseRun& run, Phase phase, std::uint32_t step, Since& since);
  double patience() const { return timeout_ * (first_step_ ? deadlines::kFirstStepFactor : 1); }   // of this step
  std::uint64_t abort_seen();   // this rank's abort word
  [[noreturn]] void latch(PeerFailure failure);
  void tell_node(std::uint64_t word);   // writes the abort words of the ranks that share memory with this one
  void rebuild_order();

  const Config config_;
  const Heap heap_;
  const Memory memory_;
  ThreadPool pool_;
  const double timeout_;
  const Clock now_;
  const std::uint32_t rows_per_unit_bytes_ = 64 * 1024;

  mutable std::mutex mutex_;                  // steps, failure, stats
  std::mutex send_mutex_;                     // sends are one sequence
  std::uint32_t generation_ = 1;
  std::uint32_t next_step_;
  std::vector<bool> alive_;
  std::vector<std::uint32_t> order_, replicas_;
  std::vector<Open> open_;
  std::vector<std::vector<char>> staging_;
  std::vector<std::uint64_t> mailed_;         // by word_index: the arrival_word that `sent` must reach
  std::vector<std::atomic<double>> left_at_;  // by peer: when it said goodbye; negative: it has not
  std::atomic<bool> someone_left_{false};
  LostNetwork lost_network_;
  double lost_at_ = 0;
  std::atomic<bool> network_is_lost_{false};
  std::atomic<bool> first_step_{true}, closed_{false};
  std::unique_ptr<PeerFailure> failure_;
  FirstFailure first_;
  mutable std::mutex notice_mutex_;
  mutable std::string notice_;
  Stats stats_;
  std::atomic<std::uint64_t> rows_sent_{0}, rows_received_{0}, bytes_sent_{0}, bytes_received_{0};
};

}  // namespace pplx::cpu
