// The range of an AllToAll that its proxy moves: blocks from and for ranks of other nodes, and words about them. The words lie in pinned
// host memory, those of arrivals in the GPU's where the process can write there; the blocks in either.
#pragma once

#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../host/carried.h"
#include "../../host/device_memory.h"
#include "../../host/fork_check.h"
#include "../../host/lost_network.h"
#include "../../protocol/mailbox.h"
#include "gdr_memory.h"
#include "memory/shared_memory.h"

namespace pplx::cuda {

// GPU memory that NICs read and write: the blocks of ranks of other nodes, where the provider takes it.
class BlockMemory {
 public:
  // Zeroed. shared: other processes map it.
  BlockMemory(int device, std::size_t bytes, bool shared);
  ~BlockMemory();
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;

  char* data() const { return static_cast<char*>(memory_.base); }
  const DeviceMemory& description() const { return memory_; }
  int descriptor() const { return shared_->descriptor(); }

 private:
  std::unique_ptr<SharedMemory> shared_;
  DeviceMemory memory_;
};

class HostHeap : public Carried {
 public:
  // `remote`: a bit for each peer that the proxy carries to. `slot_at`: see Carried, by rank; of no other peers. `blocks`,
  // `arrivals` (words): null if they lie in host memory.
  HostHeap(const Config& config, std::uint64_t remote, std::vector<std::uint32_t> slot_at, std::unique_ptr<BlockMemory> blocks,
           std::unique_ptr<GdrMemory> arrivals);
  ~HostHeap() override;

  const Config& config() const override { return config_; }
  std::uint32_t generation() const override { return generation_; }
  char* memory() const override { return memory_; }
  std::size_t bytes() const override { return heap_.bytes; }
  std::optional<DeviceMemory> blocks() const override { return blocks_ ? std::optional(blocks_->description()) : std::nullopt; }
  std::uint32_t slot_at(std::uint32_t peer) const override { return slot_at_[peer]; }
  char* arrivals() const override { return arrivals_ ? arrivals_->host() : nullptr; }
  // As kernels know them.
  char* arrivals_at() const { return arrivals_ ? arrivals_->gpu() : mapped_; }
  char* words_at() const { return mapped_; }
  char* blocks_at() const { return blocks_ ? blocks_->data() : mapped_; }
  // With node_ranks: a new descriptor of the blocks, for mates.
  int descriptor() const { return blocks_ ? blocks_->descriptor() : dup(fd_); }
  std::uint64_t pinned_bytes() const { return bytes_of(pinned_); }
  void lost_network(const Abort& abort, const std::string& message) override { losses_.lost({abort, message}); }
  void listen(LossTeller::Tell tell) { losses_.listen(std::move(tell)); }   // null: no listener, from now on
  void reset(std::uint32_t generation);   // no kernel and no proxy is at work

 private:
  struct Range {
    std::uint64_t at, bytes;
  };
  std::vector<Range> ranges_in_use() const;
  static std::uint64_t bytes_of(const std::vector<Range>& ranges);
  void pin(const Range& range);
  void release();
  [[noreturn]] void refuse(const std::string& why) const;

  const Config config_;
  const Heap heap_;
  const std::vector<std::uint32_t> slot_at_;
  int fd_ = -1;  // with node_ranks
  char* memory_ = nullptr;
  char* mapped_ = nullptr;  // the same, as kernels know it
  std::vector<Range> pinned_;
  std::unique_ptr<BlockMemory> blocks_;
  std::unique_ptr<GdrMemory> arrivals_;
  std::uint32_t generation_ = 1;
  LossTeller losses_;
  const ForkCheck fork_;
};

}  // namespace pplx::cuda
