// One AllToAll on one GPU: the host half. Every call launches on the caller's stream and returns; none synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../../host/first_failure.h"
#include "../../host/fork_check.h"
#include "../../host/halves.h"
#include "../../host/notices.h"
#include "../../host/peer_order.h"
#include "../../host/standing.h"
#include "../../host/step_book.h"
#include "../../protocol/nodes.h"
#include "buffer_layout.h"
#include "host_heap.h"
#include "launch_table.h"
#include "launches.h"
#include "memory/shared_memory.h"
#include "timeline.h"

namespace pplx::cuda {

// Memory that something else may have been in: as it is when it is new.
void clear(const SharedMemory& heap, cudaStream_t stream);
// The places of counts and rows, as peers must find them: before they can write there.
void leave_blank(const Config& config, const SharedMemory& heap, cudaStream_t stream);

// A dispatch whose rows are not read opens a step for its combine: of each row this much travels, so that all else is as always.
void only_beginnings(Common& k);

// The number of tokens from which a combine is large, as this rank's GPU would have it; num_sms: as in the constructor.
std::uint32_t tuned_large_tokens(const Config& config, int device, std::uint32_t num_sms);

#ifdef PPLX_CARRIER
// Memory of a carrier that kernels drive: laid out as a heap, at the same place of its own memory on every rank.
struct Symmetric {
  char* base = nullptr;
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> pes;       // the carrier's numbers of the ranks, by rank
};
#endif

// Arguments of a call, beside those that kernels take as they are. Addresses are device memory.
struct Launch {
  cudaStream_t stream = nullptr;
  unsigned halves = kSend | kRecv;      // both: in one launch
  char* plan = nullptr;
  char* buffer = nullptr;               // the dispatch returns it
  std::uint32_t* hooks = nullptr;       // its words, hook_words_in_all() of them; none: without
};
// Received rows that lie in memory of their own. Their buffer may then end where they would begin in it.
struct Outputs {
  char* x = nullptr;                    // null: all lie in the buffer
  char* scales = nullptr;
  float* weights = nullptr;             // Compact: of all choices
};

class Exchange {
 public:
  struct Memory {
    std::shared_ptr<SharedMemory> own;
    std::vector<std::shared_ptr<SharedMemory>> peers;   // ranks' memory; null for this rank, dead ranks and remote ones
    Nodes nodes;
    std::uint64_t remote = 0;                           // peers that the proxy carries to, a bit each
    std::vector<std::uint32_t> slot_at;                 // number of this rank's slots at each of those, by rank
    bool proxied = false;                               // some rank has a proxy: then each does
    bool blocks_on_gpu = false;                         // that the proxy moves
    bool gdrcopy = false;                               // to be used, where it is there, for the proxy's arrival words
#ifdef PPLX_CARRIER
    Symmetric symmetric;                                // memory for remote peers; where some rank has any, each has it
#endif
    bool across() const {                               // true if some rank has remote peers, this one or another
#ifdef PPLX_CARRIER
      if (symmetric.base != nullptr) return true;
#endif
      return proxied;
    }
  };

  // large_tokens: a combine of this many or more is large, the same on all ranks. sending_share: of a large dispatch's thread blocks, in
  // percent; 0: as tuned.
  Exchange(const Config& config, Memory memory, int device, double timeout_seconds, std::uint32_t num_sms, std::uint32_t large_tokens,
           std::uint32_t sending_share, bool counts);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  const Config& config() const { return common_.c; }
  std::uint32_t generation() const { return common_.generation; }
  const std::shared_ptr<SharedMemory>& memory() const { return memory_.own; }
  const std::shared_ptr<HostHeap>& host() const { return host_; }   // none inside a node; with node_ranks one for each generation
  std::vector<std::uint32_t> network_peers() const;                 // those with which this rank exchanges blocks by its proxy
  // With node_ranks, anew in each generation: RelayLayouts of this node's living ranks, of which it clears its own, and the mates' blocks.
  using ByRank = std::map<std::uint32_t, std::shared_ptr<SharedMemory>>;
  std::uint64_t relay_bytes(std::uint32_t mate) const;
  void lay_relays(ByRank areas, ByRank blocks);

  // Returns how the host numbers the step, which knows nothing of replays; -1 in a capture. In pieces a receive half is given what its
  // send half was: it sends the rest.
  std::int64_t dispatch(const Launch& launch, const Tokens& tokens, const Outputs& outputs = {});
  void combine(const Launch& launch, const ExpertOutputs& outputs, const Result& result);

  // Before the first step that has hooks: loads what those launch. Leaves multiprocessors to the kernels that wait, or are waited for.
  void use_hooks();
  void clear_hooks(std::uint32_t* words, cudaStream_t stream);   // before the launch of their dispatch
  // Whatever is launched behind it on that stream has the rows of these experts.
  void await_experts(const Launch& launch, std::uint32_t first, std::uint32_t count);

