// The range of an AllToAll that its proxy moves: blocks from and for ranks of other nodes, and words about them. The words lie in pinned
// host memory, those of arrivals in the GPU's where the process can write there; the blocks in either.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "../../host/carried.h"
#include "../../host/fork_check.h"
#include "../../host/lost_network.h"
#include "../../protocol/mailbox.h"
#include "block_memory.h"
#include "gdr_memory.h"

namespace pplx::cuda {

class HostHeap : public Carried {
 public:
  // `remote`: a bit for each peer that the proxy carries to. `blocks`: null if they lie in host memory.
  // `arrivals`: the same of the arrival words.
  HostHeap(const Config& config, std::uint64_t remote, std::unique_ptr<BlockMemory> blocks, std::unique_ptr<GdrMemory> arrivals);
  ~HostHeap() override;

  const Config& config() const override { return config_; }
  std::uint32_t generation() const override { return generation_; }
  char* memory() const override { return memory_; }
  std::size_t bytes() const override { return heap_.bytes; }
  std::optional<DeviceMemory> blocks() const override;
  char* arrivals() const override { return arrivals_ ? arrivals_->host() : nullptr; }
  // As kernels know them.
  char* arrivals_at() const { return arrivals_ ? arrivals_->gpu() : mapped_; }
  char* words_at() const { return mapped_; }
  char* blocks_at() const { return blocks_ ? blocks_->data() : mapped_; }
  std::uint64_t pinned_bytes() const;
  void lost_network(const Abort& abort, const std::string& message) override { losses_.lost({abort, message}); }
  void listen(LossTeller::Tell tell) { losses_.listen(std::move(tell)); }   // null: no listener, from now on
  void reset(std::uint32_t generation);   // no kernel and no proxy is at work

 private:
  struct Range {
    std::uint64_t at, bytes;
  };
  std::vector<Range> ranges_in_use() const;
  void pin(const Range& range);
  void release();
  [[noreturn]] void refuse(const std::string& why) const;

  const Config config_;
  const Heap heap_;
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
