// Where the warps of a thread block of dispatch meet. Senders go on while the publisher waits for their stores to have reached the
// peers: a release at system scope takes as long as the link is behind. Receivers wait for peers alone.
#pragma once

#include "../common/arguments.h"
#include "../common/gate.cuh"

namespace pplx::cuda {

inline constexpr std::uint32_t kAmongSenders = 1;
inline constexpr std::uint32_t kStored = 2;  // and 3, for units in turn: senders to publisher
inline constexpr std::uint32_t kPublished = 4;  // and 5: publisher to senders
inline constexpr std::uint32_t kClaimed = 6;  // publisher to senders, once: whose the block's share is

inline constexpr std::uint32_t kSendersAndPublisher = kSenders + 32;

__device__ inline std::uint32_t warp_of_block() { return threadIdx.x / 32; }
__device__ inline bool is_sender() { return threadIdx.x < kSenders; }
__device__ inline bool is_publisher() { return warp_of_block() == kSenderWarps; }

// Receivers with a part of their own before they take rows.
__device__ inline bool counts_rows() { return warp_of_block() == kSenderWarps + 1; }
__device__ inline bool places_rows() { return warp_of_block() == kSenderWarps + 2; }

// The one that looks at what the proxy says, where there are peers of other nodes.
__device__ inline bool looks_after_proxy() { return warp_of_block() == kSenderWarps + 3; }

__device__ inline void sync_senders() { barrier_sync<kAmongSenders, kSenders>(); }

// One side signals, the other waits.
__device__ inline void signal(std::uint32_t barrier) {
  __threadfence_block();
  barrier_arrive<kSendersAndPublisher>(barrier);
}
__device__ inline void await(std::uint32_t barrier) { barrier_sync<kSendersAndPublisher>(barrier); }

}  // namespace pplx::cuda
