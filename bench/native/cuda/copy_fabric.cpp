#include "copy_fabric.h"

#include <cerrno>
#include <cstring>
#include <mutex>

namespace pplx::cuda {

struct CopyFabric::Inbox {
  std::mutex mutex;
  std::deque<std::uint32_t> immediates;
};

namespace {

struct Card {
  std::uint64_t base, bytes;
};

template <typename T>
Blob to_blob(const T& value) {
  Blob blob(sizeof value);
  std::memcpy(blob.data(), &value, sizeof value);
  return blob;
}

template <typename T>
T from_blob(const Blob& blob) {
  T value;
  if (blob.size() != sizeof value)
    throw FabricError("copies between GPUs: " + std::to_string(blob.size()) + " bytes are not of this fabric");
  std::memcpy(&value, blob.data(), sizeof value);
  return value;
}

// A Fabric throws FabricError only.
void must(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw FabricError(std::string("copies between GPUs: ") + what + ": " + cudaGetErrorString(error));
}

}  // namespace

CopyFabric::CopyFabric(int device) : device_(device), inbox_(std::make_shared<Inbox>()) {
  must(cudaSetDevice(device_), "cudaSetDevice");
  // Streams share the few queues of a GPU, those of another priority have their own: a copy must not queue behind kernels.
  int least = 0, greatest = 0;
  must(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  must(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
  while (spare_.size() < kMostUnderWay) {
    cudaEvent_t event = nullptr;
    must(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    spare_.push_back(event);
  }
}

CopyFabric::~CopyFabric() { close(); }

void CopyFabric::close() {
  if (stream_ == nullptr) return;
  cudaSetDevice(device_);
  cudaStreamSynchronize(stream_);
  for (const Copy& copy : under_way_) spare_.push_back(copy.done);
  for (const cudaEvent_t event : spare_) cudaEventDestroy(event);
  cudaStreamDestroy(stream_);
  cudaGetLastError();
  under_way_.clear();
  spare_.clear();
  stream_ = nullptr;
}

// One process: an address is one.
Blob CopyFabric::address() const { return to_blob(reinterpret_cast<std::uintptr_t>(&inbox_)); }

void CopyFabric::insert_peer(int peer, const Blob& address) {
  peers_[peer] = *reinterpret_cast<const std::shared_ptr<Inbox>*>(from_blob<std::uintptr_t>(address));
}

void CopyFabric::remove_peer(int peer) { peers_.erase(peer); }

LocalRegion CopyFabric::region(void* base, std::size_t bytes, std::size_t shared_bytes) const {
  LocalRegion region;
  region.id = 0;
  region.base = base;
  region.bytes = bytes;
  region.shared_bytes = shared_bytes;
  region.description = to_blob(Card{reinterpret_cast<std::uintptr_t>(base), shared_bytes});
  return region;
}

LocalRegion CopyFabric::register_memory(void* base, std::size_t bytes, std::size_t shared_bytes) {
  return region(base, bytes, shared_bytes);
}
LocalRegion CopyFabric::register_device_memory(const DeviceMemory& memory) {
  return region(memory.base, memory.bytes, memory.shared_bytes);
}

// The setup of a first copy to that GPU may wait for kernels, so it is done now, while no kernel waits for a copy.
RemoteRegion CopyFabric::import_region(int, const Blob& description) const {
  const Card card = from_blob<Card>(description);
  cudaPointerAttributes at{};
  must(cudaSetDevice(device_), "cudaSetDevice");
  must(cudaPointerGetAttributes(&at, reinterpret_cast<const void*>(card.base)), "cudaPointerGetAttributes");
  if (at.type == cudaMemoryTypeDevice && at.device != device_) {
    const cudaError_t enabled = cudaDeviceEnablePeerAccess(at.device, 0);
    if (enabled != cudaErrorPeerAccessAlreadyEnabled) must(enabled, "cudaDeviceEnablePeerAccess");
    cudaGetLastError();
  }
  RemoteRegion region;
  region.base = card.base;
  region.bytes = card.bytes;
  return region;
}

Post CopyFabric::write(const Write& write) {
  if (spare_.empty()) return Post::Again;
  const auto peer = peers_.find(write.peer);
  if (peer == peers_.end()) throw FabricError("copies between GPUs: there is no peer " + std::to_string(write.peer));
  must(cudaSetDevice(device_), "cudaSetDevice");
  if (write.bytes > 0) {
    if (write.bytes > write.source->bytes - write.source_offset || write.bytes > write.target->bytes - write.target_offset)
      throw FabricError("copies between GPUs: a write outside its region");
    must(cudaMemcpyAsync(reinterpret_cast<char*>(write.target->base) + write.target_offset,
                          static_cast<const char*>(write.source->base) + write.source_offset, write.bytes, cudaMemcpyDefault,
                          stream_),
          "cudaMemcpyAsync");
  }
  const Copy copy{spare_.back(), peer->second, write.context, write.immediate};
  must(cudaEventRecord(copy.done, stream_), "cudaEventRecord");
  spare_.pop_back();
  under_way_.push_back(copy);
  return Post::Accepted;
}

int CopyFabric::poll(Completion* out, int capacity) {
  int n = 0;
  while (n < capacity && !under_way_.empty()) {
    const Copy copy = under_way_.front();
    const cudaError_t state = cudaEventQuery(copy.done);
    if (state == cudaErrorNotReady) break;
    under_way_.pop_front();
    spare_.push_back(copy.done);
    Completion& c = out[n++] = Completion{};
    c.context = copy.context;
    if (state != cudaSuccess) {
      c.kind = Completion::Kind::Failed;
      c.error = EIO;
      continue;
    }
    const std::lock_guard<std::mutex> lock(copy.to->mutex);
    copy.to->immediates.push_back(copy.immediate);
  }
  const std::lock_guard<std::mutex> lock(inbox_->mutex);
  while (n < capacity && !inbox_->immediates.empty()) {
    Completion& c = out[n++] = Completion{};
    c.kind = Completion::Kind::Arrived;
    c.immediate = inbox_->immediates.front();
    inbox_->immediates.pop_front();
  }
  return n;
}

std::string CopyFabric::describe_error(const Completion&) const { return "a copy failed"; }

}  // namespace pplx::cuda
