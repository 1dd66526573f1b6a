// This library on the modelled fabric: every rank's production Proxy, fed by a model of its kernels. Or kernels that post
// themselves.
#pragma once

#include "routing.h"
#include "simulation.h"

namespace pplx::model {

// Kernel times are input: the time of one half of an operation for a number of rows.
struct KernelTime {
  double fixed_us = 0, row_us = 0;
  double of(double rows) const { return fixed_us + rows * row_us; }
};

struct OurCosts {
  KernelTime dispatch_send, dispatch_recv, combine_send, combine_recv;
  double mailbox_us = 1.45;        // from a kernel's store to the proxy that reads it
  double arrival_us = 1.45;        // from the proxy's store to the kernel that reads it
  double mapped_us = 1.3;          // from a kernel's store to another GPU's kernel
  double block_us = 0.02;          // the proxy's own time to post a write
  double word_us = 0.001;          // the proxy's own time to look at a mailbox word
  std::uint64_t shard_bytes = 256 * 1024;
  std::uint64_t part_bytes = 0;    // least bytes of a block that leaves in parts; 0: whole
  bool by_gpu = false;             // kernels post to the NIC themselves, and its signals are words in GPU memory: no proxy
  double gpu_post_us = 1.0;        // from a kernel's last store of a block to the NIC that has its work request
  double signal_us = 1.0;          // from the last byte landed to the kernel that reads the signal
  // A row crosses the network once per node: to the relay there, the rank of the same rail, from which mates pull it. In a combine
  // they store partial sums there, and the relay sends one row back.
  bool by_node = false;
  bool combine_fp8 = false;        // only by node: a relay's rows are as long as a dispatch's
  double pass_on_us = 1.95;        // from the relay's kernel that reads an arrival to a mate's that hears of it
  double pull_us = 2.6;            // a mate's load from the relay
  double pull_bytes_per_us = 307'000;
};

// A dispatch, and its combine.
std::vector<Result> run_ours(const Shape& shape, const Routing& routing, const FabricCosts& fabric, const OurCosts& costs);

}  // namespace pplx::model
