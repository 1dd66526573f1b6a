#include "launches.h"

#include <algorithm>

namespace pplx::cuda {

void Launches::Sequence::record(std::unique_ptr<StreamEvent>& event, cudaStream_t stream) {
  if (!event) event = std::make_unique<StreamEvent>();
  event->record(stream);
}

void Launches::Sequence::follow(cudaStream_t stream, bool sends) {
  const bool same = !streams_.empty() && streams_.back() == stream;
  if (!same && sent_any_) {
    if (sends) record(sent_, streams_.back());
    if (sent_) sent_->wait(stream);
  }
  sent_any_ = sent_any_ || sends;
  if (same) return;
  const auto found = std::find(streams_.begin(), streams_.end(), stream);
  if (found != streams_.end()) streams_.erase(found);
  streams_.insert(sends ? streams_.end() : streams_.begin(), stream);
}

void Launches::Sequence::note_received(cudaStream_t stream) {
  const auto found = std::find_if(received_.begin(), received_.end(), [&](const Received& r) { return r.stream == stream; });
  Received& received = found == received_.end() ? received_.emplace_back() : *found;
  received.stream = stream;
  record(received.done, stream);
}

void Launches::Sequence::after_received(cudaStream_t stream) {
  for (const Received& received : received_)
    if (received.stream != stream) received.done->wait(stream);
  received_.clear();
}

std::vector<Launches::Sequence::Open>::const_iterator Launches::Sequence::find(const char* buffer) const {
  return std::find_if(open_.begin(), open_.end(), [&](const Open& open) { return open.buffer == buffer; });
}

void Launches::Sequence::receive(const char* buffer) {
  const auto known = find(buffer);
  if (known != open_.end()) open_[static_cast<std::size_t>(known - open_.begin())].received = true;
}

void Launches::Sequence::close(const char* buffer) {
  const auto known = find(buffer);
  open_.erase(known == open_.end() ? open_.begin() : known);
}

std::optional<Launches::Sequence::Early> Launches::Sequence::early(const char* buffer, Op op) const {
  const auto known = find(buffer);
  const auto before = std::find_if(open_.begin(), known, [&](const Open& open) { return op == Op::Combine || !open.received; });
  if (known == open_.end() || before == known) return {};
  return Early{known->step, before->step};
}
std::optional<Launches::Sequence::Early> Launches::Sequence::opens_early(std::uint32_t step) const {
  const auto before = std::find_if(open_.begin(), open_.end(), [](const Open& open) { return !open.received; });
  if (before == open_.end()) return {};
  return Early{step, before->step};
}

Launches::Sequence& Launches::on(cudaStream_t stream) {
  constexpr std::size_t kCapturesAtOnce = 8;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &capture), "cudaStreamGetCaptureInfo");
  if (status == cudaStreamCaptureStatusNone) return eager_;
  for (Sequence& known : captures_)
    if (known.capture_ == capture) return known;
  if (captures_.size() == kCapturesAtOnce) captures_.pop_front();
  return captures_.emplace_back(capture);
}

Launches::Sequence& Launches::open_with(Sequence& here, const char* buffer) {
  if (!here.has(buffer)) {
    if (eager_.has(buffer)) return eager_;
    for (Sequence& captured : captures_)
      if (captured.has(buffer)) return captured;
  }
  if (here.open_.empty()) throw Misuse("no dispatch is open: this one was combined or released already");
  return here;
}

void Launches::forget_steps() {
  eager_.open_.clear();
  eager_.received_.clear();
  captures_.clear();
}

}  // namespace pplx::cuda
