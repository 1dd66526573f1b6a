#include "handover.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "bench/native/null_fabric.h"
#include "host/atomic.h"
#include "cuda/common/arguments.h"
#include "cuda/host/host_heap.h"
#include "cuda/host/runtime.h"
#include "handover_kernels.h"
#include "proxy/proxy.h"

namespace pplx::cuda {
namespace {

using Clock = NullFabric::Clock;
constexpr std::uint32_t kWarming = 200;   // rounds that do not count
constexpr std::chrono::seconds kPatience{10};

double nanoseconds(Clock::time_point t) { return std::chrono::duration<double, std::nano>(t.time_since_epoch()).count(); }

// Pinned words, and a stream to play on.
class Stage {
 public:
  Stage(int device, std::size_t words) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    check(cudaHostAlloc(reinterpret_cast<void**>(&this->words), 8 * words, cudaHostAllocMapped | cudaHostAllocPortable),
          "cudaHostAlloc");
    std::fill_n(this->words, words, 0);
  }
  ~Stage() {
    cudaStreamSynchronize(stream);   // kernels give up by themselves
    cudaStreamDestroy(stream);
    cudaFreeHost(words);
    cudaSetDevice(before_);
  }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  cudaStream_t stream = nullptr;
  std::uint64_t* words = nullptr;

 private:
  int before_ = 0;
};

struct Pings {
  std::vector<double> rounds;
  double offset = 0;   // from the GPU's clock to the host's
};

Pings play_ping(int device, std::uint32_t rounds) {
  Stage stage(device, 3);
  check(launch_ping(stage.words, rounds + kWarming, stage.stream), "launching ping");
  Pings pings;
  double least = std::numeric_limits<double>::max();
  for (std::uint64_t i = 1; i <= rounds + kWarming; ++i) {
    const Clock::time_point begin = Clock::now();
    store_release(stage.words, i);
    while (load_acquire(stage.words + 1) != i)
      if (Clock::now() - begin > kPatience) throw CudaError("the GPU does not answer");
    const double from = nanoseconds(begin), to = nanoseconds(Clock::now());
    if (i <= kWarming) continue;
    pings.rounds.push_back(to - from);
    if (to - from >= least) continue;
    least = to - from;
    pings.offset = static_cast<double>(stage.words[2]) - (from + to) / 2;
  }
  return pings;
}

Config config_of(std::uint32_t peers) {
  Config c;
  c.world = peers + 1;
  c.rank = c.world / 2;
  c.num_experts = c.world;
  c.remote_peers = peers;
  c.on_gpu = true;
  return c;
}

}  // namespace

std::vector<double> ping(int device, std::uint32_t rounds) { return play_ping(device, rounds).rounds; }

Handover handover(int device, std::uint32_t peers, int endpoints, std::uint32_t operations) {
  if (peers < 1 || peers >= kMaxPeers) throw CudaError("handover takes 1 to " + std::to_string(kMaxPeers - 1) + " peers");
  const Pings pings = play_ping(device, 2000);
  Stage stage(device, 2 * (operations + kWarming) + 1);
  const Config c = config_of(peers);
  const std::uint64_t all = (c.world == 64 ? 0 : 1ull << c.world) - 1;
  HostHeap heap(c, all & ~(1ull << c.rank), std::vector<std::uint32_t>(c.world), nullptr, nullptr);
  NullFabric fabric(endpoints, std::size_t{peers} * kMaxEndpoints, peers);
  Proxy proxy(fabric);
  ProxyObject object;
  object.config = c;
  object.memory = heap.memory();
  object.region = fabric.register_memory(heap.memory(), heap.bytes(), heap.bytes());
  object.peers.resize(c.world);
  for (std::uint32_t peer = 0; peer < c.world; ++peer)
    if (peer != c.rank) object.peers[peer] = std::make_unique<RemoteRegion>();
  proxy.attach(std::move(object));

  const DeviceArguments arguments{c, heap_of(c), heap.words_at(), operations + kWarming, stage.words};
  check(launch_device(arguments, stage.stream), "launching handover");
  std::vector<std::pair<double, double>> posts;
  const Clock::time_point begin = Clock::now();
  while (load_acquire(stage.words + 2 * arguments.operations) == 0) {
    proxy.step();
    if (fabric.operations() > posts.size()) posts.emplace_back(nanoseconds(fabric.first()), nanoseconds(fabric.last()));
    if (Clock::now() - begin > kPatience) throw CudaError("the GPU does not answer");
  }
  if (posts.size() != arguments.operations) throw CudaError("the kernel that plays a device gave up");
  Handover h;
  h.ping = *std::min_element(pings.rounds.begin(), pings.rounds.end());
  for (std::uint32_t i = kWarming; i < arguments.operations; ++i) {
    const double stored = static_cast<double>(stage.words[2 * i]);
    h.first.push_back(posts[i].first + pings.offset - stored);
    h.last.push_back(posts[i].second + pings.offset - stored);
    h.seen.push_back(static_cast<double>(stage.words[2 * i + 1]) - stored);
  }
  return h;
}

}  // namespace pplx::cuda
