// The order of one AllToAll's launches over streams and captures, and open dispatches. The device alone knows steps' memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "runtime.h"

namespace pplx::cuda {

class Launches {
 public:
  // Launches of all eager calls, or of one capture, whose events mean nothing outside of it: the caller orders its graphs.
  class Sequence {
   public:
    explicit Sequence(unsigned long long capture = 0) : capture_(capture) {}

    bool eager() const { return capture_ == 0; }
    std::size_t open_steps() const { return open_.size(); }
    const std::vector<cudaStream_t>& streams() const { return streams_; }
    // Sends are one sequence, whatever streams they run on. A receive half on another stream waits for the last send, or it could fill the GPU first.
    void follow(cudaStream_t stream, bool sends);
    void note_send(cudaStream_t stream) { record(sent_, stream); }
    // A receive half of a combine makes places blank that peers write after the next dispatch, which waits for all such halves.
    void note_received(cudaStream_t stream);
    void after_received(cudaStream_t stream);
    void open(const char* buffer, std::uint32_t step, bool received) { open_.push_back({buffer, step, received}); }
    void receive(const char* buffer);
    void close(const char* buffer);
    // In pieces steps are received in their order, and so combined. The number of this one, and that of one before it that is not.
    struct Early {
      std::uint32_t step, before;
    };
    std::optional<Early> early(const char* buffer, Op op) const;  // a receive half of dispatch or combine
    std::optional<Early> opens_early(std::uint32_t step) const;   // and is received at once
    bool has(const char* buffer) const { return find(buffer) != open_.end(); }

   private:
    friend class Launches;
    struct Received {
      cudaStream_t stream = nullptr;
      std::unique_ptr<StreamEvent> done;
    };
    struct Open {
      const char* buffer;
      std::uint32_t step;
      bool received;
    };
    static void record(std::unique_ptr<StreamEvent>& event, cudaStream_t stream);
    std::vector<Open>::const_iterator find(const char* buffer) const;

    unsigned long long capture_;           // its id; 0: eager
    std::vector<Open> open_;               // dispatches that are not combined
    std::vector<cudaStream_t> streams_;    // the one of the last send at the end
    bool sent_any_ = false;
    std::unique_ptr<StreamEvent> sent_;    // the last send that is waited for
    std::vector<Received> received_;       // that no dispatch has waited for yet; of several on a stream the last
  };

  Sequence& on(cudaStream_t stream);
  // The one that has the open dispatch with this buffer, which may have been made elsewhere. A compiler moves buffers: then it is the
  // oldest of those made in `here`. Throws a Misuse where none is open.
  Sequence& open_with(Sequence& here, const char* buffer);
  const Sequence& eager() const { return eager_; }
  Sequence& eager() { return eager_; }
  void forget_steps();

 private:
  Sequence eager_;
  std::deque<Sequence> captures_;          // the latest last: nothing says when one has ended
};

}  // namespace pplx::cuda
