// One AllToAll on one rank, phases on CPU threads. Knows the heaps, the steps and what may fail; each phase is a file.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../protocol/heap.h"
#include "../protocol/plan.h"
#include "atomic.h"
#include "failure.h"
#include "phase.h"
#include "thread_pool.h"
#include "vector/kernels.h"

namespace pplx::cpu {

// Rows of a caller's tensor.
struct Rows {
  const char* data = nullptr;
  std::uint64_t stride = 0;    // bytes
};

struct DispatchInput {
  std::shared_ptr<const Plan> plan;
  Rows x;                               // dtype, or e4m3 when scales are given
  const char* scales = nullptr;         // of x, when the caller quantised: floats, or e8m0 bytes on MXFP8
  std::uint64_t scale_row_stride = 0;   // bytes
  std::uint64_t scale_stride = 0;       // bytes from one scale to the next
  const float* weights = nullptr;       // [tokens, top_k], contiguous; null: ones
  bool keep_own_rows = false;           // x stays unchanged until dispatch_recv has returned: own rows need no copy
};

// Where dispatch_recv writes. Sizes follow from the configuration.
struct DispatchOutput {
  char* x = nullptr;
  char* scales = nullptr;
  std::uint64_t scale_row_stride = 0, scale_stride = 0;   // bytes
  std::uint64_t scale_group_stride = 0;  // bytes from one expert's scales to the next; Padded
  std::int32_t* counts = nullptr;        // [local experts]
  std::int32_t* offsets = nullptr;       // [local experts + 1]; Ragged
  float* weights = nullptr;              // [rows]; Ragged, Padded
  std::int32_t* src_rank = nullptr;      // [rows]
  std::int32_t* src_token = nullptr;     // [rows]
  std::int32_t* topk_ids = nullptr;      // [rows, top_k]; Compact
  float* topk_weights = nullptr;         // [rows, top_k]; Compact
  std::int32_t* num_rows = nullptr;      // [1]; Compact
};

// What a rank received, kept by the handle: where every choice of every row went.
struct Received {
  static constexpr std::uint32_t kNowhere = 0xffffffffu;   // the output buffer was too small for it

  std::uint32_t generation = 0;
  std::uint32_t top_k = 0;
  std::vector<std::uint32_t> rows_begin;    // [world + 1], by source
  std::vector<std::uint16_t> choices;       // [rows]: a bit per k, as in the route
  std::vector<std::uint32_t> place;         // [rows, top_k]: output row of each choice; Compact: one a row
  std::vector<float> weight;                // [rows, top_k]
  std::uint64_t needed_rows = 0;            // what the output had to hold
  bool overflowed = false;

