// One AllToAll on one GPU: the host half. Every call launches on the caller's stream and returns; none synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "../cpu/failure.h"
#include "host_heap.h"
#include "kernels.h"
#include "memory/shared_memory.h"

namespace pplx::cuda {

// Where everything lies in the one buffer that a dispatch returns: what its combine reads, and all that is small; then the Rows.
// `none` where the layout or the wire has no such part.
struct BufferLayout {
  static constexpr std::uint64_t none = ~0ull;

  std::uint64_t x = none, scales = none, counts = none, offsets = none, weights = none, src_rank = none, src_token = none;
  std::uint64_t topk_ids = none, topk_weights = none, num_rows = none;
  std::uint64_t step = none, overflowed = none, rows_begin = none, choices = none, place = none, weight = none;
  std::uint64_t bytes = 0;
  std::uint64_t rows = 0;       // of the output, all experts together
  Strides scale;
};

BufferLayout buffer_layout(const Config& config);

// The places of the rows that come back, as peers must find them: before they can write there.
void leave_blank(const Config& config, const SharedMemory& heap, cudaStream_t stream);

enum Halves : unsigned { kSend = 1, kRecv = 2 };

class Exchange {
 public:
  struct Memory {
    std::shared_ptr<SharedMemory> own;
    std::vector<std::shared_ptr<SharedMemory>> peers;   // by rank; null for oneself, for who is dead, and for other nodes
    std::uint64_t remote = 0;                           // peers that the proxy carries to, a bit each
    bool proxied = false;                               // some rank has a proxy: then each does
    bool blocks_on_gpu = false;                         // that the proxy moves
    bool gdrcopy = false;                               // to be used, where it is there, for the proxy's arrival words
  };
  struct Tokens {
    std::uint32_t count = 0;
    const char* x = nullptr;
    std::uint64_t stride = 0;             // bytes
    const char* scales = nullptr;
    Strides scale;
    const float* weights = nullptr;
    const void* ids = nullptr;            // null: the plan is given
    bool wide_ids = false;
  };
  // Received rows that lie in memory of their own. Their buffer may then end where they would begin in it.
  struct Rows {
    char* x = nullptr;                    // null: all lie in the buffer
    char* scales = nullptr;
    float* weights = nullptr;             // Compact: of all choices
  };
  struct Outputs {
    const char* expert_out = nullptr;
    std::uint64_t stride = 0, rows = 0;
    bool weighted = true, uses_weights = false, release = false;
    const float* weights = nullptr;
    const std::uint32_t* tail = nullptr;  // with has_tail
    std::uint64_t tail_rows = 0;
  };
  struct Result {
    std::uint32_t tokens = 0;
    char* y = nullptr;
    std::uint64_t stride = 0;
    bool accumulate = false;
    bool has_tail = false;
    std::uint32_t* tail = nullptr;
  };

  Exchange(const Config& config, Memory memory, int device, double timeout_seconds, std::uint32_t num_sms);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  const Config& config() const { return common_.c; }
  std::uint32_t generation() const { return common_.generation; }
  const std::shared_ptr<HostHeap>& host() const { return host_; }   // none inside a node

  // `halves`: the send half, the receive half, or both in one launch. Returns the step's number as the host counts.
  std::uint32_t dispatch(cudaStream_t stream, unsigned halves, const Tokens& tokens, char* plan, char* buffer, const Rows& rows);
  void combine(cudaStream_t stream, unsigned halves, const Outputs& outputs, const Result& result, char* plan, char* buffer);
  void push(cudaStream_t stream, const std::vector<std::uint64_t>& bytes);   // the floor; nothing else may follow

  void fail(const Abort& abort, const std::string& message);   // kernels stop waiting; safe from any thread
  void peer_left(std::uint32_t peer);  // in good order: what it sent is there, and nothing else will come
  void name_networks(std::vector<std::string> by_peer) { networks_ = std::move(by_peer); }   // for messages; before the first step
  // Stops what is under way on all streams, `current` included (graphs), and waits for it. Before any survivor goes on: no kernel
  // may store into its memory.
  void drain(cudaStream_t current, double seconds);
  void reset(std::uint32_t generation, const std::vector<bool>& alive);  // after drain()
  bool ended(double seconds) const;  // whether all that was launched has ended, after at most so many seconds
  void raise_failure();
  void raise_notice();
  std::uint32_t open_steps() const;
  std::uint64_t steps() const;
#ifdef PPLX_CUDA_STAGES
  void note_stages(std::uint64_t* stages, std::uint32_t warps);  // device memory, [stage][warps]
#endif
  void stamp(std::uint64_t* stamps, std::uint32_t steps);  // device memory, [steps][dispatch, combine]: when each launch began

 private:
  class OnDevice;

  struct OpenStep {
    const char* buffer;
    std::uint32_t step;
  };
  struct Mark {
    cudaEvent_t event = nullptr;
    cudaStream_t stream = nullptr;
    bool waits = false;
  };

  std::vector<OpenStep>::iterator opened(const char* buffer);
  void mark(Mark& m, cudaStream_t stream);
  void after(Mark& m, cudaStream_t stream);
  void follow(cudaStream_t stream, bool sends);
  void mark_send(cudaStream_t stream);
  void listen();
  void rebuild_order(const std::vector<bool>& alive);
  void write_control(std::uint32_t generation, const Control& value);

  const int device_;
  Memory memory_;
  BufferLayout layout_;
  Common common_;
  std::uint32_t sms_ = 1;
  mutable std::mutex mutex_;
  std::vector<OpenStep> open_;
  Mark combined_[kMaxInFlight];  // by set: receive halves
  std::uint32_t next_step_;
  std::uint64_t steps_ = 0;
  std::vector<cudaStream_t> streams_;  // that were launched on, the one of the last send at the end
  bool sent_any_ = false;
  cudaEvent_t sent_ = nullptr;
  cudaStream_t own_stream_ = nullptr;  // for what reset() writes: it must not wait behind what waits
  Control* controls_ = nullptr;  // by generation, in turn
  std::string message_;
  std::vector<std::string> networks_;   // by peer; empty: mapped
  std::shared_ptr<HostHeap> host_;
};

}  // namespace pplx::cuda
