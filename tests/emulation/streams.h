// Streams, events and captured graphs of the emulation. A stream is a queue that a thread of its own works off, in order; streams
// that nothing orders run beside each other. The null stream is one for each thread that launches.
//
// A stream that is being captured keeps what it is given as nodes of a graph, with the nodes that must end before each. A replay
// gives them to the graph's own streams, one for each that was captured, so that its branches run beside each other, too.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>

#include "emulation/kernel.h"

namespace emulation {

class Done {
 public:
  void set();
  void wait();
  bool is_set();
  std::chrono::steady_clock::time_point when();   // it was set

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
  std::chrono::steady_clock::time_point when_;
};

class Stream;

struct Graph {
  struct Node {
    std::function<void()> work;
    std::size_t branch;
    std::vector<std::size_t> after;
  };
  std::vector<Node> nodes;
  std::vector<std::unique_ptr<Stream>> branches;
};

struct Capture {
  unsigned long long id = 0;
  std::shared_ptr<Graph> graph = std::make_shared<Graph>();
  std::vector<Stream*> streams;   // that take part, the one on which it began first
  bool ended = false;
};

struct Event {
  std::shared_ptr<Done> done;          // null: never recorded outside of a capture
  std::shared_ptr<Capture> capture;    // recorded in it
  std::vector<std::size_t> after;
};

// As the runtime numbers them.
enum Error : int { kSuccess = 0, kInvalidValue = 1, kUnjoined = 904, kIsolation = 905, kMerge = 902, kCapturedEvent = 907 };

class Stream {
 public:
  void push(std::function<void()> work);
  bool idle();
  void synchronize();

  int record(Event& event);
  int wait(const Event& event);

  const Capture* capture() const { return capture_.get(); }
  void begin_capture();
  int end_capture(std::shared_ptr<Graph>& graph);

 private:
  void join(const std::shared_ptr<Capture>& capture);
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool started_ = false;
  std::shared_ptr<Capture> capture_;   // changed by the thread that captures
  std::size_t branch_ = 0;
  std::vector<std::size_t> after_;     // the nodes behind which the next one comes
};

Stream& stream_of(void* stream);       // null: the calling thread's
Stream* new_stream();                  // lives as long as the process: its thread may be at work
void replay(const std::shared_ptr<Graph>& graph, Stream& stream);
void launch(dim3 grid, dim3 block, std::size_t shared, Stream& stream, std::function<void()> kernel);

}  // namespace emulation
