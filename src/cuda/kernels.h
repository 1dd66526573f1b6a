// The launches. Errors of the runtime come back as they are.
#pragma once

#include <cuda_runtime_api.h>

#include "arguments.h"

namespace pplx::cuda {

cudaError_t load_kernels(const Config& config);   // all that this AllToAll may launch, so that no later call loads a module
cudaError_t load_dispatch(const Config& config);   // by load_kernels()
cudaError_t launch_dispatch(const DispatchArguments& arguments, std::uint32_t blocks, cudaStream_t stream);
// Of an AllToAll with hooks, more of them.
cudaError_t load_dispatch_hooks(const Config& config);
cudaError_t launch_dispatch_hooks(const DispatchArguments& arguments, std::uint32_t blocks, cudaStream_t stream);
cudaError_t load_hooks();
cudaError_t launch_clear_hooks(std::uint32_t* words, std::uint32_t count, cudaStream_t stream);
cudaError_t launch_await_experts(const AwaitedExperts& awaited, cudaStream_t stream);
// Inside a node, of so many tokens that bulk copies pay; where the GPU has the shared memory for it.
bool can_dispatch_many(const Config& config, std::uint32_t shared_bytes);
cudaError_t load_dispatch_many(const Config& config, bool hooks);
std::uint32_t dispatch_many_parts(const Config& config);  // of a row
cudaError_t launch_dispatch_many(const DispatchArguments& arguments, std::uint32_t blocks, cudaStream_t stream);
bool can_combine_many(const Config& config, std::uint32_t shared_bytes);
cudaError_t load_combine_many(const Config& config);
cudaError_t launch_combine_many(const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream);
cudaError_t launch_combine(const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream);
// Of an AllToAll in pieces, these in their place.
cudaError_t load_dispatch_pieces(const Config& config, bool hooks);
cudaError_t launch_dispatch_pieces(const DispatchArguments& arguments, std::uint32_t blocks, cudaStream_t stream);
bool can_dispatch_many_pieces(const Config& config, std::uint32_t shared_bytes);
cudaError_t load_dispatch_many_pieces(const Config& config, bool hooks);
cudaError_t launch_dispatch_many_pieces(const DispatchArguments& arguments, std::uint32_t blocks, cudaStream_t stream);
cudaError_t load_combine_pieces(const Config& config);
cudaError_t launch_combine_pieces(const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream);
bool can_combine_many_pieces(const Config& config, std::uint32_t shared_bytes);
cudaError_t load_combine_many_pieces(const Config& config);
cudaError_t launch_combine_many_pieces(const CombineArguments& arguments, std::uint32_t blocks, cudaStream_t stream);

}  // namespace pplx::cuda