  void fail(const Abort& abort, const std::string& message);   // kernels stop waiting; safe from any thread
  void peer_busy(std::uint32_t peer, bool busy);  // it lives, and says that it comes later
  void peer_left(std::uint32_t peer);  // in good order: what it sent is there, and nothing else will come
  void name_networks(std::vector<std::string> by_peer) { first_.name_networks(std::move(by_peer)); }   // named in messages; before the first step
  void follow(cudaStream_t current);   // as one of its streams: graphs may have been replayed on it
  // Stops what is under way on all streams, `current` included, and waits for it, before any survivor goes on.
  void drain(cudaStream_t current, double seconds);
  void reset(std::uint32_t generation, const std::vector<bool>& alive);  // after drain()
  bool ended(double seconds) const;  // true if all that was launched has ended, after at most `seconds`
#ifdef PPLX_CARRIER
  // Between generations: puts of the old one by peer, and those that have landed by source. Once these agree, counts begin anew.
  std::vector<std::uint64_t> posted() const;
  std::vector<std::uint64_t> landed() const;
  void rebase();
#endif
  void raise_failure();
  void raise_notice() { raise_notices(common_.report->notices, common_.c); }
  // Counts eager calls; captures run nothing, and replays are not seen by the host.
  std::uint32_t open_steps() const;
  void set_num_sms(std::uint32_t num_sms);  // at most as at construction; from the next step that opens while no other is open
  const DeviceCounters* device_counters() const { return common_.counters; }
  // The counts of kernels so far, without a wait for any that runs. Where they count nothing: of the host's launches.
  Counters counters() const;
  // Reads from its memory where it stands, and waits for no kernel.
  Standing standing() const;
  std::uint32_t large_tokens() const { return large_tokens_; }
  // A launch as the table has it, and the reason.
  std::vector<ExplainedLaunch> explain(std::uint32_t tokens) const;  // the launches of a step of this many tokens
#ifdef PPLX_CUDA_STAGES
  void note_stages(std::uint64_t* stages, std::uint32_t steps, std::uint32_t warps);  // Common::stages
#endif
  // When the launches that send began in the latest steps: two numbers of a step.
  std::vector<std::uint64_t> begins(std::uint32_t steps) const;
  void note_kernels();  // in a timeline, from now on
  void tell_kernels();  // to this module's Trace, those that have ended

 private:
  bool all_ended(double seconds) const;   // on the current device
  std::vector<KeptStep> kept() const;     // on it, too: as in memory; none where nothing is counted
  void listen();
  void rebuild_order(const std::vector<bool>& alive);
  template <typename T>
  void allocate(T*& memory, std::uint64_t bytes, const char* what);  // device memory of zeroes, until the end. what: the call, in an error
  void write_control(std::uint32_t generation, const Control& value);
  void make_chunk_counts();
  void forget_taken_chunks();
  DispatchArguments arguments_of(const Launch& launch, const Tokens& tokens, const Outputs& outputs) const;
  Strips sent_strips(const CombineArguments& a) const;
  void add_nodes(CombineArguments& a) const;
  void lay_host();
  void lay_rails(const std::vector<bool>& alive, const Rails& relays);
  void find_relays(const std::vector<bool>& alive);
  std::uint32_t large_dispatch() const;  // tokens from which on a dispatch is large
  bool is_large(const Launch& launch, const DispatchArguments& a) const;
  void check_pieces() const;
  void make_round_counts();
  void check_order(const std::optional<Launches::Sequence::Early>& early, const char* call) const;
  PieceArguments pieces_of(const Launch& launch) const;
  void cut(DispatchArguments& a) const;

  const int device_;
  Memory memory_;
  BufferLayout layout_;
  Common common_;
  std::uint32_t sms_ = 1, most_sms_ = 1, wanted_sms_ = 1;
  mutable std::mutex mutex_;   // over launches, which wait where the GPU has no room for another
  std::mutex failing_;         // a reset, or a failure
  Launches launches_;
  StepBook steps_;   // eager calls
  cudaStream_t own_stream_ = nullptr;  // reset() writes by it: it must not wait behind kernels that wait
  std::uint32_t large_tokens_;
  const std::uint32_t sending_share_;
  char* chunk_memory_ = nullptr;  // memory of chunk_counts_; none where no step is large
  std::uint64_t chunk_bytes_ = 0;
  ChunkCounts chunk_counts_;
  bool has_hooks_ = false;
  std::atomic<std::uint64_t> large_dispatches_ = 0, large_combines_ = 0;
  std::uint32_t* round_counts_ = nullptr;  // PieceArguments::counts, and behind them what remote_rounds_ has; none where blocks are whole
  std::uint64_t round_bytes_ = 0;
  RemoteRounds remote_rounds_;
  Control* controls_ = nullptr;  // one for each generation, in turn
  std::vector<void*> allocated_;
#ifdef PPLX_CARRIER
  std::unique_ptr<PutCounts> read_puts() const;
  std::vector<std::uint64_t> read_signals() const;
  template <typename Visit>
  void for_each_signal(const Visit& visit) const;   // visit(set, op, part, peer, number among those that were read)
#endif
  FirstFailure first_;
  std::unique_ptr<StreamEvent> made_;   // at DeviceCounters::made: what tells the GPU's time while no kernel can
  std::unique_ptr<Timeline> timeline_;
  const ForkCheck fork_;
  std::shared_ptr<HostHeap> host_;
  Relays relays_;
  ByRank relay_areas_, relay_blocks_;
};

}  // namespace pplx::cuda