  std::uint32_t rows(std::uint32_t source) const { return rows_begin[source + 1] - rows_begin[source]; }
};

struct CombineInput {
  std::shared_ptr<const Received> received;
  Rows expert_out;
  bool weighted = true;
  bool uses_weights = false;                      // weights below override the dispatch's; every rank of a step alike
  const float* weights = nullptr;                 // [tokens, top_k] of this rank's own tokens; null when there are none
  std::shared_ptr<const Plan> plan;               // of the same step, for weights
  bool has_tail = false;                          // every rank of a step alike
  const float* tail = nullptr;                    // [output rows], Compact [output rows, top_k]; contiguous
  bool release = false;
};

struct CombineOutput {
  char* y = nullptr;
  std::uint64_t stride = 0;    // bytes
  bool accumulate = false;
  float* tail = nullptr;       // [tokens, top_k]: what rode behind the rows; 0 for a choice that went nowhere
};

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
    std::vector<char*> peers;      // by rank: their heap, mapped; own for oneself; null behind the proxy
  };

  // Seconds since any fixed moment, never less than before: what timeouts are counted in. A simulation brings its own.
  using Clock = std::function<double()>;
  static double steady_clock();

  Exchange(const Config& config, Memory memory, unsigned threads, double timeout_seconds, Clock clock = steady_clock);

  const Config& config() const { return config_; }
  const Heap& heap() const { return heap_; }

  // The four phases. Each call blocks; `interrupted` is asked every so often, and may throw.
  using Interrupted = std::function<void()>;
  std::uint32_t dispatch_send(const DispatchInput& input, const Interrupted& interrupted);
  std::shared_ptr<const Received> dispatch_recv(std::uint32_t step, const DispatchOutput& output, const Interrupted& interrupted);
  void combine_send(std::uint32_t step, const CombineInput& input, const Interrupted& interrupted);
  void combine_recv(std::uint32_t step, const CombineOutput& output, const Interrupted& interrupted);

  // The same, to be polled by whoever owns the clock. finish_...() once poll() has returned true. poll() throws what fails the
  // phase, a timeout that counts from `begun` included, and latches it.
  bool poll(PhaseRun& phase_run, Phase phase, std::uint32_t step, double begun);
  double now() const { return now_(); }
  std::unique_ptr<PhaseRun> start_dispatch_send(const DispatchInput& input, std::uint32_t* step);
  std::unique_ptr<PhaseRun> start_dispatch_recv(std::uint32_t step, const DispatchOutput& output,
                                                std::shared_ptr<Received> received);
  std::unique_ptr<PhaseRun> start_combine_send(std::uint32_t step, const CombineInput& input);
  std::unique_ptr<PhaseRun> start_combine_recv(std::uint32_t step, const CombineOutput& output);
  void finish_dispatch_recv(std::uint32_t step, const std::shared_ptr<Received>& received);
  void finish_combine_send(std::uint32_t step);
  void finish_combine_recv(std::uint32_t step);

  // The first failure latches: every later call throws it. Safe from any thread, and from the proxy.
  void fail(const Abort& abort, const std::string& message);
  // The same for a write that failed. It counts a little later: mostly its cause is a death, and what tells of that names the rank.
  void lost_network(const Abort& abort, const std::string& message);
  void peer_left(std::uint32_t peer);            // closed its Communicator in good order: what it sent may still arrive
  void name_networks(std::vector<std::string> by_peer) { networks_ = std::move(by_peer); }   // for messages; before the first step
  // Throws what latched, if anything did; the arguments say what this rank was doing.
  void raise_failure(Phase phase = Phase::None, std::uint32_t step = 0);
  // An overflow that some rank reported at the end of a step; the next call raises it once, on every rank.
  void raise_notice();

  void reset(std::uint32_t generation, const std::vector<bool>& alive);
  std::uint32_t generation() const { return generation_; }
  const std::vector<bool>& alive() const { return alive_; }
  std::uint32_t next_step() const { return next_step_; }
  std::uint32_t open_steps() const;
  Stats stats() const;

  // ---- what the phases use ----
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
  // The blocks that this rank announced to the proxy in (set, op) so far, for have_left() to ask about: once they have
  // left for good, their memory may be used again.
  struct Announced {
    const std::uint64_t* sent;
    std::uint64_t word;
  };
  std::vector<Announced> announced(std::uint32_t set, Op op) const;
  static bool have_left(const std::vector<Announced>& blocks);
  // Announces a finished block: raises the peer's arrival word, or tells the proxy.
  void publish(std::uint32_t step, Op op, std::uint32_t peer, std::uint32_t rows, const char* block);
  void raise_at_peer(std::uint32_t step, Signal signal, std::uint32_t peer);
  BlockHeader header(std::uint32_t step, std::uint32_t rows, std::uint32_t flags = 0) const;
  // Peers in the order in which all ranks visit them: rank + 1 first, oneself last. Only the living.
  const std::vector<std::uint32_t>& peers() const { return order_; }
  // The living ranks that hold the same tokens, oneself left out.
  const std::vector<std::uint32_t>& replicas() const { return replicas_; }
  // Throws unless the header is what this step's block of that peer must have.
  void check_header(const BlockHeader& header, Phase phase, std::uint32_t step, Op op, std::uint32_t peer) const;
  [[noreturn]] void protocol_error(Phase phase, std::uint32_t step, std::uint32_t peer, const std::string& what) const;
  void note_overflow(std::uint32_t peer) const;
  // A replica whose dispatch header tells of other tokens than this rank has.
  void check_replica(const BlockHeader& header, const Plan& plan, std::uint32_t step, std::uint32_t peer) const;
  void count_block(std::uint32_t peer, std::uint64_t rows, std::uint64_t bytes, bool sent);
  std::uint32_t units_of(std::uint64_t rows, std::uint64_t row_bytes, std::uint32_t* rows_per_unit) const;
  char* staging(std::uint32_t set) { return staging_[set].data(); }

  enum class Progress : std::uint8_t { Closed, Sent, Received, Combining };
  struct Open {
    Progress progress = Progress::Closed;
    std::uint32_t step = 0;
    DispatchInput input;
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
  std::uint64_t abort_seen();   // this rank's abort word
  [[noreturn]] void latch(PeerFailure failure);
  void tell_node(std::uint64_t word);   // to the abort words of the ranks that share memory with this one
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
  std::vector<std::uint64_t> mailed_;         // the arrival_word that `sent` must reach, by word_index
  std::vector<std::atomic<double>> left_at_;  // when a peer said goodbye; negative: it has not
  std::atomic<bool> someone_left_{false};
  struct LostNetwork {
    Abort abort;
    std::string message;
    double at = 0;
  };
  LostNetwork lost_network_;
  std::atomic<bool> network_is_lost_{false};
  bool first_step_ = true;
  std::unique_ptr<PeerFailure> failure_;
  std::string message_;                       // for an abort that came with more words than its word
  std::vector<std::string> networks_;         // by peer; empty: mapped
  mutable std::mutex notice_mutex_;
  mutable std::string notice_;
  Stats stats_;
  std::atomic<std::uint64_t> rows_sent_{0}, rows_received_{0}, bytes_sent_{0}, bytes_received_{0};
};

}  // namespace pplx::cpu
