#include "emulation/streams.h"

#include <atomic>
#include <thread>

namespace emulation {

void Done::set() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    set_ = true;
    when_ = std::chrono::steady_clock::now();
  }
  changed_.notify_all();
}

void Done::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return set_; });
}

bool Done::is_set() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return set_;
}

std::chrono::steady_clock::time_point Done::when() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return when_;
}

void Stream::push(std::function<void()> work) {
  if (capture_) {
    std::vector<Graph::Node>& nodes = capture_->graph->nodes;
    nodes.push_back({std::move(work), branch_, std::move(after_)});
    after_ = {nodes.size() - 1};
    return;
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    if (!std::exchange(started_, true)) std::thread([this] { serve(); }).detach();
  }
  changed_.notify_all();
}

bool Stream::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty();
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return queue_.empty(); });
}

void Stream::serve() {
  for (std::unique_lock<std::mutex> lock(mutex_);;) {
    changed_.wait(lock, [this] { return !queue_.empty(); });
    const std::function<void()> work = queue_.front();   // it stays there until it has ended
    lock.unlock();
    work();
    lock.lock();
    queue_.pop_front();
    changed_.notify_all();
  }
}

int Stream::record(Event& event) {
  event = {};
  if (capture_) {
    event.capture = capture_;
    event.after = after_;
    return kSuccess;
  }
  event.done = std::make_shared<Done>();
  if (idle())
    event.done->set();
  else
    push([done = event.done] { done->set(); });
  return kSuccess;
}

int Stream::wait(const Event& event) {
  if (event.capture) {
    if (event.capture->ended) return kCapturedEvent;
    if (capture_ && capture_ != event.capture) return kMerge;
    if (!capture_) join(event.capture);
    after_.insert(after_.end(), event.after.begin(), event.after.end());
    return kSuccess;
  }
  if (!event.done) return kSuccess;
  if (capture_) return kIsolation;
  if (!event.done->is_set()) push([done = event.done] { done->wait(); });
  return kSuccess;
}

void Stream::join(const std::shared_ptr<Capture>& capture) {
  capture_ = capture;
  branch_ = capture->streams.size();
  after_.clear();
  capture->streams.push_back(this);
  capture->graph->branches.push_back(std::make_unique<Stream>());
}

void Stream::begin_capture() {
  static std::atomic<unsigned long long> captures{0};
  auto capture = std::make_shared<Capture>();
  capture->id = ++captures;
  join(capture);
}

int Stream::end_capture(std::shared_ptr<Graph>& graph) {
  const std::shared_ptr<Capture> capture = capture_;
  if (!capture || capture->streams.front() != this) return kInvalidValue;
  std::vector<bool> joined(capture->graph->nodes.size(), false);
  for (std::vector<std::size_t> more = after_; !more.empty();) {
    const std::size_t node = more.back();
    more.pop_back();
    if (joined[node]) continue;
    joined[node] = true;
    const std::vector<std::size_t>& before = capture->graph->nodes[node].after;
    more.insert(more.end(), before.begin(), before.end());
  }
  capture->ended = true;
  for (Stream* stream : capture->streams) stream->capture_.reset();
  if (std::find(joined.begin(), joined.end(), false) != joined.end()) return kUnjoined;
  graph = capture->graph;
  return kSuccess;
}

Stream* new_stream() { return new Stream; }

Stream& stream_of(void* stream) {
  static thread_local Stream* const mine = new_stream();
  return stream == nullptr ? *mine : *static_cast<Stream*>(stream);
}

void replay(const std::shared_ptr<Graph>& graph, Stream& stream) {
  stream.push([graph] {
    std::vector<std::shared_ptr<Done>> done(graph->nodes.size());
    for (auto& d : done) d = std::make_shared<Done>();
    for (std::size_t i = 0; i < done.size(); ++i) {
      const Graph::Node& node = graph->nodes[i];
      graph->branches[node.branch]->push([&node, done, i] {
        for (const std::size_t before : node.after) done[before]->wait();
        node.work();
        done[i]->set();
      });
    }
    for (const auto& d : done) d->wait();
  });
}

}  // namespace emulation

// ---- for tests, see tests/emulated.py ----

using emulation::stream_of;

#define PPLX_EXPORT extern "C" __attribute__((visibility("default")))

PPLX_EXPORT void pplx_emulation_synchronize(void* stream) { stream_of(stream).synchronize(); }
PPLX_EXPORT void* pplx_emulation_stream() { return emulation::new_stream(); }
PPLX_EXPORT void pplx_emulation_copy(void* stream, void* to, const void* from, std::size_t bytes) {
  stream_of(stream).push([=] { std::memcpy(to, from, bytes); });
}
// Later work on `stream` waits for the work that is on the other one.
PPLX_EXPORT int pplx_emulation_wait(void* stream, void* other) {
  emulation::Event event;
  const int error = stream_of(other).record(event);
  return error != 0 ? error : stream_of(stream).wait(event);
}
PPLX_EXPORT void pplx_emulation_begin_capture(void* stream) { stream_of(stream).begin_capture(); }
// A graph that lives as long as the process.
PPLX_EXPORT int pplx_emulation_end_capture(void* stream, void** graph) {
  std::shared_ptr<emulation::Graph> captured;
  const int error = stream_of(stream).end_capture(captured);
  if (error == 0) *graph = new std::shared_ptr<emulation::Graph>(captured);
  return error;
}
PPLX_EXPORT void pplx_emulation_replay(void* stream, void* graph) {
  emulation::replay(*static_cast<std::shared_ptr<emulation::Graph>*>(graph), stream_of(stream));
}
